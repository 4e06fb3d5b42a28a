/* Compressor passes over float32 vectors: signs as bits, and entries above a threshold. */
#ifndef HANSA_WIRE_H
#define HANSA_WIRE_H

#include <math.h>

#include "native.h"
#include "vector.h"

/* Signs of VL entries as bits, 1 where x >= 0 (so both zeros are +, NaN is -), the first entry lowest. */
INLINE uint32_t sign_bits(const float *x) {
#if VL == 16
    return _mm512_cmp_ps_mask(load(x), zero(), _CMP_GE_OQ);
#elif VL == 8
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(load(x), zero(), _CMP_GE_OQ));
#elif defined(HANSA_NEON)
    return mask_bits(vcgezq_f32(load(x)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < VL; i++) bits |= (uint32_t)(x[i] >= 0) << i;
    return bits;
#endif
}

/* One bit per entry, lowest first, padding bits 0; and the sum of magnitudes in 1024 float64 lanes: entry i is added to
 * lane i mod 1024, through a partial sum for each 65536 entries. The caller adds the lanes. */
static void sign_pack(const float *x, int64_t n, uint8_t *bits, double *lanes) {
    double part[HANSA_SUM_LANES];
    memset(lanes, 0, sizeof part);
    for (int64_t start = 0; start < n; start += 64 * HANSA_SUM_LANES) {
        int64_t stop = at_most(n, start + 64 * HANSA_SUM_LANES);
        memset(part, 0, sizeof part);
        for (int64_t i = start; i < stop; i += HANSA_SUM_LANES) {
            int64_t some = at_most(HANSA_SUM_LANES, stop - i), whole = some - some % 32;
            for (int64_t j = 0; j < whole; j += 32) {
                uint32_t word = 0;
                UNROLL for (int k = 0; k < 32; k += VL) word |= sign_bits(x + i + j + k) << k;
                uint8_t bytes[4] = {(uint8_t)word, (uint8_t)(word >> 8), (uint8_t)(word >> 16), (uint8_t)(word >> 24)};
                memcpy(bits + (i + j) / 8, bytes, 4);
            }
            for (int64_t j = whole; j < some; j++) {
                if (j % 8 == 0) bits[(i + j) / 8] = 0;
                bits[(i + j) / 8] |= (uint8_t)((x[i + j] >= 0) << (j % 8));
            }
            const float *row = x + i;
            for (int64_t j = 0; j < some; j++) part[j] += (double)fabsf(row[j]);
        }
        for (int j = 0; j < HANSA_SUM_LANES; j++) lanes[j] += part[j];
    }
}

/* out += scale * sign, packet after packet (out = for the first, if `fresh`), in one pass over out. */
static void sign_add(const uint8_t *const *bits, const float *scales, int64_t packets, int64_t n, int64_t fresh,
                     float *out) {
    int64_t i = 0;
#if VL == 16
    for (; i + 64 <= n; i += 64) {
        vf sum[4];
        UNROLL for (int k = 0; k < 4; k++) sum[k] = fresh ? zero() : load(out + i + 16 * k);
        for (int64_t p = 0; p < packets; p++) {
            uint64_t word;
            memcpy(&word, bits[p] + i / 8, 8);
            vf up = splat(scales[p]), down = splat(-scales[p]);
            UNROLL for (int k = 0; k < 4; k++) {
                vf value = _mm512_mask_mov_ps(down, (__mmask16)(word >> (16 * k)), up);
                sum[k] = fresh && p == 0 ? value : (vf)(sum[k] + value);
            }
        }
        UNROLL for (int k = 0; k < 4; k++) store(out + i + 16 * k, sum[k]);
    }
#elif VL == 8
    const vi lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (; i + 8 <= n; i += 8) {
        vf sum = fresh ? zero() : load(out + i);
        for (int64_t p = 0; p < packets; p++) {
            vi set = _mm256_cmpeq_epi32(_mm256_and_si256(splat_int(bits[p][i / 8]), lane), lane);
            vf value = _mm256_blendv_ps(splat(-scales[p]), splat(scales[p]), _mm256_castsi256_ps(set));
            sum = fresh && p == 0 ? value : (vf)(sum + value);
        }
        store(out + i, sum);
    }
#elif defined(HANSA_NEON)
    for (; i + 8 <= n; i += 8) {
        vf sum[2];
        UNROLL for (int k = 0; k < 2; k++) sum[k] = fresh ? zero() : load(out + i + 4 * k);
        for (int64_t p = 0; p < packets; p++) {
            vf up = splat(scales[p]), down = splat(-scales[p]);
            UNROLL for (int k = 0; k < 2; k++) {
                vf value = vbslq_f32(bits_mask((uint32_t)bits[p][i / 8] >> 4 * k), up, down);
                sum[k] = fresh && p == 0 ? value : (vf)(sum[k] + value);
            }
        }
        UNROLL for (int k = 0; k < 2; k++) store(out + i + 4 * k, sum[k]);
    }
#endif
    for (; i < n; i++) {
        float sum = fresh ? 0 : out[i];
        for (int64_t p = 0; p < packets; p++) {
            float value = bits[p][i / 8] >> (i % 8) & 1 ? scales[p] : -scales[p];
            sum = fresh && p == 0 ? value : sum + value;
        }
        out[i] = sum;
    }
}

/* Entries whose magnitude is not below the threshold (including NaN), in order; returns their number and stores as many
 * as fit. */
static int64_t reaching(const float *x, int64_t n, float threshold, int64_t room, int64_t *index, float *value) {
    int64_t found = 0, i = 0;
#if VL >= 8 || defined(HANSA_NEON)
    for (; i + 32 <= n; i += 32) {
        uint32_t hits = 0;
        UNROLL for (int k = 0; k < 32; k += VL) {
#if VL == 16
            hits |= (uint32_t)_mm512_cmp_ps_mask(_mm512_abs_ps(load(x + i + k)), splat(threshold), _CMP_NLT_UQ) << k;
#elif defined(HANSA_NEON)
            hits |= mask_bits(vmvnq_u32(vcltq_f32(vabsq_f32(load(x + i + k)), splat(threshold)))) << k;
#else
            vf magnitude = _mm256_andnot_ps(splat(-0.0f), load(x + i + k));
            hits |= (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(magnitude, splat(threshold), _CMP_NLT_UQ)) << k;
#endif
        }
        for (; hits; hits &= hits - 1, found++) {
            if (found >= room) continue;
            index[found] = i + __builtin_ctz(hits);
            value[found] = x[index[found]];
        }
    }
#endif
    for (; i < n; i++) {
        if (fabsf(x[i]) < threshold) continue;
        if (found < room) {
            index[found] = i;
            value[found] = x[i];
        }
        found++;
    }
    return found;
}

#endif
