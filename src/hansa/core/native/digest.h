/* A digest of many words by blocks, at memory bandwidth.
 *
 * For 4096 words w with keys k: the sum of (w_i + k_i)(w_j + k_j) over even i, j = i + 1, with the sums in parentheses
 * modulo 2^32 and the rest modulo 2^64 (NH of UMAC, Black et al. 1999); and the same with the keys shifted by 4. */
#ifndef HANSA_DIGEST_H
#define HANSA_DIGEST_H

#include "vector.h"

#define DIGEST_WORDS 4096
#define DIGEST_SHIFT 4

INLINE uint64_t digest_pair(const uint32_t *w, const uint32_t *k) {
    return (uint64_t)(uint32_t)(w[0] + k[0]) * (uint32_t)(w[1] + k[1]);
}

static void digest_block(const uint32_t *words, int64_t count, const uint32_t *keys, uint64_t *out) {
    uint64_t one = 0, two = 0;
    int64_t i = 0;
#if VL == 16
    __m512i sum = _mm512_setzero_si512(), other = sum;
    for (; i + 16 <= count; i += 16) {
        __m512i w = _mm512_loadu_si512(words + i);
        __m512i a = _mm512_add_epi32(w, _mm512_loadu_si512(keys + i));
        __m512i b = _mm512_add_epi32(w, _mm512_loadu_si512(keys + i + DIGEST_SHIFT));
        sum = _mm512_add_epi64(sum, _mm512_mul_epu32(a, _mm512_srli_epi64(a, 32)));
        other = _mm512_add_epi64(other, _mm512_mul_epu32(b, _mm512_srli_epi64(b, 32)));
    }
    uint64_t parts[2][8]; /* the intrinsic that adds lanes does so in signed numbers */
    memcpy(parts[0], &sum, sizeof parts[0]);
    memcpy(parts[1], &other, sizeof parts[1]);
    for (int lane = 0; lane < 8; lane++) {
        one += parts[0][lane];
        two += parts[1][lane];
    }
#elif VL == 8
    __m256i sum = _mm256_setzero_si256(), other = sum;
    for (; i + 8 <= count; i += 8) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(words + i));
        __m256i a = _mm256_add_epi32(w, _mm256_loadu_si256((const __m256i *)(keys + i)));
        __m256i b = _mm256_add_epi32(w, _mm256_loadu_si256((const __m256i *)(keys + i + DIGEST_SHIFT)));
        sum = _mm256_add_epi64(sum, _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32)));
        other = _mm256_add_epi64(other, _mm256_mul_epu32(b, _mm256_srli_epi64(b, 32)));
    }
    uint64_t parts[4];
    memcpy(parts, &sum, sizeof parts);
    one = parts[0] + parts[1] + parts[2] + parts[3];
    memcpy(parts, &other, sizeof parts);
    two = parts[0] + parts[1] + parts[2] + parts[3];
#elif defined(HANSA_NEON)
    uint64x2_t sum = vdupq_n_u64(0), other = sum;
    for (; i + 4 <= count; i += 4) {
        uint32x4_t w = vld1q_u32(words + i);
        uint64x2_t a = vreinterpretq_u64_u32(vaddq_u32(w, vld1q_u32(keys + i)));
        uint64x2_t b = vreinterpretq_u64_u32(vaddq_u32(w, vld1q_u32(keys + i + DIGEST_SHIFT)));
        sum = vmlal_u32(sum, vmovn_u64(a), vshrn_n_u64(a, 32));
        other = vmlal_u32(other, vmovn_u64(b), vshrn_n_u64(b, 32));
    }
    one = vaddvq_u64(sum);
    two = vaddvq_u64(other);
#endif
    for (; i < count; i += 2) {
        uint32_t last[2] = {words[i], i + 1 < count ? words[i + 1] : 0};
        one += digest_pair(last, keys + i);
        two += digest_pair(last, keys + i + DIGEST_SHIFT);
    }
    out[0] = one;
    out[1] = two;
}

/* Two digest words per block; the last block may be shorter. */
static void digest(const uint32_t *words, int64_t count, const uint32_t *keys, uint64_t *out) {
    for (int64_t i = 0; i < count; i += DIGEST_WORDS, out += 2)
        digest_block(words + i, at_most(DIGEST_WORDS, count - i), keys, out);
}

#endif
