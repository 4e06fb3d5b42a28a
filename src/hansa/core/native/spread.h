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
 * null) has for each chosen row the destination of its x - start, or null. The cuts are taken one after the other, so
 * that a pass which changes the rows can call `spread_cut` while they are in the cache. */
typedef struct {
    const float *x;
    const int64_t *chosen;
    int64_t count, d, stride; /* of the `stride` entries of a row, the first d are compared */
    const float *start;
    float *const *moved;
    const float *rows[SPREAD_ROWS];
    wide_t all[4 * VL / WIDE];
} spread_t;

static void spread_begin(spread_t *s) {
    memset(s->all, 0, sizeof s->all);
    for (int64_t r = 0; s->count <= SPREAD_ROWS && r < s->count; r++) s->rows[r] = s->x + s->chosen[r] * s->stride;
}

/* The cut from entry i, a multiple of SPREAD_CUT or d; returns the next. */
static ptrdiff_t spread_cut(spread_t *s, ptrdiff_t i) {
    const ptrdiff_t stop = i + at_most(SPREAD_CUT, (i < s->d ? s->d : s->stride) - i);
    for (int64_t r = 0; s->moved && r < s->count; r++)
        moved_part(s->x + s->chosen[r] * s->stride + i, s->start + i, s->moved[r] ? s->moved[r] + i : NULL, stop - i);
    if (s->count > SPREAD_ROWS || i >= s->d) return stop;
    vf squares[4] = {zero(), zero(), zero(), zero()};
    float lanes[4 * VL];
    for (; i + 4 * VL <= stop; i += 4 * VL) spread_tile(4, 0, s->rows, s->count, i, VL, squares);
    for (; i < stop; i += VL) spread_tile(1, 1, s->rows, s->count, i, stop - i, squares);
    UNROLL for (int k = 0; k < 4; k++) store(lanes + k * VL, squares[k]);
    UNROLL for (int k = 0; k < 4 * VL / WIDE; k++) s->all[k] += widened(lanes + k * WIDE);
    return stop;
}

static double spread_end(const spread_t *s) {
    double sums[4 * VL], total = 0;
    memcpy(sums, s->all, sizeof sums);
    for (int k = 0; k < 4 * VL; k++) total += sums[k];
    if (s->count <= SPREAD_ROWS && isfinite(total) && total > 1e-20) return total;
    return spread64(s->x, s->chosen, s->count, s->d, s->stride);
}

static double squared_spread(const float *x, const int64_t *chosen, int64_t count, int64_t d, int64_t stride, const float *start,
                     float *const *moved) {
    spread_t spread = {.x = x, .chosen = chosen, .count = count, .d = d, .stride = stride, .start = start, .moved = moved};
    spread_begin(&spread);
    for (ptrdiff_t i = 0; i < stride;) i = spread_cut(&spread, i);
    return spread_end(&spread);
}

#endif
