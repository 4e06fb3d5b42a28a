/* Decoding of dense packets: 16-bit floats, quantization levels, multiples of a power of two. Each has a validation that
 * reads the codes only and a pass that writes the vector or adds it to one; bits are NumPy's on every instruction set.
 * Codes may start at any address. */
#ifndef HANSA_DENSE_READ_H
#define HANSA_DENSE_READ_H

#include "dense.h"
#include "native.h"
#include "vector.h"

INLINE uint32_t short_at(const uint8_t *from, int64_t i) { return (uint32_t)from[2 * i] | (uint32_t)from[2 * i + 1] << 8; }

INLINE float float_at(const uint8_t *from, int64_t i) {
    float x;
    memcpy(&x, from + 4 * i, sizeof x);
    return x;
}

/* out += part, entry by entry. `part` is rounded before: the two are never fused. */
INLINE void add_part(const float *part, int64_t n, float *out) {
    __asm__ volatile("" ::"r"(part) : "memory");
    for (int64_t i = 0; i < n; i++) out[i] += part[i];
}

/* 16-bit floats ------------------------------------------------------------------------------------------------------ */

/* Whether all magnitudes are below 1: magnitudes are ordered like their bits, with infinity and NaN on top. */
static int64_t half_check(const uint8_t *codes, int64_t n, int64_t brain) {
    uint16_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t size;
        memcpy(&size, codes + 2 * i, sizeof size);
        size &= 0x7fff;
        top = top < size ? size : top;
    }
    return top < (brain ? 0x3f80 : 0x3c00);
}

/* The value of a 16-bit float below 1. */
INLINE float half_value(uint32_t code, int brain) {
    uint32_t size = code & 0x7fffu;
    if (brain) return bits_float(code << 16);
    float value = size < 0x400u ? (float)(int32_t)size * 0x1p-24f : bits_float((size << 13) + 0x38000000u);
    return bits_float(float_bits(value) | (code & 0x8000u) << 16);
}

#if VL == 16
INLINE vf half_values(const uint8_t *from, int brain) {
    __m256i codes = _mm256_loadu_si256((const __m256i *)from);
    if (!brain) return _mm512_cvtph_ps(codes);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
}
#elif VL == 8
INLINE vf half_values(const uint8_t *from, int brain) {
    __m128i codes = _mm_loadu_si128((const __m128i *)from);
    if (!brain) return _mm256_cvtph_ps(codes);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(codes), 16));
}
#elif defined(HANSA_NEON)
INLINE vf half_values(const uint8_t *from, int brain) {
    uint16x4_t codes = vreinterpret_u16_u8(vld1_u8(from));
    if (!brain) return vcvt_f32_f16(vreinterpret_f16_u16(codes));
    return vreinterpretq_f32_u32(vshll_n_u16(codes, 16));
}
#endif

INLINE void half_values_of(const uint8_t *codes, int64_t n, float a, float b, int brain, float *out) {
    int64_t i = 0;
#if VL >= 8 || defined(HANSA_NEON)
    for (; i + VL <= n; i += VL) store(out + i, half_values(codes + 2 * i, brain) * splat(a) * splat(b));
#endif
    for (; i < n; i++) out[i] = half_value(short_at(codes, i), brain) * a * b;
}

/* out = v scale[0] scale[1] for the valid codes of v; with `adds`, out += (v scale[0] scale[1]) alpha. */
static void half_unpack(const uint8_t *codes, int64_t n, const float *scale, int64_t brain, int64_t adds, float alpha,
                        float *out) {
    float part[DENSE_CUT];
    for (int64_t i = 0, some; i < n; i += some) {
        some = adds ? at_most(DENSE_CUT, n - i) : n;
        float *to = adds ? part : out;
        if (brain) half_values_of(codes + 2 * i, some, scale[0], scale[1], 1, to);
        else half_values_of(codes + 2 * i, some, scale[0], scale[1], 0, to);
        if (!adds) continue;
        for (int64_t j = 0; j < some; j++) part[j] *= alpha;
        add_part(part, some, out + i);
    }
}

/* Codes of a few bits ------------------------------------------------------------------------------------------------ */

/* Spread eight codes of `width` <= 8 bits, in the low `width` bytes of a word, to one per byte; ignores the others. */
INLINE uint64_t spread_bytes(uint64_t word, int width) {
    const uint64_t ones = ((uint64_t)1 << width) - 1;
    if (width == 8) return word;
    word = (word & (((uint64_t)1 << 4 * width) - 1)) | (word >> 4 * width) << 32;
    word = (word & (ones | ones << width) * 0x0000000100000001u) |
           (word & ((ones | ones << width) << 2 * width) * 0x0000000100000001u) << (16 - 2 * width);
    return (word & ones * 0x0001000100010001u) | (word & (ones << width) * 0x0001000100010001u) << (8 - width);
}

/* The eight codes from entry i, a multiple of 8, of `bytes` bytes of codes; zeros after the end. */
INLINE uint64_t eight_codes(const uint8_t *codes, int64_t bytes, int64_t i, int width) {
    uint64_t word = 0;
    int64_t from = i / 8 * width;
    if (from + 8 <= bytes) memcpy(&word, codes + from, 8);
    else memcpy(&word, codes + from, (size_t)at_most(width, bytes - from));
    return spread_bytes(word, width);
}

#if VL >= 8
/* How to take VL codes of `width` bits, lowest first: the two bytes that hold code k, how far to shift them, a mask. */
typedef struct {
    vi bytes, shifts, mask;
} code_map;

INLINE code_map map_codes(int width) {
    uint8_t bytes[4 * VL];
    int32_t shifts[VL];
    code_map map;
    for (int k = 0; k < VL; k++) {
        bytes[4 * k] = (uint8_t)(k * width / 8);
        bytes[4 * k + 1] = (uint8_t)(width == 8 ? 0x80 : k * width / 8 + 1);
        bytes[4 * k + 2] = bytes[4 * k + 3] = 0x80; /* zero */
        shifts[k] = k * width % 8;
    }
    memcpy(&map.bytes, bytes, sizeof bytes);
    memcpy(&map.shifts, shifts, sizeof shifts);
    map.mask = splat_int((1 << width) - 1);
    return map;
}

/* The VL codes that start at a byte; reads 16 bytes. */
INLINE vi some_codes(const uint8_t *from, const code_map *map) {
    __m128i data = _mm_loadu_si128((const __m128i *)from);
#if VL == 16
    vi pairs = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(data), map->bytes);
    return _mm512_and_si512(_mm512_srlv_epi32(pairs, map->shifts), map->mask);
#else
    vi pairs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(data), map->bytes);
    return _mm256_and_si256(_mm256_srlv_epi32(pairs, map->shifts), map->mask);
#endif
}
#endif

INLINE int64_t code_bytes(int64_t n, int width) { return (n * width + 7) / 8; }

/* Whether all n codes of `width` <= 8 bits are at most 2 levels, and the bits after the last are zero. */
static int64_t levels_check(const uint8_t *codes, int64_t n, int64_t levels, int64_t width) {
    const int64_t bytes = code_bytes(n, (int)width);
    uint8_t top = 0;
    int64_t i = 0;
    if (n * width % 8 && codes[bytes - 1] >> (n * width % 8)) return 0;
#if VL >= 8
    const code_map map = map_codes((int)width);
    vi most = splat_int(0);
    for (; i / 8 * width + 16 <= bytes; i += VL) {
#if VL == 16
        most = _mm512_max_epi32(most, some_codes(codes + i / 8 * width, &map));
#else
        most = _mm256_max_epi32(most, some_codes(codes + i / 8 * width, &map));
#endif
    }
    int32_t lanes[VL];
    store_int(lanes, most);
    for (int k = 0; k < VL; k++) top = top < lanes[k] ? (uint8_t)lanes[k] : top;
#endif
    for (; i < n; i += 8) {
        uint64_t word = eight_codes(codes, bytes, i, (int)width);
        for (int k = 0; k < 8; k++, word >>= 8) top = top < (uint8_t)word ? (uint8_t)word : top;
    }
    return top <= 2 * levels;
}

/* (code - levels) / levels of `some` codes from entry i, a multiple of 8; may write seven more. */
static void unit_levels(const uint8_t *codes, int64_t bytes, int64_t i, int64_t some, int levels, int width,
                        float *out) {
    const float whole = (float)levels;
    int64_t j = 0;
#if VL >= 8
    /* The correctly rounded quotient: a product with the rounded reciprocal, and one correction. */
    const code_map map = map_codes(width);
    const vf over = splat(1 / whole), middle = splat(whole);
    for (; j + VL <= some && (i + j) / 8 * width + 16 <= bytes; j += VL) {
        vi code = some_codes(codes + (i + j) / 8 * width, &map);
#if VL == 16
        vf level = _mm512_cvtepi32_ps(code) - middle, guess = level * over;
        store(out + j, madd(_mm512_fnmadd_ps(guess, middle, level), over, guess));
#else
        vf level = _mm256_cvtepi32_ps(code) - middle, guess = level * over;
        store(out + j, madd(_mm256_fnmadd_ps(guess, middle, level), over, guess));
#endif
    }
#endif
    for (; j < some; j += 8) {
        uint64_t word = eight_codes(codes, bytes, i + j, width);
        for (int k = 0; k < 8; k++, word >>= 8) out[j + k] = (float)((int)(word & 0xff) - levels) / whole;
    }
}

/* out = ((code - levels) / levels) norm, norm that of the entry's bucket; with `adds`, out += that times alpha. */
static void levels_unpack(const uint8_t *codes, int64_t n, int64_t bucket, int64_t levels, int64_t width,
                          const uint8_t *norms, int64_t adds, float alpha, float *out) {
    const int64_t bytes = code_bytes(n, (int)width);
    float part[DENSE_CUT];
    for (int64_t i = 0, some; i < n; i += some) {
        some = at_most(DENSE_CUT, n - i);
        unit_levels(codes, bytes, i, some, (int)levels, (int)width, part);
        for (int64_t j = 0, stop; j < some; j = stop) {
            int64_t which = (i + j) / bucket;
            float norm = float_at(norms, which);
            stop = at_most(some, (which + 1) * bucket - i);
            if (adds) {
                for (int64_t k = j; k < stop; k++) part[k] = part[k] * norm * alpha;
            } else {
                for (int64_t k = j; k < stop; k++) out[i + k] = part[k] * norm;
            }
        }
        if (adds) add_part(part, some, out + i);
    }
}

/* Whole numbers ------------------------------------------------------------------------------------------------------ */

/* out = number scale[0] scale[1]; with `adds`, out += that times alpha. */
static void numbers_write(const int32_t *numbers, int64_t n, const float *scale, int64_t adds, float alpha, float *out) {
    const float a = scale[0], b = scale[1];
    float part[DENSE_CUT];
    if (!adds) {
        for (int64_t i = 0; i < n; i++) out[i] = (float)numbers[i] * a * b;
        return;
    }
    for (int64_t i = 0, some; i < n; i += some) {
        some = at_most(DENSE_CUT, n - i);
        for (int64_t j = 0; j < some; j++) part[j] = (float)numbers[i + j] * a * b * alpha;
        add_part(part, some, out + i);
    }
}

#endif
