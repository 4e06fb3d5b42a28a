/* A cohort's local steps and gossip in one call; the models are rows of a matrix.
 *
 * Mixing works in place: a cut (column block) of all rows is copied to scratch in the cache, and summed from there. */
#ifndef HANSA_COHORT_H
#define HANSA_COHORT_H

#include "dense.h"
#include "ring.h"
#include "signs.h"
#include "network.h"

/* Whether all entries are finite: 0 x is then 0. */
static int all_finite32(const float *x, int64_t n) {
    vf sum[8];
    int64_t i = 0;
    UNROLL for (int j = 0; j < 8; j++) sum[j] = zero();
    for (; i + 8 * VL <= n; i += 8 * VL)
        UNROLL for (int j = 0; j < 8; j++) sum[j] = madd(load(x + i + j * VL), zero(), sum[j]);
    float flat[8 * VL], total = 0;
    memcpy(flat, sum, sizeof flat);
    for (; i < n; i++) total += x[i] * 0.0f;
    for (int j = 0; j < 8 * VL; j++) total += flat[j];
    return total == 0;
}

/* A bound on the change of any parameter in a step, from the largest output gradient and the largest input of each
 * stage; non-finite if one of them is, or for other kinds of stages or steps. */
static double reach_of_step(const hansa_network *network, ptrdiff_t size, const step_t *step, double clip) {
    double most = 0;
    if (!plain(step) || isfinite(clip)) return (double)INFINITY;
    for (ptrdiff_t i = 0; i < network->stages; i++) {
        const stage_t *s = network->stage + i;
        if (s->is.kind != HANSA_LINEAR) return (double)INFINITY;
        double in = 1, out = 0;
        for (ptrdiff_t b = 0; b < size; b++) {
            float input = highest32(s->in + b * s->in_step, s->features);
            float output = highest32(s->out_gradient + b * s->out_step, s->is.out);
            if (!isfinite(input) || !isfinite(output)) return (double)INFINITY;
            in = input > in ? input : in;
            out = output > out ? output : out;
        }
        most = in * out > most ? in * out : most;
    }
    return fabs((double)step->lr) * (double)size * most;
}

/* Whether a row is finite after a step: by the bound on its entries, or by a scan. */
static int stayed(const hansa_cohort *c, int64_t row, ptrdiff_t d, double moved) {
    double known = (c->reach[row] + moved) * (1 + 1e-3);
    if (c->reach[row] < 0 || !(known < 1e37)) known = highest32(c->x + row * d, d);
    c->reach[row] = known;
    return isfinite(known);
}

INLINE int alive(const hansa_cohort *c, int64_t row) { return c->starts[row] < c->starts[row + 1]; }

/* A row's new values: the sum of w_k from_k over its links in the given order, and what to do with the sum. With few
 * links, as in rings and other sparse graphs, pointers and weights stay in registers. */
enum { FOLD_LINKS = 5 };

typedef struct {
    const float *from[FOLD_LINKS]; /* of the first links */
    vf weight[FOLD_LINKS], rate;
    const float *all; /* the rows that links refer to, `step` floats apart */
    ptrdiff_t step;
    const int64_t *links;
    const double *weights;
    int64_t count;
    const float *own, *later;
    float *x;
} fold_t;

/* N vectors of a row, the last partial if PART; LINKS is 0 if there are many links. */
INLINE void fold_tile(const int KIND, const int LINKS, const int N, const int PART, const fold_t *f, ptrdiff_t i,
                      ptrdiff_t lanes) {
    vf sum[4];
#define TAKE(p, j) (PART ? load_part((p) + i + (j) * VL, lanes) : load((p) + i + (j) * VL))
    UNROLL for (int j = 0; j < N; j++) sum[j] = TAKE(f->from[0], j) * f->weight[0];
    UNROLL for (int k = 1; k < LINKS; k++)
        UNROLL for (int j = 0; j < N; j++) sum[j] = madd(TAKE(f->from[k], j), f->weight[k], sum[j]);
    for (int64_t k = 1; !LINKS && k < f->count; k++) {
        const float *at = f->all + f->links[k] * f->step;
        vf weight = splat((float)f->weights[k]);
        UNROLL for (int j = 0; j < N; j++) sum[j] = madd(TAKE(at, j), weight, sum[j]);
    }
    UNROLL for (int j = 0; j < N; j++) {
        if (KIND == HANSA_SETTLE) sum[j] = TAKE(f->later, j) + (sum[j] - TAKE(f->own, j));
        if (KIND == HANSA_PULL) sum[j] = madd(f->rate, sum[j] - TAKE(f->own, j), TAKE(f->x, j));
        if (PART) store_part(f->x + i + j * VL, sum[j], lanes);
        else store(f->x + i + j * VL, sum[j]);
    }
#undef TAKE
}

INLINE void fold_span(const int KIND, const int LINKS, const fold_t *f, ptrdiff_t some) {
    ptrdiff_t i = 0;
    for (; i + 4 * VL <= some; i += 4 * VL) fold_tile(KIND, LINKS, 4, 0, f, i, VL);
    for (; i < some; i += VL) fold_tile(KIND, LINKS, 1, 1, f, i, some - i);
}

INLINE void fold(const int KIND, const hansa_cohort *c, int64_t row, const float *from, ptrdiff_t step, ptrdiff_t some,
                 float *x, const float *later) {
    fold_t f = {.rate = splat((float)c->rate), .all = from, .step = step, .links = c->links + c->starts[row],
                .weights = c->weights + c->starts[row], .count = c->starts[row + 1] - c->starts[row],
                .own = from + row * step, .later = later, .x = x};
    for (int64_t k = 0; k < at_most(f.count, FOLD_LINKS); k++) {
        f.from[k] = from + f.links[k] * step;
        f.weight[k] = splat((float)f.weights[k]);
    }
    switch (f.count) {
    case 1: fold_span(KIND, 1, &f, some); break;
    case 2: fold_span(KIND, 2, &f, some); break;
    case 3: fold_span(KIND, 3, &f, some); break;
    case 4: fold_span(KIND, 4, &f, some); break;
    case 5: fold_span(KIND, 5, &f, some); break;
    default: fold_span(KIND, 0, &f, some);
    }
}

/* The length of a cut: all rows of a cut fit in the L2 cache. */
INLINE ptrdiff_t cut_of(const hansa_cohort *c) {
    ptrdiff_t fair = 32 * HANSA_CUT / c->rows / 64 * 64;
    return at_most(HANSA_CUT, fair < 64 ? 64 : fair);
}

/* Initialize rows to `start` on first use: the row `only`, or all remaining ones. */
static void begin_rows(const hansa_cohort *c, ptrdiff_t d, int64_t only) {
    for (int64_t row = only < 0 ? 0 : only; c->start && row < (only < 0 ? c->rows : only + 1); row++) {
        if (c->begun[row]) continue;
        memcpy(c->x + row * d, c->start, sizeof(float) * (size_t)d);
        if (c->public_copies) memcpy(c->public_copies + row * d, c->start, sizeof(float) * (size_t)d);
        c->begun[row] = 1;
    }
}

/* A cut of every row, copied to scratch if it is about to be overwritten. */
static void aside(const hansa_cohort *c, ptrdiff_t d, ptrdiff_t i, ptrdiff_t cut, ptrdiff_t some) {
    for (int64_t row = 0; row < c->rows; row++) {
        const float *from = c->x + row * d + i;
        for (ptrdiff_t j = cut; j < at_most(2 * cut, d - i); j += 16) __builtin_prefetch(from + j, 1);
        memcpy(c->scratch + row * cut, from, sizeof(float) * (size_t)some);
    }
}

/* X <- W X; for rows that stepped in `later`, X <- later + (W X - X), which equals `later` without neighbours. */
static void mix_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (ptrdiff_t i = 0, cut = cut_of(c), some; i < d; i += some) {
        some = at_most(cut, d - i);
        aside(c, d, i, cut, some);
        for (int64_t row = 0; row < c->rows; row++) {
            float *x = c->x + row * d + i;
            if (!alive(c, row)) continue;
            if (c->later && c->stepped[row])
                fold(HANSA_SETTLE, c, row, c->scratch, cut, some, x, c->later + row * d + i);
            else fold(HANSA_MIX, c, row, c->scratch, cut, some, x, NULL);
        }
    }
}

/* The same with W = 11'/n over the surviving rows. */
static void average_rows(const hansa_cohort *c, ptrdiff_t d) {
    int64_t left = 0;
    for (int64_t row = 0; row < c->rows; row++) left += alive(c, row);
    const float share = (float)(1.0 / (double)left);
    float mean[HANSA_CUT];
    for (ptrdiff_t i = 0, some; i < d; i += some) {
        some = at_most(HANSA_CUT, d - i);
        memset(mean, 0, sizeof mean);
        for (int64_t row = 0; row < c->rows; row++) {
            const float *x = c->x + row * d + i;
            if (alive(c, row)) INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) mean[j] += x[j] * share;
        }
        for (int64_t row = 0; row < c->rows; row++) {
            float *x = c->x + row * d + i;
            if (!alive(c, row)) continue;
            if (c->later && c->stepped[row]) {
                const float *later = c->later + row * d + i;
                INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) x[j] = later[j] + (mean[j] - x[j]);
            } else {
                memcpy(x, mean, sizeof(float) * (size_t)some);
            }
        }
    }
}

/* Apply the steps in `later` without mixing. */
static void settle_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (int64_t row = 0; row < c->rows; row++)
        if (c->stepped[row] && alive(c, row)) memcpy(c->x + row * d, c->later + row * d, sizeof(float) * (size_t)d);
}

/* X <- X + rate (W - I) public_copies. */
static void pull_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (ptrdiff_t i = 0, cut = cut_of(c), some; i < d; i += some) {
        some = at_most(cut, d - i);
        for (int64_t row = 0; row < c->rows; row++)
            if (alive(c, row)) fold(HANSA_PULL, c, row, c->public_copies + i, d, some, c->x + row * d + i, NULL);
    }
}

/* The scales and bits of all rows. */
INLINE float *scales_of(const hansa_cohort *c) { return c->scratch + c->rows * HANSA_CUT; }
INLINE uint8_t *bits_of(const hansa_cohort *c, ptrdiff_t d, int64_t row) {
    return (uint8_t *)(scales_of(c) + c->rows) + row * round_up((d + 7) / 8, 64);
}

/* C(x - public_copies) of a row after its step, as scale and bits. */
static int sign_row(const hansa_cohort *c, ptrdiff_t d, int64_t row) {
    float scale = sign_difference(c->x + row * d, c->public_copies + row * d, d, bits_of(c, d, row));
    scales_of(c)[row] = scale;
    return (int)(c->stepped[row] = isfinite(scale) != 0);
}

/* Compressed gossip by scaled signs (CHOCO): public_copies <- public_copies + C(x - public_copies) for every row, then
 * the pull. */
static void signs_of_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (ptrdiff_t i = 0, cut = cut_of(c), some; i < d; i += some) {
        some = at_most(cut, d - i);
        for (int64_t row = 0; row < c->rows; row++) {
            const uint8_t *given = bits_of(c, d, row) + i / 8;
            if (alive(c, row)) sign_add(&given, scales_of(c) + row, 1, some, 0, c->public_copies + row * d + i);
        }
        for (int64_t row = 0; row < c->rows; row++)
            if (alive(c, row)) fold(HANSA_PULL, c, row, c->public_copies + i, d, some, c->x + row * d + i, NULL);
    }
}

/* The same for a ring without steps in `later`; returns whether it applied. */
static int on_a_ring(const hansa_cohort *c, ptrdiff_t d, int64_t kind) {
    if (c->later || !(kind == HANSA_MIX || kind == HANSA_PULL || kind == HANSA_SIGNS) || !ring_of(c, c->scratch)) return 0;
    ring_t ring = {c->x, c->public_copies, c->scratch, scales_of(c), bits_of(c, d, 0), c->rows, d, round_up((d + 7) / 8, 64),
                   splat((float)c->rate)};
    ring_gossip(kind, &ring);
    return 1;
}

/* Update the bounds after an operation on all rows. Means of rows do not exceed the bounds of the rows. */
static void reach_after(const hansa_cohort *c, int64_t kind) {
    double most = 0, heaviest = 1;
    for (int64_t row = 0; row < c->rows; row++) {
        double sum = 0;
        if (!alive(c, row)) continue;
        for (int64_t k = c->starts[row]; k < c->starts[row + 1]; k++) sum += fabs(c->weights[k]);
        heaviest = sum > heaviest ? sum : heaviest;
        most = c->reach[row] < 0 ? (double)INFINITY : c->reach[row] > most ? c->reach[row] : most;
        if (!isfinite(most)) break;
    }
    int known = (kind == HANSA_MIX || kind == HANSA_AVERAGE) && isfinite(most);
    for (int64_t row = 0; row < c->rows; row++) c->reach[row] = known ? most * heaviest * (1 + 1e-3) : -1;
}

static int64_t check_turns(const hansa_network *network, const hansa_data *data, const hansa_cohort *c) {
    for (int64_t t = 0; t < c->count; t++) {
        const hansa_turn *turn = c->turns + t;
        hansa_batches batches = {turn->index, NULL, 1, turn->batch, NULL};
        if (turn->row < 0) continue;
        int64_t wrong = turn->row >= c->rows ? HANSA_BAD_ROW : check(network, data, &batches);
        if (wrong) return wrong;
    }
    return HANSA_OK;
}

/* Whether the next operation on all rows after turn `at` sends signs. */
static int signs_follow(const hansa_cohort *c, int64_t at) {
    while (at < c->count && c->turns[at].row >= 0) at++;
    return at < c->count && c->turns[at].row == HANSA_SIGNS;
}

/* Compute the missing signs; returns a row whose difference is non-finite, or -1. */
static int64_t sign_rest(const hansa_cohort *c, ptrdiff_t d) {
    for (int64_t row = 0; row < c->rows; row++)
        if (alive(c, row) && !c->stepped[row] && !sign_row(c, d, row)) return row;
    return -1;
}

static int64_t run_cohort(hansa_network *network, const hansa_data *data, const hansa_update *update, hansa_cohort *c) {
    ptrdiff_t d = network->parameters;
    int64_t wrong = c->done ? HANSA_OK : check_turns(network, data, c);
    if (wrong) return wrong;
    step_t step = step_on(NULL, update);
    double end = now() + c->seconds;
    network->keep = NULL;
    c->dropped = -1;
    while (c->done < c->count) {
        int64_t at = c->done++, row = c->turns[at].row;
        if (row >= 0) {
            float *x = c->x + row * d;
            /* an uninitialized row: the step reads `start` and writes the row */
            int fresh = c->start && !c->begun[row] && !c->public_copies && !c->later;
            if (fresh) c->begun[row] = 1;
            else begin_rows(c, d, row);
            step.y = c->later ? c->later + row * d : fresh ? (float *)c->start : x;
            step.to = fresh ? x : NULL;
            step.velocity = c->velocities ? c->velocities[row] : NULL;
            if (c->later) {
                memcpy(step.y, x, sizeof(float) * (size_t)d);
                c->stepped[row] = 1;
            }
            c->losses[at] = step_once(network, data, c->turns[at].index, c->turns[at].batch, &step, update->max_grad_norm);
            /* compute signs while the row is in the cache; only finite rows have a scale */
            int fine = c->public_copies && signs_follow(c, c->done) && sign_row(c, d, row);
            if (!fine)
                fine = c->later ? all_finite32(step.y, d)
                                : stayed(c, row, d, reach_of_step(network, c->turns[at].batch, &step, update->max_grad_norm));
            if (!fine) {
                c->dropped = row;
                begin_rows(c, d, -1);
                return HANSA_OK;
            }
        } else {
            begin_rows(c, d, -1);
            if (row == HANSA_SIGNS && (c->dropped = sign_rest(c, d)) >= 0) return HANSA_BAD_SUM;
            if (on_a_ring(c, d, row)) {
            } else if (row == HANSA_MIX) mix_rows(c, d);
            else if (row == HANSA_AVERAGE) average_rows(c, d);
            else if (row == HANSA_SETTLE) settle_rows(c, d);
            else if (row == HANSA_PULL) pull_rows(c, d);
            else signs_of_rows(c, d);
            reach_after(c, row);
            memset(c->stepped, 0, sizeof(int64_t) * (size_t)c->rows);
        }
        if (now() >= end) break;
    }
    if (c->done == c->count) begin_rows(c, d, -1);
    return HANSA_OK;
}

#endif
