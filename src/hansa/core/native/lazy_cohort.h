/* A cohort whose clients are mostly idle: stores changes, and computes models only for stepping clients.
 *
 * A model is start + sum of w_k change_k. The models of clients that step together are computed together, one cut at a
 * time, so that the changes are read once. */
#ifndef HANSA_LAZY_COHORT_H
#define HANSA_LAZY_COHORT_H

#include "cohort.h"

enum { COMBINE_AHEAD = 16 };

/* N vectors of one model, the last partial if PART. */
INLINE void combine_tile(const int N, const int PART, const float *start, const float *changes, ptrdiff_t d,
                         const int64_t *places, const float *weights, int64_t count, ptrdiff_t lanes, float *out) {
    vf sum[8];
#define TAKE(p, j) (PART ? load_part((p) + (j) * VL, lanes) : load((p) + (j) * VL))
    UNROLL for (int j = 0; j < N; j++) sum[j] = TAKE(start, j);
    for (int64_t k = 0; k < count; k++) {
        const float *from = changes + places[k] * d;
        vf weight = splat(weights[k]);
        UNROLL for (int j = 0; j < N; j++) {
            __builtin_prefetch(from + (j + COMBINE_AHEAD) * VL); /* more streams than the hardware prefetches */
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
static void combine_changes(const float *start, const float *changes, const int64_t *starts, const int64_t *places,
                    const float *weights, int64_t count, int64_t d, float *out) {
    for (ptrdiff_t i = 0, some; i < d; i += some) {
        some = at_most(HANSA_CUT, d - i);
        for (int64_t r = 0; r < count; r++) {
            int64_t first = starts[r], terms = starts[r + 1] - first;
            ptrdiff_t j = i;
            for (; j + 8 * VL <= i + some; j += 8 * VL)
                combine_tile(8, 0, start + j, changes + j, d, places + first, weights + first, terms, VL,
                             out + r * d + j);
            for (; j < i + some; j += VL)
                combine_tile(1, 1, start + j, changes + j, d, places + first, weights + first, terms, i + some - j,
                             out + r * d + j);
        }
    }
}

static int64_t check_lazy_cohort(const hansa_network *network, const hansa_data *data, const hansa_lazy_cohort *lazy) {
    int64_t steps = 0;
    for (int64_t t = 0; t < lazy->count; t++) {
        const hansa_turn *turn = lazy->turns + t;
        hansa_batches batches = {turn->index, NULL, 1, turn->batch, NULL};
        if (turn->row == HANSA_GATHER) continue;
        int64_t wrong = ++steps > lazy->room - lazy->made ? HANSA_BAD_ROW : check(network, data, &batches);
        if (wrong) return wrong;
    }
    return HANSA_OK;
}

static int64_t run_lazy_cohort(hansa_network *network, const hansa_data *data, const hansa_update *update, hansa_lazy_cohort *lazy) {
    ptrdiff_t d = network->parameters;
    int64_t wrong = lazy->done ? HANSA_OK : check_lazy_cohort(network, data, lazy), place = 0, first = lazy->done;
    if (wrong) return wrong;
    step_t step = step_on(NULL, update);
    double end = now() + lazy->seconds;
    network->keep = NULL;
    lazy->dropped = -1;
    while (lazy->done < lazy->count) {
        int64_t at = lazy->done++;
        const hansa_turn *turn = lazy->turns + at;
        if (turn->row == HANSA_GATHER) {
            if (at > first && now() >= end) { /* only between groups: the models of a group are computed in the same call */
                lazy->done--;
                break;
            }
            combine_changes(lazy->start, lazy->changes, lazy->starts + at + 1, lazy->places, lazy->weights, turn->batch, d,
                    lazy->models);
            place = 0;
            continue;
        }
        step.y = lazy->models + place++ * d;
        step.change = lazy->changes + lazy->made * d;
        step.velocity = lazy->velocities ? lazy->velocities[turn->row] : NULL;
        lazy->losses[at] = step_once(network, data, turn->index, turn->batch, &step, update->max_grad_norm);
        if (!all_finite32(step.change, d)) {
            lazy->dropped = turn->row;
            return HANSA_OK;
        }
        lazy->made++;
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
