/* Gossip on a ring, each row with the previous and the next: a few columns of all rows pass through registers, so that
 * every entry is read once and written once. The sums are those of `fold`, in its order. */
#ifndef HANSA_RING_H
#define HANSA_RING_H

#include "native.h"
#include "signs.h"
#include "vector.h"

#define RING_VECTORS (WIDE_REGISTERS ? 4 : 2)

typedef struct {
    float *x, *open;
    const float *const *from;      /* per row: where what it sends is read */
    const float *weights, *scales; /* weights: three per row, in the order of places */
    const uint8_t *bits;
    ptrdiff_t rows, d, bits_row;
    vf rate;
} ring_t;

/* Whether all rows are alive and linked only to themselves and their neighbours; fills `weights` (three per row). */
static int ring_of(const hansa_cohort *c, float *weights) {
    const int64_t n = c->rows, links = n == 2 ? 2 : 3;
    if (n < 2) return 0;
    for (int64_t row = 0; row < n; row++) {
        const int64_t inner[3] = {row - 1, row, row + 1}, top[3] = {0, 1, n - 1}, end[3] = {0, n - 2, n - 1};
        const int64_t *wanted = n == 2 || row == 0 ? top : row == n - 1 ? end : inner;
        const int64_t *given = c->links + c->starts[row];
        if (c->starts[row + 1] - c->starts[row] != links) return 0;
        for (int64_t k = 0; k < links; k++) {
            if (given[k] != wanted[k]) return 0;
            weights[3 * row + k] = (float)c->weights[c->starts[row] + k];
        }
    }
    return 1;
}

/* N vectors of what a row sends, the last partial if PART: its model, or its public copy, first updated by the
 * signs. */
INLINE void ring_take(const int KIND, const int N, const int PART, const ring_t *ring, ptrdiff_t row, ptrdiff_t i,
                      ptrdiff_t lanes, vf *out) {
    const float *from = ring->from[row] + i;
    UNROLL for (int j = 0; j < N; j++) {
        out[j] = load_part(from + j * VL, PART ? lanes : VL);
        if (KIND != HANSA_SIGNS) continue;
        out[j] = out[j] + signed_scale(ring->bits + row * ring->bits_row, i + j * VL, ring->scales[row]);
        store_part(ring->open + row * ring->d + i + j * VL, out[j], PART ? lanes : VL);
    }
}

/* A row's new values from its own and its neighbours' vectors, in the order of their places. */
INLINE void ring_give(const int KIND, const int LINKS, const int N, const int PART, const ring_t *ring, ptrdiff_t row,
                      ptrdiff_t i, ptrdiff_t lanes, const vf *a, const vf *b, const vf *c, const vf *own) {
    const float *weights = ring->weights + 3 * row;
    float *x = ring->x + row * ring->d + i;
    vf first = splat(weights[0]), second = splat(weights[1]), third = splat(weights[2]);
    UNROLL for (int j = 0; j < N; j++) {
        vf sum = madd(b[j], second, a[j] * first);
        if (LINKS == 3) sum = madd(c[j], third, sum);
        if (KIND != HANSA_MIX) sum = madd(ring->rate, sum - own[j], load_part(x + j * VL, PART ? lanes : VL));
        store_part(x + j * VL, sum, PART ? lanes : VL);
    }
}

INLINE void ring_columns(const int KIND, const int LINKS, const int N, const int PART, const ring_t *ring, ptrdiff_t i,
                         ptrdiff_t lanes) {
    const ptrdiff_t last = ring->rows - 1;
    vf top[4], end[4], before[4], own[4], after[4];
#define GIVE(row, a, b, c, own) ring_give(KIND, LINKS, N, PART, ring, row, i, lanes, a, b, c, own)
    ring_take(KIND, N, PART, ring, last, i, lanes, end);
    ring_take(KIND, N, PART, ring, 0, i, lanes, top);
    if (LINKS == 2) {
        GIVE(0, top, end, end, top);
        GIVE(1, top, end, end, end);
        return;
    }
    ring_take(KIND, N, PART, ring, 1, i, lanes, own);
    GIVE(0, top, own, end, top);
    UNROLL for (int j = 0; j < N; j++) before[j] = top[j];
    for (ptrdiff_t row = 1; row < last; row++) {
        if (row + 1 < last) ring_take(KIND, N, PART, ring, row + 1, i, lanes, after);
        else UNROLL for (int j = 0; j < N; j++) after[j] = end[j];
        GIVE(row, before, own, after, own);
        UNROLL for (int j = 0; j < N; j++) {
            before[j] = own[j];
            own[j] = after[j];
        }
    }
    GIVE(last, top, before, end, end);
#undef GIVE
}

INLINE void ring_pass(const int KIND, const int LINKS, const ring_t *given, ptrdiff_t i, ptrdiff_t stop) {
    const ring_t ring = *given; /* in registers: no store can reach it */
    for (; i + RING_VECTORS * VL <= stop; i += RING_VECTORS * VL)
        ring_columns(KIND, LINKS, RING_VECTORS, 0, &ring, i, VL);
    for (; i < stop; i += VL) ring_columns(KIND, LINKS, 1, 1, &ring, i, stop - i);
}

/* One exchange of all rows, columns `i` to `stop`: HANSA_MIX, HANSA_PULL or HANSA_SIGNS. */
static void ring_gossip(int64_t kind, const ring_t *ring, ptrdiff_t i, ptrdiff_t stop) {
    int pair = ring->rows == 2;
    if (kind == HANSA_MIX && pair) ring_pass(HANSA_MIX, 2, ring, i, stop);
    else if (kind == HANSA_MIX) ring_pass(HANSA_MIX, 3, ring, i, stop);
    else if (kind == HANSA_PULL && pair) ring_pass(HANSA_PULL, 2, ring, i, stop);
    else if (kind == HANSA_PULL) ring_pass(HANSA_PULL, 3, ring, i, stop);
    else if (pair) ring_pass(HANSA_SIGNS, 2, ring, i, stop);
    else ring_pass(HANSA_SIGNS, 3, ring, i, stop);
}

#endif
