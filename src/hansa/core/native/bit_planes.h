/* Entropy coding of integers by blocks, byte-identical to hansa/compress/entropy_coding.py: one plane for the numbers
 * >= 1, one for those >= 2, and so on, then the remainders, low bits and signs. */
#ifndef HANSA_BIT_PLANES_H
#define HANSA_BIT_PLANES_H

#include <math.h>
#include <stdlib.h>

#include "dense.h"
#include "native.h"
#include "vector.h"

enum { PLANES_BLOCK = 1 << 14, PLANES_MOST = 24, PLANES_FEW = 12, PLANES_PAD = 64 };
enum { INDEX_BITMAP, INDEX_VARINT, INDEX_RICE };

/* Arrays are zero-padded to a multiple of 64 entries, so that their bits fill whole words. */
typedef struct {
    int32_t codes[PLANES_BLOCK + PLANES_PAD], sizes[PLANES_BLOCK + PLANES_PAD], highs[PLANES_BLOCK + PLANES_PAD];
    uint32_t parts[PLANES_BLOCK + PLANES_PAD];
    uint64_t bits[PLANES_BLOCK / 64 + 1], others[PLANES_BLOCK / 64 + 1];
} planes_room;

INLINE uint8_t *put_short(uint8_t *out, int64_t value) {
    out[0] = (uint8_t)value;
    out[1] = (uint8_t)(value >> 8);
    return out + 2;
}

INLINE uint8_t *put_varint(uint8_t *out, uint32_t value) {
    for (; value >= 128; value >>= 7) *out++ = (uint8_t)(value | 128);
    *out++ = (uint8_t)value;
    return out;
}

INLINE uint8_t *put_words(uint8_t *out, const uint64_t *words, int64_t bytes) {
    memcpy(out, words, (size_t)bytes);
    return out + bytes;
}

INLINE int64_t packed_bytes(int64_t count, int width) { return count * (width / 8) + (count * (width % 8) + 7) / 8; }

/* Codes at `width` bits: whole low bytes first, one plane each, then the remaining high bits. */
static uint8_t *put_packed(const uint32_t *codes, int64_t count, int width, uint8_t *out) {
    uint8_t bytes[DENSE_CUT];
    for (int shift = 0; shift < width / 8 * 8; shift += 8, out += count)
        INDEPENDENT for (int64_t i = 0; i < count; i++) out[i] = (uint8_t)(codes[i] >> shift);
    int high = width % 8, shift = width - high;
    if (!high) return out;
    for (int64_t i = 0, some; i < count; i += some) {
        some = at_most(DENSE_CUT, count - i);
        for (int64_t j = 0; j < some; j++) bytes[j] = (uint8_t)(codes[i + j] >> shift);
        for (int64_t j = some; j % 8; j++) bytes[j] = 0;
        out = squeeze(bytes, some, high, out);
    }
    return out;
}

/* One bit per number, set if it is >= `least`; returns the number of set bits. */
static int64_t reach(const int32_t *x, int64_t n, int32_t least, uint64_t *bits) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t word = 0;
#if VL == 16
        UNROLL for (int k = 0; k < 64; k += 16)
            word |= (uint64_t)_mm512_cmpge_epi32_mask(load_int(x + i + k), splat_int(least)) << k;
#elif VL == 8
        UNROLL for (int k = 0; k < 64; k += 8)
            word |= (uint64_t)(uint32_t)_mm256_movemask_ps(
                        _mm256_castsi256_ps(_mm256_cmpgt_epi32(load_int(x + i + k), splat_int(least - 1))))
                    << k;
#elif defined(HANSA_NEON)
        UNROLL for (int k = 0; k < 64; k += 4)
            word |= (uint64_t)mask_bits(vcgeq_s32(load_int(x + i + k), splat_int(least))) << k;
#else
        for (int k = 0; k < 64; k++) word |= (uint64_t)(x[i + k] >= least) << k;
#endif
        bits[i / 64] = word;
        count += __builtin_popcountll(word);
    }
    return count;
}

/* Encode increasing indices below n, given as bits, in the shortest of three codes, recorded in the flags. */
static uint8_t *put_indices(const uint64_t *bits, int64_t n, int64_t count, const uint32_t *gaps, int *flags,
                            uint32_t *parts, uint8_t *out) {
    int64_t total = 0, least = INT64_MAX, varint = count, bitmap = (n + 7) / 8;
    int width = 0;
    for (int64_t i = 0; i < count; i++) {
        total += gaps[i];
        varint += gaps[i] >= 128;
    }
    int widths = 2;
    for (int64_t mean = count ? total / count : 0; mean; mean >>= 1) widths++;
    for (int w = 0; w < widths; w++) {
        int64_t unary = count;
        for (int64_t i = 0; i < count; i++) unary += gaps[i] >> w;
        int64_t size = (unary + 7) / 8 + packed_bytes(count, w);
        if (size < least) {
            least = size;
            width = w;
        }
    }
    if (bitmap <= varint && bitmap <= least) {
        *flags = INDEX_BITMAP << 1;
        return put_words(out, bits, bitmap);
    }
    if (varint <= least) {
        *flags = INDEX_VARINT << 1;
        for (int64_t i = 0; i < count; i++) out = put_varint(out, gaps[i]);
        return out;
    }
    *flags = INDEX_RICE << 1 | width << 3;
    int64_t end = -1, unary = least - packed_bytes(count, width);
    memset(out, 0, (size_t)unary);
    for (int64_t i = 0; i < count; i++) {
        end += (gaps[i] >> width) + 1;
        out[end / 8] |= (uint8_t)(1u << end % 8);
        parts[i] = gaps[i] & ((1u << width) - 1u);
    }
    return put_packed(parts, count, width, out + unary);
}

/* Encode one plane of n numbers: the indices that reach it or those that do not, whichever are fewer. Moves the numbers
 * that reach it to the front and returns their count. */
static int64_t put_plane(planes_room *room, int64_t n, int32_t plane, uint8_t **out) {
    int64_t count = reach(room->highs, n, plane, room->bits), words = (n + 63) / 64, listed = 0, kept = 0, last = -1;
    int flipped = 2 * count > n, flags;
    uint32_t *gaps = room->parts;
    if (flipped) {
        for (int64_t i = 0; i < words; i++) room->bits[i] = ~room->bits[i];
        if (n % 64) room->bits[words - 1] &= ((uint64_t)1 << n % 64) - 1;
    }
    for (int64_t i = 0; i < words; i++) {
        for (uint64_t word = room->bits[i]; word; word &= word - 1) {
            int64_t at = 64 * i + __builtin_ctzll(word);
            gaps[listed] = (uint32_t)(at - last - 1);
            if (!flipped) room->highs[listed] = room->highs[at];
            listed++;
            last = at;
        }
    }
    if (flipped) {
        for (int64_t i = 0; i < n; i++) {
            int32_t value = room->highs[i];
            room->highs[kept] = value;
            kept += value >= plane;
        }
    }
    memset(room->highs + count, 0, PLANES_PAD * sizeof(int32_t));
    uint8_t *head = *out;
    *out = put_indices(room->bits, n, listed, gaps, &flags, gaps, head + 5);
    put_short(put_short(head, listed), *out - head - 5);
    head[4] = (uint8_t)(flags | flipped);
    return count;
}

/* Encode the signs of the nonzero numbers, one bit each. */
static uint8_t *put_negative(planes_room *room, int64_t n, uint8_t *out) {
    reach(room->sizes, n, 1, room->bits);
    reach(room->codes, n, 0, room->others);
    uint64_t word = 0;
    int filled = 0;
    for (int64_t i = 0; i < (n + 63) / 64; i++) {
        uint64_t some = room->bits[i], negative = ~room->others[i], packed = 0;
        int count = __builtin_popcountll(some);
#if VL >= 8
        packed = _pext_u64(negative, some);
#else
        for (int k = 0; some; some &= some - 1, k++) packed |= (negative >> __builtin_ctzll(some) & 1) << k;
#endif
        word |= packed << filled;
        if (filled + count >= 64) {
            out = put_words(out, &word, 8);
            word = filled ? packed >> (64 - filled) : 0;
            filled -= 64;
        }
        filled += count;
    }
    return put_words(out, &word, (filled + 7) / 8);
}

/* Encode the block of n numbers in room->codes. */
static uint8_t *put_block(planes_room *room, int64_t n, uint8_t *out) {
    uint8_t *start = out;
    int64_t total = 0, left = n;
    int shift = -2, planes = 0;
    memset(room->codes + n, 0, PLANES_PAD * sizeof(int32_t));
    for (int64_t i = 0; i < n + PLANES_PAD; i++) room->sizes[i] = abs(room->codes[i]);
    for (int64_t i = 0; i < n; i++) total += room->sizes[i];
    for (int64_t mean = total / n; mean; mean >>= 1) shift++;
    shift = shift < 0 ? 0 : shift;
    for (int64_t i = 0; i < n + PLANES_PAD; i++) room->highs[i] = room->sizes[i] >> shift;
    for (out += 2; planes < PLANES_MOST && (left > PLANES_FEW || !planes);) left = put_plane(room, left, ++planes, &out);
    if (left) {
        uint8_t *rest = out;
        out += 2;
        for (int64_t i = 0; i < left; i++) out = put_varint(out, (uint32_t)(room->highs[i] - planes));
        put_short(rest, out - rest - 2);
    }
    if (shift) {
        for (int64_t i = 0; i < n; i++) room->parts[i] = (uint32_t)room->sizes[i] & ((1u << shift) - 1u);
        out = put_packed(room->parts, n, shift, out);
    }
    start[0] = (uint8_t)shift;
    start[1] = (uint8_t)planes;
    return put_negative(room, n, out);
}

/* rint(x scale[0] scale[1]), clamped to magnitude `most`, an integer. */
static void round_numbers(const float *x, int64_t n, const float *scale, float most, int32_t *out) {
    const float a = scale[0], b = scale[1];
    int64_t i = 0;
#if VL == 16
    for (; i + 16 <= n; i += 16) store_int(out + i, _mm512_cvtps_epi32(within(load(x + i) * splat(a) * splat(b), most)));
#elif VL == 8
    for (; i + 8 <= n; i += 8) store_int(out + i, _mm256_cvtps_epi32(within(load(x + i) * splat(a) * splat(b), most)));
#elif defined(HANSA_NEON)
    for (; i + 4 <= n; i += 4) store_int(out + i, vcvtnq_s32_f32(within(load(x + i) * splat(a) * splat(b), most)));
#endif
    for (; i < n; i++) {
        float unit = x[i] * a * b;
        out[i] = (int32_t)rintf(unit > most ? most : unit < -most ? -most : unit);
    }
}

/* Encode rint(x scale[0] scale[1]), clamped to magnitude `most`; or, without x, the given numbers. Returns the number
 * of bytes, -1 if out of memory; `out` has eight bytes more than the maximum for 24-bit numbers. */
static int64_t planes_pack(const float *x, const int32_t *numbers, int64_t n, const float *scale, int64_t most,
                           uint8_t *out) {
    planes_room *room = malloc(sizeof *room);
    uint8_t *start = out;
    if (!room) return -1;
    for (int64_t i = 0, some; i < n; i += some) {
        some = at_most(PLANES_BLOCK, n - i);
        if (x) {
            round_numbers(x + i, some, scale, (float)most, room->codes);
        } else {
            memcpy(room->codes, numbers + i, sizeof(int32_t) * (size_t)some);
        }
        out = put_block(room, some, out);
    }
    free(room);
    return out - start;
}

#endif
