/* A first stage of few channels (grey or colour images) behind a pool, where no vector runs over the input's channels:
 * both directions run over filters and broadcast inputs, and meet a whole pool window at once. */
#ifndef HANSA_FEW_H
#define HANSA_FEW_H

#include "conv.h"

INLINE int few_supported(ptrdiff_t K, ptrdiff_t C) {
    return (K == 5 && (C == 1 || (C == 3 && WIDE_REGISTERS))) || (K == 3 && (C == 1 || C == 3));
}

#define FEW_POOLED (WIDE_REGISTERS ? 7 : 3)

/* One input row for N positions of the pair of output rows it lies under: of the upper one if A, the lower one if B. */
INLINE void few_row(const int C, const int N, const int A, const int B, const float *x, ptrdiff_t length,
                    const float *weight, ptrdiff_t tap, vf *upper, vf *lower) {
    for (ptrdiff_t r = 0; r < length; r++, x++, weight += tap) {
        OPAQUE(x); /* or the compiler carries inputs over to the next tap, in registers it does not have */
        vf above = A ? load(weight) : zero(), below = B ? load(weight - length * tap) : zero();
        UNROLL for (int n = 0; n < N; n++) {
            vf value = splat(x[n * C]);
            if (A) upper[n] = madd(value, above, upper[n]);
            if (B) lower[n] = madd(value, below, lower[n]);
        }
    }
}

/* N / 2 pooled positions of one output vector: two rows of N positions in registers, then ReLU and pool. */
INLINE void few_tile(const int C, const int N, const float *x, ptrdiff_t row, ptrdiff_t K, const float *weight,
                     ptrdiff_t tap, const float *bias, int relu, float *out, int32_t *which, ptrdiff_t out_step) {
    vf upper[14], lower[14];
    UNROLL for (int n = 0; n < N; n++) upper[n] = lower[n] = load(bias);
    few_row(C, N, 1, 0, x, K * C, weight, tap, upper, lower);
    for (ptrdiff_t u = 1; u < K; u++)
        few_row(C, N, 1, 1, x + u * row, K * C, weight + u * K * C * tap, tap, upper, lower);
    few_row(C, N, 0, 1, x + K * row, K * C, weight + K * K * C * tap, tap, upper, lower);
    UNROLL for (int n = 0; n < N / 2; n++) {
        vf best = upper[2 * n];
        vi index = splat_int(0);
        challenge(&best, &index, upper[2 * n + 1], 1);
        challenge(&best, &index, lower[2 * n], 2);
        challenge(&best, &index, lower[2 * n + 1], 3);
        store(out + n * out_step, relu ? where_positive(best, best) : best);
        store_int(which + n * out_step, index);
    }
}

/* One row of `count` pooled positions, all output vectors. */
static void few_forward(const filters_t *filters, ptrdiff_t C, const float *x, int relu, float *out, int32_t *which,
                        ptrdiff_t count) {
    ptrdiff_t K = filters->window.rows, row = filters->window.row, out_step = filters->out_step;
    ptrdiff_t tiles = (count + FEW_POOLED - 1) / FEW_POOLED;
    for (ptrdiff_t o = 0; o < out_step; o += VL) {
        ptrdiff_t pair = o - o % (2 * VL), tap = at_most(2 * VL, out_step - pair);
        const float *w = filters->weight + pair * K * K * C + (o - pair);
        for (ptrdiff_t t = 0, p = 0, many; t < tiles; t++, p += many) {
            many = (count - p + tiles - t - 1) / (tiles - t);
#define FEW_CASE(C, N)                                                                                              \
    case 100 * C + N:                                                                                              \
        few_tile(C, N, x + 2 * p * C, row, K, w, tap, filters->bias + o, relu, out + p * out_step + o,             \
                 which + p * out_step + o, out_step);                                                              \
        break;
            switch (100 * C + 2 * many) {
                FEW_CASE(1, 2) FEW_CASE(1, 4) FEW_CASE(1, 6) FEW_CASE(3, 2) FEW_CASE(3, 4) FEW_CASE(3, 6)
#if WIDE_REGISTERS
                FEW_CASE(1, 8) FEW_CASE(1, 10) FEW_CASE(1, 12) FEW_CASE(1, 14)
                FEW_CASE(3, 8) FEW_CASE(3, 10) FEW_CASE(3, 12) FEW_CASE(3, 14)
#endif
            }
#undef FEW_CASE
        }
    }
}

/* dW of a first layer of few channels behind a pool, R kernel rows of one output vector, dw being [taps][out_step]:
 * vectors run over filters. Each input that a pool window reaches is broadcast once, for all four places at which
 * filters may have chosen. */
INLINE void few_filters(const int K, const int C, const int R, const float *x, ptrdiff_t row, const float *g,
                        const int32_t *which, ptrdiff_t height, ptrdiff_t width, ptrdiff_t out_step, float *dw) {
    vf sum[27];
    UNROLL for (int t = 0; t < R * K * C; t++) sum[t] = load(dw + t * out_step);
    for (ptrdiff_t py = 0; py < height; py++) {
        const float *at = x + 2 * py * row;
        for (ptrdiff_t px = 0; px < width; px++, at += 2 * C, g += out_step, which += out_step) {
            OPAQUE(at); /* as above */
            vf all = load(g), chosen[4];
            vi place = load_int(which);
            UNROLL for (int q = 0; q < 4; q++) chosen[q] = where_equal(place, splat_int(q), all);
            UNROLL for (int r = 0; r <= R; r++) UNROLL for (int k = 0; k < (K + 1) * C; k++) {
                vf value = splat(at[r * row + k]);
                UNROLL for (int q = 0; q < 4; q++) {
                    const int up = r - (q >> 1), left = k - (q & 1) * C;
                    if (up >= 0 && up < R && left >= 0 && left < K * C)
                        sum[up * K * C + left] = madd(value, chosen[q], sum[up * K * C + left]);
                }
            }
        }
    }
    UNROLL for (int t = 0; t < R * K * C; t++) store(dw + t * out_step, sum[t]);
}

static void few(ptrdiff_t K, ptrdiff_t C, const float *x, ptrdiff_t row, const float *g, const int32_t *which,
                ptrdiff_t height, ptrdiff_t width, ptrdiff_t out_step, float *dw) {
#define FEW_ROWS(K, C, R, from)                                                                                     \
    few_filters(K, C, R, x + (from) * row, row, g + o, which + o, height, width, out_step,                         \
                dw + (from) * K * C * out_step + o)
    for (ptrdiff_t o = 0; o < out_step; o += VL) {
#if WIDE_REGISTERS
        if (K == 5 && C == 1) FEW_ROWS(5, 1, 5, 0);
        else if (K == 5) {
            FEW_ROWS(5, 3, 1, 0);
            FEW_ROWS(5, 3, 1, 1);
            FEW_ROWS(5, 3, 1, 2);
            FEW_ROWS(5, 3, 1, 3);
            FEW_ROWS(5, 3, 1, 4);
        } else if (C == 3) FEW_ROWS(3, 3, 3, 0);
        else FEW_ROWS(3, 1, 3, 0);
#else
        if (K == 5) {
            FEW_ROWS(5, 1, 2, 0);
            FEW_ROWS(5, 1, 2, 2);
            FEW_ROWS(5, 1, 1, 4);
        } else if (C == 3) {
            FEW_ROWS(3, 3, 1, 0);
            FEW_ROWS(3, 3, 1, 1);
            FEW_ROWS(3, 3, 1, 2);
        } else FEW_ROWS(3, 1, 3, 0);
#endif
    }
#undef FEW_ROWS
}

#endif
