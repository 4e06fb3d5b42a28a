/* Exchanges between all rows of a cohort, X <- W X and its kin, for any graph. A few columns of all rows pass at once, and
 * sums of MIX_ROWS rows stay in registers, so that every entry is read from memory once and written once in an exchange.
 * Sums are in the order of rows. */
#ifndef HANSA_MIXING_H
#define HANSA_MIXING_H

#include <stdlib.h>

#include "native.h"
#include "signs.h"
#include "vector.h"

enum { MIX_ROWS = WIDE_REGISTERS ? 6 : 2, MIX_VECTORS = 4 }; /* rows whose sums are in registers, and vectors of each */

/* A source of a group of MIX_ROWS rows: bit r of `to` is set if row r of the group hears it. */
typedef struct {
    int32_t source;
    uint32_t to;
    float weights[MIX_ROWS];
} mix_link_t;

/* An exchange. Rows without links take no part. */
typedef struct {
    float *x, *open;
    const float *const *from; /* per row: where what it sends is read, if all hear all */
    const float *later;       /* or null */
    const int64_t *stepped, *starts;
    const float *scales;
    const uint8_t *bits;
    float *sent; /* MIX_VECTORS vectors per row */
    const mix_link_t *links;
    const int64_t *groups; /* the first link of each group, and the end */
    ptrdiff_t rows, d, bits_row;
    float rate, share, none; /* share: the weight of all links if every row hears all; none: a sum without terms */
} mixing_t;

INLINE int takes_part(const mixing_t *m, ptrdiff_t row) { return m->starts[row] < m->starts[row + 1]; }

/* N vectors of what a row sends, the last partial if PART: its model, or its public copy, first updated by the
 * signs. */
INLINE void mix_take(const int KIND, const int N, const int PART, const mixing_t *m, ptrdiff_t row, ptrdiff_t i,
                     ptrdiff_t lanes, vf *out) {
    const float *from = m->from[row] + i;
    UNROLL for (int j = 0; j < N; j++) {
        out[j] = load_part(from + j * VL, PART ? lanes : VL);
        if (KIND != HANSA_SIGNS) continue;
        out[j] = out[j] + signed_scale(m->bits + row * m->bits_row, i + j * VL, m->scales[row]);
        store_part(m->open + row * m->d + i + j * VL, out[j], PART ? lanes : VL);
    }
}

/* A row's new values from the sum that it received. */
INLINE void mix_give(const int KIND, const int LATER, const int N, const int PART, const mixing_t *m, ptrdiff_t row,
                     ptrdiff_t i, ptrdiff_t lanes, const vf *sum) {
    float *x = m->x + row * m->d + i;
    const float *own = (KIND == HANSA_MIX ? m->x : m->open) + row * m->d + i;
    const float *later = LATER && m->stepped[row] ? m->later + row * m->d + i : NULL;
#define TAKE(p) load_part((p) + j * VL, PART ? lanes : VL)
    UNROLL for (int j = 0; j < N; j++) {
        vf value = sum[j];
        if (KIND != HANSA_MIX) value = madd(splat(m->rate), value - TAKE(own), TAKE(x));
        else if (later) value = TAKE(later) + (value - TAKE(own));
        store_part(x + j * VL, value, PART ? lanes : VL);
    }
#undef TAKE
}

/* N vectors of all rows, with one sum for all. */
INLINE void mix_evenly(const int KIND, const int LATER, const int N, const int PART, const mixing_t *m, ptrdiff_t i,
                       ptrdiff_t lanes) {
    vf sum[MIX_VECTORS], out[MIX_VECTORS];
    UNROLL for (int j = 0; j < N; j++) sum[j] = splat(m->none);
    for (ptrdiff_t row = 0; row < m->rows; row++) {
        if (!takes_part(m, row)) continue;
        mix_take(KIND, N, PART, m, row, i, lanes, out);
        UNROLL for (int j = 0; j < N; j++) sum[j] = madd(out[j], splat(m->share), sum[j]);
    }
    for (ptrdiff_t row = 0; row < m->rows; row++)
        if (takes_part(m, row)) mix_give(KIND, LATER, N, PART, m, row, i, lanes, sum);
}

/* The sums of a group of rows, which receive from `from`, rows of `step` floats. */
INLINE void mix_group(const int KIND, const int LATER, const int N, const int PART, const mixing_t *m, ptrdiff_t group,
                      const float *from, ptrdiff_t step, ptrdiff_t i, ptrdiff_t lanes) {
    vf sum[MIX_ROWS][MIX_VECTORS];
    UNROLL for (int r = 0; r < MIX_ROWS; r++)
        UNROLL for (int j = 0; j < N; j++) sum[r][j] = splat(m->none);
    for (const mix_link_t *link = m->links + m->groups[group]; link < m->links + m->groups[group + 1]; link++) {
        const float *at = from + link->source * step;
        vf value[MIX_VECTORS];
        UNROLL for (int j = 0; j < N; j++) value[j] = load_part(at + j * VL, PART ? lanes : VL);
        UNROLL for (int r = 0; r < MIX_ROWS; r++)
            if (link->to >> r & 1) {
                vf weight = splat(link->weights[r]);
                UNROLL for (int j = 0; j < N; j++) sum[r][j] = madd(value[j], weight, sum[r][j]);
            }
    }
    UNROLL for (int r = 0; r < MIX_ROWS; r++) {
        const ptrdiff_t row = group * MIX_ROWS + r;
        if (row < m->rows && takes_part(m, row)) mix_give(KIND, LATER, N, PART, m, row, i, lanes, sum[r]);
    }
}

/* A block of `some` columns of all rows, by links. Models that would be overwritten are copied first. */
INLINE void mix_block(const int KIND, const int LATER, const mixing_t *m, ptrdiff_t i, ptrdiff_t some) {
    const int copies = KIND == HANSA_MIX && m->rows > MIX_ROWS;
    const ptrdiff_t step = copies ? MIX_VECTORS * VL : m->d;
    const float *from = copies ? m->sent : (KIND == HANSA_MIX ? m->x : m->open) + i;
    for (ptrdiff_t row = 0; row < m->rows; row++) {
        const uint8_t *given = m->bits + row * m->bits_row + i / 8;
        for (ptrdiff_t j = 0; copies && j < some; j += VL)
            store(m->sent + row * step + j, load_part(m->x + row * m->d + i + j, some - j));
        if (KIND == HANSA_SIGNS && takes_part(m, row)) sign_add(&given, m->scales + row, 1, some, 0, m->open + row * m->d + i);
    }
    for (ptrdiff_t group = 0, j; group * MIX_ROWS < m->rows; group++) {
        for (j = 0; j + MIX_VECTORS * VL <= some; j += MIX_VECTORS * VL)
            mix_group(KIND, LATER, MIX_VECTORS, 0, m, group, from + j, step, i + j, VL);
        for (; j < some; j += VL) mix_group(KIND, LATER, 1, 1, m, group, from + j, step, i + j, some - j);
    }
}

INLINE void mix_pass(const int KIND, const int LATER, const int EVENLY, const mixing_t *given, ptrdiff_t i,
                     ptrdiff_t stop) {
    const mixing_t m = *given; /* in registers: no store can reach it */
    /* public copies are read from where they are, so that the longest block is best that keeps all rows in the cache */
    const ptrdiff_t most = at_most(512, at_least(64, 32 * 1024 / m.rows / 64 * 64));
    const ptrdiff_t block = EVENLY || KIND == HANSA_MIX ? MIX_VECTORS * VL : most;
    for (; !EVENLY && i < stop; i += block) mix_block(KIND, LATER, &m, i, at_most(block, stop - i));
    for (; i + block <= stop; i += block) mix_evenly(KIND, LATER, MIX_VECTORS, 0, &m, i, VL);
    for (; i < stop; i += VL) mix_evenly(KIND, LATER, 1, 1, &m, i, stop - i);
}

/* One exchange of all rows, columns `i` to `stop`: HANSA_MIX, HANSA_PULL or HANSA_SIGNS. Without links of groups all rows
 * hear all. */
static void exchange_rows(int64_t kind, const mixing_t *m, ptrdiff_t i, ptrdiff_t stop) {
    const int even = !m->groups;
    if (kind == HANSA_MIX && m->later) even ? mix_pass(HANSA_MIX, 1, 1, m, i, stop) : mix_pass(HANSA_MIX, 1, 0, m, i, stop);
    else if (kind == HANSA_MIX) even ? mix_pass(HANSA_MIX, 0, 1, m, i, stop) : mix_pass(HANSA_MIX, 0, 0, m, i, stop);
    else if (kind == HANSA_PULL) even ? mix_pass(HANSA_PULL, 0, 1, m, i, stop) : mix_pass(HANSA_PULL, 0, 0, m, i, stop);
    else even ? mix_pass(HANSA_SIGNS, 0, 1, m, i, stop) : mix_pass(HANSA_SIGNS, 0, 0, m, i, stop);
}

/* The links of a cohort by groups, or one weight `share` if every row that takes part hears all of them. */
typedef struct {
    mix_link_t *links;
    int64_t *groups;
    const float **from; /* per row */
    float share;
    int made;
} mix_plan_t;

static int hears_all(const hansa_cohort *c, float *share) {
    int64_t part = 0;
    for (int64_t row = 0; row < c->rows; row++) part += c->starts[row] < c->starts[row + 1];
    for (int64_t row = 0; row < c->rows; row++) {
        const int64_t first = c->starts[row], last = c->starts[row + 1];
        if (first == last) continue;
        if (last - first != part) return 0;
        for (int64_t k = first; k < last; k++)
            if (c->weights[k] != c->weights[0] || (k > first && c->links[k] <= c->links[k - 1])) return 0;
    }
    *share = part ? (float)c->weights[0] : 0;
    return 1;
}

static void free_plan(mix_plan_t *plan) {
    free(plan->links);
    free(plan->groups);
    free(plan->from);
}

/* Fills the plan once; returns 0 if there is no memory. */
static int make_plan(const hansa_cohort *c, mix_plan_t *plan) {
    const int64_t groups = (c->rows + MIX_ROWS - 1) / MIX_ROWS;
    if (plan->made || hears_all(c, &plan->share)) return plan->made = 1;
    mix_link_t *heard = malloc((size_t)c->rows * sizeof *heard);
    plan->links = malloc((size_t)c->starts[c->rows] * sizeof *plan->links);
    plan->groups = malloc((size_t)(groups + 1) * sizeof *plan->groups);
    int64_t count = 0;
    for (int64_t group = 0; heard && plan->links && plan->groups && group < groups; group++) {
        plan->groups[group] = count;
        memset(heard, 0, (size_t)c->rows * sizeof *heard);
        for (int64_t row = group * MIX_ROWS; row < at_most(c->rows, (group + 1) * MIX_ROWS); row++)
            for (int64_t k = c->starts[row]; k < c->starts[row + 1]; k++) {
                heard[c->links[k]].to |= 1u << row % MIX_ROWS;
                heard[c->links[k]].weights[row % MIX_ROWS] += (float)c->weights[k];
            }
        for (int64_t source = 0; source < c->rows; source++) {
            if (!heard[source].to) continue;
            plan->links[count] = heard[source];
            plan->links[count++].source = (int32_t)source;
        }
        plan->groups[group + 1] = count;
    }
    plan->made = heard && plan->links && plan->groups;
    free(heard);
    return plan->made;
}

#endif
