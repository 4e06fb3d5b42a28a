/* A cohort's local steps and gossip in one call; the models are rows of a matrix, mixed in place. */
#ifndef HANSA_COHORT_H
#define HANSA_COHORT_H

#include "dense.h"
#include "mixing.h"
#include "ring.h"
#include "signs.h"
#include "spread.h"
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

/* What of a row is initialized; the rest has the value of `start`. */
enum { BEGUN_MODEL = 1, BEGUN_COPY = 2 };

INLINE int has_begun(const hansa_cohort *c, int64_t row, int what) { return !c->start || c->begun[row] & what; }

/* Initialize models or public copies to `start`: of the row `only`, or of all remaining ones. */
static void begin_rows(const hansa_cohort *c, ptrdiff_t d, int64_t only, int what) {
    float *to = what == BEGUN_MODEL ? c->x : c->public_copies;
    for (int64_t row = only < 0 ? 0 : only; to && row < (only < 0 ? c->rows : only + 1); row++) {
        if (has_begun(c, row, what)) continue;
        memcpy(to + row * d, c->start, sizeof(float) * (size_t)d);
        c->begun[row] |= what;
    }
}

static void begin_all(const hansa_cohort *c, ptrdiff_t d) {
    begin_rows(c, d, -1, BEGUN_MODEL);
    begin_rows(c, d, -1, BEGUN_COPY);
}

/* Apply the steps in `later` without mixing. */
static void settle_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (int64_t row = 0; row < c->rows; row++)
        if (c->stepped[row] && alive(c, row)) memcpy(c->x + row * d, c->later + row * d, sizeof(float) * (size_t)d);
}

/* The scales and bits of all rows. */
INLINE float *scales_of(const hansa_cohort *c) { return c->scratch + c->rows * HANSA_CUT; }
INLINE uint8_t *bits_of(const hansa_cohort *c, ptrdiff_t d, int64_t row) {
    return (uint8_t *)(scales_of(c) + c->rows) + row * round_up((d + 7) / 8, 64);
}

/* C(x - public_copies) of a row after its step, as scale and bits. */
static int sign_row(const hansa_cohort *c, ptrdiff_t d, int64_t row) {
    const float *copy = has_begun(c, row, BEGUN_COPY) ? c->public_copies + row * d : c->start;
    float scale = sign_difference(c->x + row * d, copy, d, bits_of(c, d, row));
    scales_of(c)[row] = scale;
    return (int)(c->stepped[row] = isfinite(scale) != 0);
}

/* An exchange that was looked up: on a ring, or by the links of groups. */
typedef struct {
    int64_t kind;
    int on_ring;
    ring_t ring;
    mixing_t mixing;
} exchange_t;

/* X <- W X, or the mean of the surviving rows; for rows that stepped in `later`, X <- later + (W X - X), which equals
 * `later` without neighbours. With public copies X <- X + rate (W - I) public_copies, after the signs of x -
 * public_copies were added to them (CHOCO) or not. Returns 0 if there is no memory. */
static int look_up_exchange(const hansa_cohort *c, ptrdiff_t d, int64_t kind, mix_plan_t *plan, exchange_t *out) {
    const ptrdiff_t bits_row = round_up((d + 7) / 8, 64);
    out->kind = kind == HANSA_AVERAGE ? HANSA_MIX : kind;
    out->on_ring = kind != HANSA_AVERAGE && !c->later && ring_of(c, c->scratch);
    if (kind != HANSA_AVERAGE && !out->on_ring && !make_plan(c, plan)) return 0;
    if (!plan->from && !(plan->from = malloc((size_t)c->rows * sizeof *plan->from))) return 0;
    /* rings and complete graphs read what is not initialized from `start` */
    if (c->later || kind == HANSA_PULL || (kind != HANSA_AVERAGE && !out->on_ring && plan->groups)) begin_all(c, d);
    const int what = out->kind == HANSA_MIX ? BEGUN_MODEL : BEGUN_COPY;
    if (what == BEGUN_COPY) begin_rows(c, d, -1, BEGUN_MODEL);
    for (int64_t row = 0; row < c->rows; row++) {
        const float *own = (what == BEGUN_MODEL ? c->x : c->public_copies) + row * d;
        plan->from[row] = has_begun(c, row, what) ? own : c->start;
        if (c->start && alive(c, row)) c->begun[row] |= what;
    }
    if (out->on_ring) {
        out->ring = (ring_t){c->x, c->public_copies, plan->from, c->scratch, scales_of(c), bits_of(c, d, 0), c->rows, d, bits_row,
                             splat((float)c->rate)};
        return 1;
    }
    mixing_t *mixing = &out->mixing;
    *mixing = (mixing_t){.x = c->x, .open = c->public_copies, .from = plan->from, .later = c->later, .stepped = c->stepped,
                         .starts = c->starts, .scales = scales_of(c), .bits = bits_of(c, d, 0), .sent = c->scratch, .rows = c->rows, .d = d,
                         .bits_row = bits_row, .rate = (float)c->rate, .none = -0.0f};
    if (kind == HANSA_AVERAGE) {
        int64_t left = 0;
        for (int64_t row = 0; row < c->rows; row++) left += alive(c, row);
        mixing->share = (float)(1.0 / (double)left);
        mixing->none = 0;
        return 1;
    }
    mixing->links = plan->links;
    mixing->groups = plan->groups;
    mixing->share = plan->share;
    return 1;
}

static void exchange_columns(const exchange_t *e, ptrdiff_t i, ptrdiff_t stop) {
    if (e->on_ring) ring_gossip(e->kind, &e->ring, i, stop);
    else exchange_rows(e->kind, &e->mixing, i, stop);
}

/* The end of a cohort's turns: the changes of some rows and the spread of all, in the pass of the last exchange if there
 * is one. Returns 0 if there is no memory. */
static int finish_rows(hansa_cohort *c, ptrdiff_t d, const exchange_t *last) {
    int64_t *chosen = malloc((size_t)c->rows * sizeof *chosen), count = 0;
    float **moved = malloc((size_t)c->rows * sizeof *moved);
    if (chosen && moved) {
        for (int64_t row = 0; row < c->rows; row++) {
            if (!alive(c, row)) continue;
            chosen[count] = row;
            moved[count++] = c->deltas[row];
        }
        spread_t spread = {.x = c->x, .chosen = chosen, .count = count, .d = d, .stride = d, .start = c->origin, .moved = moved};
        spread_begin(&spread);
        for (ptrdiff_t i = 0; i < d;) {
            if (last) exchange_columns(last, i, at_most(d, i + SPREAD_CUT));
            i = spread_cut(&spread, i);
        }
        c->spread = spread_end(&spread);
    }
    free(chosen);
    free(moved);
    return chosen && moved;
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

static int64_t run_turns(hansa_network *network, const hansa_data *data, const hansa_update *update, hansa_cohort *c,
                         mix_plan_t *plan) {
    ptrdiff_t d = network->parameters;
    int64_t wrong = c->done ? HANSA_OK : check_turns(network, data, c);
    if (wrong) return wrong;
    step_t step = step_on(NULL, update);
    double end = now() + c->seconds;
    int finished = 0;
    network->keep = NULL;
    c->dropped = -1;
    while (c->done < c->count) {
        int64_t at = c->done++, row = c->turns[at].row;
        if (row >= 0) {
            float *x = c->x + row * d;
            /* an uninitialized row: the step reads `start` and writes the row */
            int fresh = !c->later && !has_begun(c, row, BEGUN_MODEL);
            if (fresh) c->begun[row] |= BEGUN_MODEL;
            else begin_rows(c, d, row, BEGUN_MODEL);
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
                begin_all(c, d);
                return HANSA_OK;
            }
        } else {
            if (row == HANSA_SIGNS) begin_rows(c, d, -1, BEGUN_MODEL);
            if (row == HANSA_SIGNS && (c->dropped = sign_rest(c, d)) >= 0) return HANSA_BAD_SUM;
            if (row == HANSA_SETTLE) {
                begin_all(c, d);
                settle_rows(c, d);
            } else {
                exchange_t exchange;
                if (!look_up_exchange(c, d, row, plan, &exchange)) return HANSA_NO_MEMORY;
                finished = c->origin && c->done == c->count;
                if (!finished) exchange_columns(&exchange, 0, d);
                else if (!finish_rows(c, d, &exchange)) return HANSA_NO_MEMORY;
            }
            reach_after(c, row);
            memset(c->stepped, 0, sizeof(int64_t) * (size_t)c->rows);
        }
        if (now() >= end) break;
    }
    if (c->done < c->count) return HANSA_OK;
    begin_all(c, d);
    return !c->origin || finished || finish_rows(c, d, NULL) ? HANSA_OK : HANSA_NO_MEMORY;
}

static int64_t run_cohort(hansa_network *network, const hansa_data *data, const hansa_update *update, hansa_cohort *c) {
    mix_plan_t plan = {0};
    int64_t code = run_turns(network, data, update, c, &plan);
    free_plan(&plan);
    return code;
}

#endif
