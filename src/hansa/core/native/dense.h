/* Dense compressors: 16-bit floats, and quantization levels of a few bits. One pass finds the largest magnitude, a
 * second encodes; results are bit-identical to NumPy's on every instruction set. */
#ifndef HANSA_DENSE_H
#define HANSA_DENSE_H

#include <math.h>

#include "draw.h"
#include "native.h"
#include "vector.h"

enum { DENSE_CUT = 1024 };
/* A barrier between two loops that prevents fused multiply-add across it. */
#define ROUNDED __asm__ volatile("" ::: "memory")

INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The largest magnitude. Magnitudes are ordered like their bits, with infinity and NaN on top. */
static float highest32(const float *x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        top = top < bits ? bits : top;
    }
    return bits_float(top);
}

INLINE uint16_t half_of(float unit, float most, int brain) {
    float size = fabsf(unit) < most ? fabsf(unit) : most;
    uint32_t sign = float_bits(unit) >> 16 & 0x8000u, bits = float_bits(size);
    if (brain) return (uint16_t)(sign | (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    if (bits < 0x38800000u) return (uint16_t)(sign | (float_bits(size + 0.5f) - 0x3f000000u)); /* on the grid of 2^-24 */
    return (uint16_t)(sign | (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13);
}

#if VL == 16
typedef __m256i vh;
INLINE vh float16_of(vf x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vh bfloat16_of(vf x) {
    vi bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat_int(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, splat_int(0x7fff)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}
INLINE vf within(vf x, float most) { return _mm512_max_ps(_mm512_min_ps(x, splat(most)), splat(-most)); }
INLINE void store_half(uint16_t *p, vh x) { _mm256_storeu_si256((__m256i *)p, x); }
#elif VL == 8
typedef __m128i vh;
INLINE vh float16_of(vf x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE vh bfloat16_of(vf x) {
    vi bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat_int(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, splat_int(0x7fff)), odd), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}
INLINE vf within(vf x, float most) { return _mm256_max_ps(_mm256_min_ps(x, splat(most)), splat(-most)); }
INLINE void store_half(uint16_t *p, vh x) { _mm_storeu_si128((__m128i *)p, x); }
#elif defined(HANSA_NEON)
typedef uint16x4_t vh;
INLINE vh float16_of(vf x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }
INLINE vh bfloat16_of(vf x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
}
INLINE vf within(vf x, float most) { return vmaxnmq_f32(vminnmq_f32(x, splat(most)), splat(-most)); }
INLINE void store_half(uint16_t *p, vh x) { vst1_u16(p, x); }
#endif

/* x scale[0] scale[1], clamped to magnitude `most` (`most` below 1), rounded to nearest even: float16, or bfloat16 if
 * `brain`. */
static void half_pack(const float *x, int64_t n, const float *scale, float most, int64_t brain, uint16_t *out) {
    const float a = scale[0], b = scale[1];
    int64_t i = 0;
#if VL >= 8 || defined(HANSA_NEON)
    for (; i + VL <= n; i += VL) {
        vf unit = within(load(x + i) * splat(a) * splat(b), most);
        store_half(out + i, brain ? bfloat16_of(unit) : float16_of(unit));
    }
#endif
    for (; i < n; i++) out[i] = half_of(x[i] * a * b, most, brain != 0);
}

/* Pack eight codes of `width` <= 8 bits, one per byte, into the low `width` bytes of one word. */
INLINE uint64_t squeezed(uint64_t word, int width) {
    word = (word & 0x00ff00ff00ff00ffu) | (word & 0xff00ff00ff00ff00u) >> (8 - width);
    word = (word & 0x0000ffff0000ffffu) | (word & 0xffff0000ffff0000u) >> 2 * (8 - width);
    return (word & 0x00000000ffffffffu) | (word & 0xffffffff00000000u) >> 4 * (8 - width);
}

/* Pack `count` codes, one per byte and zero-padded to a multiple of eight, at `width` bits; returns the end, and may
 * write seven bytes beyond it. */
INLINE uint8_t *squeeze(const uint8_t *codes, int64_t count, int width, uint8_t *out) {
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t word;
        memcpy(&word, codes + i, 8);
        word = squeezed(word, width);
        memcpy(out + i / 8 * width, &word, 8);
    }
    return out + (count * width + 7) / 8;
}

#if VL == 16
/* The upper half of x m, m = high 2^32 + low. */
INLINE __m512i upper_half(__m512i x, __m512i high, __m512i low) {
    __m512i up = _mm512_srli_epi64(x, 32), mask = _mm512_set1_epi64(0xffffffff);
    __m512i t = _mm512_add_epi64(_mm512_mul_epu32(up, low), _mm512_srli_epi64(_mm512_mul_epu32(x, low), 32));
    __m512i u = _mm512_add_epi64(_mm512_mul_epu32(x, high), _mm512_and_si512(t, mask));
    t = _mm512_add_epi64(_mm512_mul_epu32(up, high), _mm512_srli_epi64(t, 32));
    return _mm512_add_epi64(t, _mm512_srli_epi64(u, 32));
}

/* The Philox blocks of eight consecutive counters. */
INLINE void philox_eight(const uint64_t *keys, uint64_t counter, uint64_t *out) {
    const __m512i m0 = _mm512_set1_epi64((long long)PHILOX_TIMES0), m1 = _mm512_set1_epi64((long long)PHILOX_TIMES1);
    const __m512i h0 = _mm512_srli_epi64(m0, 32), h1 = _mm512_srli_epi64(m1, 32);
    __m512i x0 = _mm512_add_epi64(_mm512_set1_epi64((long long)counter), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    __m512i x1 = _mm512_setzero_si512(), x2 = x1, x3 = x1;
    UNROLL for (int round = 0; round < 10; round++) {
        __m512i k0 = _mm512_set1_epi64((long long)keys[2 * round]), k1 = _mm512_set1_epi64((long long)keys[2 * round + 1]);
        __m512i y0 = _mm512_ternarylogic_epi64(upper_half(x2, h1, m1), x1, k0, 0x96); /* exclusive or of three */
        __m512i y2 = _mm512_ternarylogic_epi64(upper_half(x0, h0, m0), x3, k1, 0x96);
        x1 = _mm512_mullo_epi64(x2, m1);
        x3 = _mm512_mullo_epi64(x0, m0);
        x0 = y0;
        x2 = y2;
    }
    __m512i pairs[4] = {_mm512_unpacklo_epi64(x0, x1), _mm512_unpacklo_epi64(x2, x3), _mm512_unpackhi_epi64(x0, x1),
                        _mm512_unpackhi_epi64(x2, x3)};
    UNROLL for (int i = 0; i < 4; i++) {
        __m128i *to = (__m128i *)(out + 2 * i);
        _mm_storeu_si128(to, _mm512_extracti64x2_epi64(pairs[i], 0));
        _mm_storeu_si128(to + 4, _mm512_extracti64x2_epi64(pairs[i], 1));
        _mm_storeu_si128(to + 8, _mm512_extracti64x2_epi64(pairs[i], 2));
        _mm_storeu_si128(to + 12, _mm512_extracti64x2_epi64(pairs[i], 3));
    }
}
enum { PHILOX_AT_ONCE = 8 };
#define philox_some philox_eight
#elif VL == 8
/* The upper and the lower half of x m, m = high 2^32 + low. */
INLINE void product_halves(__m256i x, __m256i high, __m256i low, __m256i *upper, __m256i *lower) {
    const __m256i mask = _mm256_set1_epi64x(0xffffffff);
    __m256i up = _mm256_srli_epi64(x, 32), first = _mm256_mul_epu32(x, low);
    __m256i t = _mm256_add_epi64(_mm256_mul_epu32(up, low), _mm256_srli_epi64(first, 32));
    __m256i u = _mm256_add_epi64(_mm256_mul_epu32(x, high), _mm256_and_si256(t, mask));
    t = _mm256_add_epi64(_mm256_mul_epu32(up, high), _mm256_srli_epi64(t, 32));
    *upper = _mm256_add_epi64(t, _mm256_srli_epi64(u, 32));
    *lower = _mm256_blend_epi32(first, _mm256_slli_epi64(u, 32), 0xaa);
}

/* The Philox blocks of six consecutive counters: four in vectors and two in scalars, which the CPU multiplies
 * concurrently. */
INLINE void philox_six(const uint64_t *keys, uint64_t counter, uint64_t *out) {
    const __m256i m0 = _mm256_set1_epi64x((long long)PHILOX_TIMES0), m1 = _mm256_set1_epi64x((long long)PHILOX_TIMES1);
    const __m256i h0 = _mm256_srli_epi64(m0, 32), h1 = _mm256_srli_epi64(m1, 32);
    __m256i x0 = _mm256_add_epi64(_mm256_set1_epi64x((long long)counter), _mm256_setr_epi64x(0, 1, 2, 3));
    __m256i x1 = _mm256_setzero_si256(), x2 = x1, x3 = x1;
    uint64_t a0 = counter + 4, a1 = 0, a2 = 0, a3 = 0, b0 = counter + 5, b1 = 0, b2 = 0, b3 = 0;
    UNROLL for (int round = 0; round < 10; round++) {
        uint64_t k0 = keys[2 * round], k1 = keys[2 * round + 1];
        __m256i high0, low0, high1, low1;
        product_halves(x0, h0, m0, &high0, &low0);
        unsigned __int128 p = (unsigned __int128)a0 * PHILOX_TIMES0, q = (unsigned __int128)a2 * PHILOX_TIMES1;
        product_halves(x2, h1, m1, &high1, &low1);
        unsigned __int128 r = (unsigned __int128)b0 * PHILOX_TIMES0, s = (unsigned __int128)b2 * PHILOX_TIMES1;
        x0 = _mm256_xor_si256(_mm256_xor_si256(high1, x1), _mm256_set1_epi64x((long long)k0));
        x2 = _mm256_xor_si256(_mm256_xor_si256(high0, x3), _mm256_set1_epi64x((long long)k1));
        x1 = low1;
        x3 = low0;
        a0 = (uint64_t)(q >> 64) ^ a1 ^ k0;
        a2 = (uint64_t)(p >> 64) ^ a3 ^ k1;
        b0 = (uint64_t)(s >> 64) ^ b1 ^ k0;
        b2 = (uint64_t)(r >> 64) ^ b3 ^ k1;
        a1 = (uint64_t)q, a3 = (uint64_t)p, b1 = (uint64_t)s, b3 = (uint64_t)r;
    }
    __m256i even0 = _mm256_unpacklo_epi64(x0, x1), odd0 = _mm256_unpackhi_epi64(x0, x1);
    __m256i even1 = _mm256_unpacklo_epi64(x2, x3), odd1 = _mm256_unpackhi_epi64(x2, x3);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(even0, even1, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 4), _mm256_permute2x128_si256(odd0, odd1, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 8), _mm256_permute2x128_si256(even0, even1, 0x31));
    _mm256_storeu_si256((__m256i *)(out + 12), _mm256_permute2x128_si256(odd0, odd1, 0x31));
    out[16] = a0, out[17] = a1, out[18] = a2, out[19] = a3, out[20] = b0, out[21] = b1, out[22] = b2, out[23] = b3;
}
enum { PHILOX_AT_ONCE = 6 };
#define philox_some philox_six
#else
enum { PHILOX_AT_ONCE = 2 };
#define philox_some philox_pair
#endif

/* The 32-bit numbers from `first`, a multiple of 8, of which Generator.random(dtype=float32) uses the upper 24 bits:
 * the lower half of each 64 bits first. Writes whole blocks. */
static void draw_numbers(const uint64_t *keys, int64_t first, int64_t count, uint32_t *out) {
    uint64_t block[4 * PHILOX_AT_ONCE];
    for (int64_t i = 0; i < count; i += 8 * PHILOX_AT_ONCE) {
        philox_some(keys, (uint64_t)(first + i) / 8 + 1, block);
        memcpy(out + i, block, sizeof block);
    }
}

/* Encode each entry as levels + l with l = |x| levels / M, rounded up or down by the draw (to nearest even without a
 * key) with the sign of x; M, the largest magnitude of its bucket, goes to norms. Returns 0 if an entry is non-finite.
 * `out` has eight bytes more than the codes take. */
static int64_t levels_pack(const float *x, int64_t n, int64_t bucket, int64_t levels, int64_t width,
                           const uint64_t *key, float *norms, uint8_t *out) {
    float scaled[DENSE_CUT];
    uint32_t drawn[DENSE_CUT + 8 * PHILOX_AT_ONCE];
    uint64_t keys[20];
    uint8_t codes[DENSE_CUT];
    const float top = (float)levels;
    const int32_t middle = (int32_t)levels;
    if (key) philox_keys(key, keys);
    for (int64_t start = 0; start < n; start += bucket) {
        int64_t stop = at_most(n, start + bucket);
        float most = highest32(x + start, stop - start), over = most > 0 ? most : 1;
        if (!isfinite(most)) return 0;
        norms[start / bucket] = most;
        for (int64_t i = start, some; i < stop; i += some) {
            some = at_most(DENSE_CUT, stop - i);
            const float *from = x + i;
            for (int64_t j = 0; j < some; j++) scaled[j] = fabsf(from[j]) / over * top;
            ROUNDED;
            if (key) {
                draw_numbers(keys, i, some, drawn);
                for (int64_t j = 0; j < some; j++) scaled[j] = scaled[j] + (float)(int32_t)(drawn[j] >> 8) * 0x1p-24f;
            } else {
                for (int64_t j = 0; j < some; j++) scaled[j] = (scaled[j] + 0x1.8p23f) - 0x1.8p23f;
            }
            for (int64_t j = 0; j < some; j++) {
                int32_t level = (int32_t)(scaled[j] < top ? scaled[j] : top);
                codes[j] = (uint8_t)(from[j] < 0 ? middle - level : middle + level);
            }
            for (int64_t j = some; j % 8; j++) codes[j] = 0;
            out = squeeze(codes, some, (int)width, out);
        }
    }
    return 1;
}

#endif
