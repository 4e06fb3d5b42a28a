/* A first stage with few channels (grey or colour images) and a pool, vectorized over other axes than input channels:
 * forward over filters, with inputs broadcast, one pool window at a time; backward along the rows of each gradient's
 * window. */
#ifndef HANSA_FEW_CHANNELS_H
#define HANSA_FEW_CHANNELS_H

#include "convback.h"

INLINE int few_supported(ptrdiff_t K, ptrdiff_t C) {
    return (K == 3 || K == 5) && (C == 1 || C == 3);
}

#define FEW_POOLED (WIDE_REGISTERS ? 7 : 3)

/* One input row for N positions of the pair of output rows it lies under: of the upper one if A, the lower one if B. */
INLINE void few_row(const int C, const int N, const int A, const int B, const float *x, ptrdiff_t length,
                    const float *weight, ptrdiff_t tap, vf *upper, vf *lower) {
    for (ptrdiff_t r = 0; r < length; r++, x++, weight += tap) {
        OPAQUE(x); /* keeps the compiler from carrying inputs over to the next tap, which would spill registers */
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

/* dW of one filter of a first layer with few channels and a pool, from a list of gradients: the sum of value times
 * window, each of whose K rows is W short vectors. `dw` is [K][FEW_ROW]; entries beyond a row's end are unused. Two
 * alternating sums hide the latency of addition. */
#define FEW_ROW 16

#if VL == 16
#define SHORT 8
typedef __m256 sf;
INLINE sf short_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void short_store(float *p, sf v) { _mm256_storeu_ps(p, v); }
INLINE sf short_madd(float a, sf b, sf c) { return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c); }
#else
#define SHORT VL
typedef vf sf;
INLINE sf short_load(const float *p) { return load(p); }
INLINE void short_store(float *p, sf v) { store(p, v); }
INLINE sf short_madd(float a, sf b, sf c) { return madd(splat(a), b, c); }
#endif

INLINE void few_window(const int K, const int W, const float *x, ptrdiff_t row1, ptrdiff_t row3, float value, sf *sum) {
    UNROLL for (int r = 0; r < K; r++) {
        const char *line = (const char *)x + (r == 3 ? row3 : r * row1);
        UNROLL for (int w = 0; w < W; w++)
            sum[r * W + w] = short_madd(value, short_load((const float *)line + w * SHORT), sum[r * W + w]);
    }
}

INLINE void few_filter(const int K, const int W, const float *x, ptrdiff_t row, const float *value,
                       const int32_t *place, ptrdiff_t count, float *dw) {
    const int turns = K * W <= 6;
    ptrdiff_t row1 = row * (ptrdiff_t)sizeof(float), row3 = 3 * row1, i = 0;
    sf sum[20], other[20];
    OPAQUE(row1);
    OPAQUE(row3);
    UNROLL for (int r = 0; r < K; r++) UNROLL for (int w = 0; w < W; w++) {
        sum[r * W + w] = short_load(dw + r * FEW_ROW + w * SHORT);
        other[r * W + w] = (sf){0};
    }
    for (; turns && i + 2 <= count; i += 2) {
        few_window(K, W, x + place[i], row1, row3, value[i], sum);
        few_window(K, W, x + place[i + 1], row1, row3, value[i + 1], other);
    }
    for (; i < count; i++) few_window(K, W, x + place[i], row1, row3, value[i], sum);
    UNROLL for (int r = 0; r < K; r++) UNROLL for (int w = 0; w < W; w++)
        short_store(dw + r * FEW_ROW + w * SHORT, turns ? (sf)(sum[r * W + w] + other[r * W + w]) : sum[r * W + w]);
}

/* dW[filter][K][FEW_ROW] += for one image. */
static void few_filters(ptrdiff_t K, ptrdiff_t C, const float *x, ptrdiff_t row, sparse_t list, ptrdiff_t filters,
                        float *dw) {
#define FEW_FILTERS(K, C)                                                                                           \
    for (ptrdiff_t o = 0; o < filters; o++)                                                                        \
        few_filter(K, (K * C + SHORT - 1) / SHORT, x, row, list.value + list.start[o], list.place + list.start[o], \
                   list.start[o + 1] - list.start[o], dw + o * K * FEW_ROW)
    if (K == 5 && C == 1) FEW_FILTERS(5, 1);
    else if (K == 5) FEW_FILTERS(5, 3);
    else if (C == 1) FEW_FILTERS(3, 1);
    else FEW_FILTERS(3, 3);
#undef FEW_FILTERS
}

#endif
