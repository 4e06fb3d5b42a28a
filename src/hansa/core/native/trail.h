/* A cohort most of whose clients are idle: the changes that were made, and models only for those who step.
 *
 * A model is start + sum of w_k change_k. The models of clients that step together are made together, a cut at a time, so
 * that the changes are read once for all of them. */
#ifndef HANSA_TRAIL_H
#define HANSA_TRAIL_H

#include "together.h"

enum { CARRIED_AHEAD = 16 };

/* N vectors of one model, the last of them not whole if PART. */
INLINE void carried_tile(const int N, const int PART, const float *start, const float *changes, ptrdiff_t d,
                         const int64_t *places, const float *weights, int64_t count, ptrdiff_t lanes, float *out) {
    vf sum[8];
#define TAKE(p, j) (PART ? load_part((p) + (j) * VL, lanes) : load((p) + (j) * VL))
    UNROLL for (int j = 0; j < N; j++) sum[j] = TAKE(start, j);
    for (int64_t k = 0; k < count; k++) {
        const float *from = changes + places[k] * d;
        vf weight = splat(weights[k]);
        UNROLL for (int j = 0; j < N; j++) {
            __builtin_prefetch(from + (j + CARRIED_AHEAD) * VL); /* more streams than the machine follows by itself */
            sum[j] = madd(weight, TAKE(from, j), sum[j]);
        }
    }
    UNROLL for (int j = 0; j < N; j++) {
        if (PART) store_part(out + j * VL, sum[j], lanes);
        else store(out + j * VL, sum[j]);
    }
#undef TAKE
}

/* out[r] = start + the terms starts[r] to starts[r + 1], for `count` models of d entries. */
static void carried(const float *start, const float *changes, const int64_t *starts, const int64_t *places,
                    const float *weights, int64_t count, int64_t d, float *out) {
    for (ptrdiff_t i = 0, some; i < d; i += some) {
        some = at_most(HANSA_CUT, d - i);
        for (int64_t r = 0; r < count; r++) {
            int64_t first = starts[r], terms = starts[r + 1] - first;
            ptrdiff_t j = i;
            for (; j + 8 * VL <= i + some; j += 8 * VL)
                carried_tile(8, 0, start + j, changes + j, d, places + first, weights + first, terms, VL,
                             out + r * d + j);
            for (; j < i + some; j += VL)
                carried_tile(1, 1, start + j, changes + j, d, places + first, weights + first, terms, i + some - j,
                             out + r * d + j);
        }
    }
}

static int64_t check_trail(const hansa_stack *stack, const hansa_data *data, const hansa_trail *trail) {
    int64_t steps = 0;
    for (int64_t t = 0; t < trail->count; t++) {
        const hansa_turn *turn = trail->turns + t;
        hansa_batches batches = {turn->index, NULL, 1, turn->batch, NULL};
        if (turn->row == HANSA_GATHER) continue;
        int64_t wrong = ++steps > trail->room - trail->made ? HANSA_BAD_ROW : check(stack, data, &batches);
        if (wrong) return wrong;
    }
    return HANSA_OK;
}

static int64_t trail(hansa_stack *stack, const hansa_data *data, const hansa_update *update, hansa_trail *trail) {
    ptrdiff_t d = stack->parameters;
    int64_t wrong = trail->done ? HANSA_OK : check_trail(stack, data, trail), place = 0, first = trail->done;
    if (wrong) return wrong;
    step_t step = step_on(NULL, update);
    double end = now() + trail->seconds;
    stack->keep = NULL;
    trail->lost = -1;
    while (trail->done < trail->count) {
        int64_t at = trail->done++;
        const hansa_turn *turn = trail->turns + at;
        if (turn->row == HANSA_GATHER) {
            if (at > first && now() >= end) { /* only between groups: their models are made in the same call */
                trail->done--;
                break;
            }
            carried(trail->start, trail->changes, trail->starts + at + 1, trail->places, trail->weights, turn->batch, d,
                    trail->models);
            place = 0;
            continue;
        }
        step.y = trail->models + place++ * d;
        step.change = trail->changes + trail->made * d;
        step.momentum = trail->momenta ? trail->momenta[turn->row] : NULL;
        trail->losses[at] = step_once(stack, data, turn->index, turn->batch, &step, update->clip);
        if (!all_finite32(step.change, d)) {
            trail->lost = turn->row;
            return HANSA_OK;
        }
        trail->made++;
    }
    return HANSA_OK;
}

/* The products of all pairs of rows, of n entries each: sums in float32 over a cut, in float64 over all cuts. */
static void gram(const float *rows, int64_t count, int64_t n, int64_t stride, double *out) {
    memset(out, 0, sizeof(double) * (size_t)(count * count));
    for (ptrdiff_t i = 0, some; i < n; i += some) {
        some = at_most(HANSA_CUT, n - i);
        for (int64_t a = 0; a < count; a += DOT_ROWS)
            for (int64_t b = 0; b < at_most(count, a + DOT_ROWS); b += DOT_FILTERS) {
                float tile[DOT_ROWS * DOT_FILTERS] = {0};
                dot_tile(rows + a * stride + i, stride, count - a, rows + b * stride + i, stride, count - b, some, tile,
                         DOT_FILTERS);
                for (int64_t p = a; p < at_most(count, a + DOT_ROWS); p++)
                    for (int64_t q = b; q < at_most(count, b + DOT_FILTERS); q++)
                        out[p * count + q] += (double)tile[(p - a) * DOT_FILTERS + q - b];
            }
    }
    for (int64_t p = 0; p < count; p++)
        for (int64_t q = 0; q < p; q++) out[q * count + p] = out[p * count + q];
}

#endif
