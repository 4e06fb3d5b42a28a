/* The end of a cohort's round in one pass over its models: their distance to the mean, and the changes of some. */
#ifndef HANSA_SPREAD_H
#define HANSA_SPREAD_H

#include <math.h>

#include "native.h"
#include "server.h"
#include "vector.h"

enum { SPREAD_ROWS = 16, SPREAD_CUT = 1024 };

/* sum_i ||x_i - mean||^2 over the chosen rows, of `stride` entries each, in float64: 32 entries at a time, so that they
 * stay in the cache, in 32 lanes. */
static double spread64(const float *x, const int64_t *chosen, int64_t count, int64_t d, int64_t stride) {
    const double share = 1.0 / (double)count;
    wide_t squares[32 / WIDE];
    double flat[32];
    int64_t i = 0;
    memset(squares, 0, sizeof squares);
    for (; i + 32 <= d; i += 32) {
        wide_t mean[32 / WIDE];
        memset(mean, 0, sizeof mean);
        for (int64_t r = 0; r < count; r++)
            UNROLL for (int j = 0; j < 32 / WIDE; j++) mean[j] += widened(x + chosen[r] * stride + i + j * WIDE);
        UNROLL for (int j = 0; j < 32 / WIDE; j++) mean[j] *= share;
        for (int64_t r = 0; r < count; r++)
            UNROLL for (int j = 0; j < 32 / WIDE; j++) {
                wide_t apart = widened(x + chosen[r] * stride + i + j * WIDE) - mean[j];
                squares[j] += apart * apart;
            }
    }
    memcpy(flat, squares, sizeof flat);
    for (int j = 0; i < d; i++, j++) {
        double mean = 0;
        for (int64_t r = 0; r < count; r++) mean += (double)x[chosen[r] * stride + i];
        mean *= share;
        for (int64_t r = 0; r < count; r++) {
            double apart = (double)x[chosen[r] * stride + i] - mean;
            flat[j] += apart * apart;
        }
    }
    return sum_of_lanes(flat);
}

/* x - start of a row, if requested. */
INLINE void moved_part(const float *x, const float *start, float *out, ptrdiff_t some) {
    if (out)
        for (ptrdiff_t j = 0; j < some; j += VL)
            store_part(out + j, load_part(x + j, some - j) - load_part(start + j, some - j), some - j);
}

/* N vectors of all chosen rows, the last partial if PART: sum ||x_i - x_0||^2 - ||sum (x_i - x_0)||^2 / n. */
INLINE void spread_tile(const int N, const int PART, const float *const *rows, int64_t count, ptrdiff_t i,
                        ptrdiff_t lanes, vf *squares) {
    const vf share = splat(-1.0f / (float)count);
    vf base[4], sum[4];
#define TAKE(p, j) (PART ? load_part((p) + i + (j) * VL, lanes) : load((p) + i + (j) * VL))
    UNROLL for (int j = 0; j < N; j++) {
        base[j] = TAKE(rows[0], j);
        sum[j] = zero();
    }
    for (int64_t r = 1; r < count; r++)
        UNROLL for (int j = 0; j < N; j++) {
            vf apart = TAKE(rows[r], j) - base[j];
            sum[j] = sum[j] + apart;
            squares[j] = madd(apart, apart, squares[j]);
        }
    UNROLL for (int j = 0; j < N; j++) squares[j] = madd(sum[j] * share, sum[j], squares[j]);
#undef TAKE
}

/* The same for up to SPREAD_ROWS rows to about seven digits: differences to the first row and sums over a cut in
 * float32, sums over all cuts in float64. If the squares exceed the range of float32, all in float64. `moved` (may be
 * null) has for each chosen row the destination of its x - start, or null. */
static double squared_spread(const float *x, const int64_t *chosen, int64_t count, int64_t d, int64_t stride, const float *start,
                     float *const *moved) {
    const float *rows[SPREAD_ROWS];
    const int few = count <= SPREAD_ROWS;
    double total = 0;
    wide_t all[4 * VL / WIDE];
    memset(all, 0, sizeof all);
    for (int64_t r = 0; few && r < count; r++) rows[r] = x + chosen[r] * stride;
    for (ptrdiff_t i = 0, some; i < stride; i += some) {
        some = at_most(SPREAD_CUT, (i < d ? d : stride) - i);
        for (int64_t r = 0; moved && r < count; r++)
            moved_part(x + chosen[r] * stride + i, start + i, moved[r] ? moved[r] + i : NULL, some);
        if (!few || i >= d) continue;
        vf squares[4] = {zero(), zero(), zero(), zero()};
        float lanes[4 * VL];
        ptrdiff_t j = i;
        for (; j + 4 * VL <= i + some; j += 4 * VL) spread_tile(4, 0, rows, count, j, VL, squares);
        for (; j < i + some; j += VL) spread_tile(1, 1, rows, count, j, i + some - j, squares);
        UNROLL for (int k = 0; k < 4; k++) store(lanes + k * VL, squares[k]);
        UNROLL for (int k = 0; k < 4 * VL / WIDE; k++) all[k] += widened(lanes + k * WIDE);
    }
    double sums[4 * VL];
    memcpy(sums, all, sizeof sums);
    for (int k = 0; k < 4 * VL; k++) total += sums[k];
    return few && isfinite(total) && total > 1e-20 ? total : spread64(x, chosen, count, d, stride);
}

#endif
