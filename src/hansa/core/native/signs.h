/* Scaled signs of the difference of two vectors in one pass, for compressed gossip. */
#ifndef HANSA_SIGNS_H
#define HANSA_SIGNS_H

#include <math.h>

#include "server.h"
#include "wire.h"

/* The exactly rounded sum (Shewchuk 1997), as in Python's fsum, of non-negative numbers. */
static double exact_sum(const double *x, int64_t n) {
    double part[64], high = 0, low = 0;
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = x[i];
        int kept = 0;
        for (int j = 0; j < count; j++) {
            double a = value, b = part[j];
            if (fabs(a) < fabs(b)) {
                double swap = a;
                a = b;
                b = swap;
            }
            volatile double sum = a + b, back = sum - a;
            double rest = b - back;
            if (rest != 0) part[kept++] = rest;
            value = sum;
        }
        part[kept++] = value;
        count = kept;
    }
    while (count > 0) {
        double a = high, b = part[--count];
        volatile double sum = a + b, back = sum - a;
        high = sum;
        low = b - back;
        if (low != 0) break;
    }
    if (count > 0 && low != 0 && (low < 0) == (part[count - 1] < 0) && part[count - 1] != 0) {
        volatile double twice = 2 * low, sum = high + twice, back = sum - high;
        if (back == twice) high = sum;
    }
    return high;
}

/* The sum of |a - b|, bit-identical to `sign_pack`. */
static double exact_distance(const float *a, const float *b, int64_t n) {
    double lanes[HANSA_SUM_LANES], part[HANSA_SUM_LANES];
    memset(lanes, 0, sizeof lanes);
    for (int64_t start = 0; start < n; start += 64 * HANSA_SUM_LANES) {
        int64_t stop = at_most(n, start + 64 * HANSA_SUM_LANES);
        memset(part, 0, sizeof part);
        for (int64_t i = start; i < stop; i += HANSA_SUM_LANES)
            for (int64_t j = 0; j < at_most(HANSA_SUM_LANES, stop - i); j++) {
                float apart = a[i + j] - b[i + j];
                part[j] += (double)fabsf(apart);
            }
        for (int j = 0; j < HANSA_SUM_LANES; j++) lanes[j] += part[j];
    }
    return exact_sum(lanes, HANSA_SUM_LANES);
}

/* Adds the magnitudes of 32 entries to their lanes; returns their signs as in `sign_bits`. */
INLINE uint32_t sizes_and_signs(const float *a, const float *b, wide_t *lanes) {
    uint32_t word = 0;
#if VL == 16
    __m512d one = _mm512_set1_pd(1);
    __asm__("" : "+v"(one)); /* sums as multiplications by one: the adders are busy with differences and conversions */
    UNROLL for (int k = 0; k < 4; k++) {
        __m256 apart = _mm256_loadu_ps(a + 8 * k) - _mm256_loadu_ps(b + 8 * k);
        word |= (uint32_t)_mm256_cmp_ps_mask(apart, _mm256_setzero_ps(), _CMP_GE_OQ) << 8 * k;
        lanes[k] = _mm512_fmadd_pd(_mm512_cvtps_pd(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), apart)), one, lanes[k]);
    }
#elif VL == 8
    UNROLL for (int k = 0; k < 4; k++) {
        vf apart = load(a + 8 * k) - load(b + 8 * k), size = _mm256_andnot_ps(splat(-0.0f), apart);
        word |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(apart, zero(), _CMP_GE_OQ)) << 8 * k;
        lanes[2 * k] += _mm256_cvtps_pd(_mm256_castps256_ps128(size));
        lanes[2 * k + 1] += _mm256_cvtps_pd(_mm256_extractf128_ps(size, 1));
    }
#elif defined(HANSA_NEON)
    UNROLL for (int k = 0; k < 8; k++) {
        vf apart = load(a + 4 * k) - load(b + 4 * k), size = vabsq_f32(apart);
        word |= mask_bits(vcgezq_f32(apart)) << 4 * k;
        lanes[2 * k] += (wide_t)vcvt_f64_f32(vget_low_f32(size));
        lanes[2 * k + 1] += (wide_t)vcvt_high_f64_f32(size);
    }
#else
    float apart[32], size[32];
    UNROLL for (int k = 0; k < 32; k += VL) store(apart + k, load(a + k) - load(b + k));
    UNROLL for (int k = 0; k < 32; k += VL) word |= sign_bits(apart + k) << k;
    UNROLL for (int k = 0; k < 32; k++) size[k] = fabsf(apart[k]);
    UNROLL for (int k = 0; k < 32; k += WIDE) lanes[k / WIDE] += widened(size + k);
#endif
    return word;
}

/* The scale of the signs of a - b, and the signs as bits, equal to `sign_pack` of that vector. The sum need be exact
 * only to float32 precision. NaN if an entry of a - b is non-finite. */
static float sign_difference(const float *a, const float *b, int64_t n, uint8_t *bits) {
    double sum = 0;
    for (int64_t i = 0, stop; i < n; i = stop) { /* few enough additions per lane for the slack below */
        wide_t lanes[32 / WIDE];
        stop = at_most(n, i + 64 * HANSA_SUM_LANES);
        memset(lanes, 0, sizeof lanes);
        for (; i + 32 <= stop; i += 32) {
            uint32_t word = sizes_and_signs(a + i, b + i, lanes);
            uint8_t bytes[4] = {(uint8_t)word, (uint8_t)(word >> 8), (uint8_t)(word >> 16), (uint8_t)(word >> 24)};
            memcpy(bits + i / 8, bytes, 4);
        }
        if (i < stop) {
            float left[32] = {0}, right[32] = {0};
            memcpy(left, a + i, sizeof(float) * (size_t)(stop - i));
            memcpy(right, b + i, sizeof(float) * (size_t)(stop - i));
            uint32_t word = sizes_and_signs(left, right, lanes) & ((1u << (stop - i)) - 1u);
            for (int64_t k = 0; k < stop - i; k += 8) bits[(i + k) / 8] = (uint8_t)(word >> k);
        }
        sum += sum_of_lanes(lanes);
    }
    if (!isfinite(sum)) return (float)NAN;
    double slack = sum * 0x1p-40;
    if ((float)((sum - slack) / (double)n) != (float)((sum + slack) / (double)n)) sum = exact_distance(a, b, n);
    return (float)(sum / (double)n);
}

/* +scale where a bit is set, -scale where it is not, for VL entries from `i`, a multiple of VL. */
INLINE vf signed_scale(const uint8_t *bits, ptrdiff_t i, float scale) {
#if VL == 16
    uint16_t word;
    memcpy(&word, bits + i / 8, sizeof word);
    return _mm512_mask_mov_ps(splat(-scale), word, splat(scale));
#elif VL == 8
    const vi lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    vi set = _mm256_cmpeq_epi32(_mm256_and_si256(splat_int(bits[i / 8]), lane), lane);
    return _mm256_blendv_ps(splat(-scale), splat(scale), _mm256_castsi256_ps(set));
#elif defined(HANSA_NEON)
    return vbslq_f32(bits_mask((uint32_t)bits[i / 8] >> i % 8), splat(scale), splat(-scale));
#else
    float values[VL];
    for (int k = 0; k < VL; k++) values[k] = bits[(i + k) / 8] >> (i + k) % 8 & 1 ? scale : -scale;
    return load(values);
#endif
}

#endif
