/* Linear layers and the local step.
 *
 * Forward: dot products of rows, 4 x 4 (or 4 x 3) at a time. Backward: sums of outer products, a tile of rows times
 * vectors in registers; the gradient of a weight tile can be applied to the weights without being stored. Zeros that
 * ReLU left in the output's gradient are skipped. */
#ifndef HANSA_LINEAR_H
#define HANSA_LINEAR_H

#include "vector.h"

/* y <- y - lr (g + weight_decay y + prox_weight (y - anchor) + shift), through the velocity if there is one:
 * v <- momentum v + (...), y <- y - lr v. All pointers are to whole flat vectors; unused ones are null. With `change`
 * the change is written there; with `to` the new y, less `minus` if given, is written there. In both cases y is not
 * modified. Every parameter is written once per step. */
typedef struct {
    float *y, *velocity;
    const float *anchor, *shift;
    float lr, prox_weight, weight_decay, momentum;
    float *change, *to;
    const float *minus;
} step_t;

INLINE int plain(const step_t *step) { return !step->velocity && !step->shift && step->prox_weight == 0 && step->weight_decay == 0; }

/* The destination of a step, y or the change, and the new value for a total gradient g. */
INLINE float *target(const step_t *step) { return step->change ? step->change : step->to ? step->to : step->y; }

INLINE vf stepped(const step_t *step, ptrdiff_t at, ptrdiff_t count, vf g) {
    vf y = load_part(step->y + at, count);
    if (step->weight_decay != 0) g = madd(splat(step->weight_decay), y, g);
    if (step->prox_weight != 0) g = madd(splat(step->prox_weight), y - load_part(step->anchor + at, count), g);
    if (step->shift) g = g + load_part(step->shift + at, count);
    if (step->velocity) {
        g = madd(splat(step->momentum), load_part(step->velocity + at, count), g);
        store_part(step->velocity + at, g, count);
    }
    if (step->change) return splat(-step->lr) * g;
    y = madd(splat(-step->lr), g, y);
    if (step->minus) y = y - load_part(step->minus + at, count);
    return y;
}

/* The step on `count` parameters from `at`, gradient times `scale` (clipping). */
static void step_span(const step_t *step, ptrdiff_t at, const float *gradient, ptrdiff_t count, float scale) {
    for (ptrdiff_t i = 0; i < count; i += VL) {
        vf g = load_part(gradient + i, count - i) * splat(scale);
        store_part(target(step) + at + i, stepped(step, at + i, count - i, g), count - i);
    }
}

/* Forward: y[b][o] += x[b] . w[o] ---------------------------------------------------------------------------------- */

#define DOT_ROWS 4
#define DOT_FILTERS (WIDE_REGISTERS ? 4 : 3)
#define DOT_BLOCK 7168        /* inputs that fit in the L1 cache */
#define DOT_NEAR (3 << 16)    /* weights that fit in the L2 cache */

INLINE void sum_tile(const vf *sum, float *totals) {
#if VL == 16
    vf quad[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const vf *s = sum + 4 * i;
        vf a = _mm512_unpacklo_ps(s[0], s[1]) + _mm512_unpackhi_ps(s[0], s[1]);
        vf b = _mm512_unpacklo_ps(s[2], s[3]) + _mm512_unpackhi_ps(s[2], s[3]);
        quad[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))) +
                  _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
    vf low = _mm512_shuffle_f32x4(quad[0], quad[1], 0x88) + _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd);
    vf high = _mm512_shuffle_f32x4(quad[2], quad[3], 0x88) + _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd);
    store(totals, _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd));
#elif VL == 8
    UNROLL for (int i = 0; i < 12; i += 4) {
        const vf *s = sum + i;
        vf quad = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
        _mm_storeu_ps(totals + i, _mm_add_ps(_mm256_castps256_ps128(quad), _mm256_extractf128_ps(quad, 1)));
    }
#elif defined(HANSA_NEON)
    UNROLL for (int i = 0; i < DOT_ROWS * DOT_FILTERS; i += 4)
        store(totals + i, vpaddq_f32(vpaddq_f32(sum[i], sum[i + 1]), vpaddq_f32(sum[i + 2], sum[i + 3])));
#else
    for (int i = 0; i < DOT_ROWS * DOT_FILTERS; i++) totals[i] = sum_lanes(sum[i]);
#endif
}

/* `rows` and `filters` may be fewer than the tile's: the last is then repeated and its sums are discarded. */
INLINE void dot_tile(const float *x, ptrdiff_t x_row, ptrdiff_t rows, const float *w, ptrdiff_t w_row,
                     ptrdiff_t filters, ptrdiff_t length, float *y, ptrdiff_t y_row) {
    const float *xs[DOT_ROWS], *ws[DOT_FILTERS];
    vf sum[DOT_ROWS * DOT_FILTERS];
    UNROLL for (int b = 0; b < DOT_ROWS; b++) xs[b] = x + at_most(b, rows - 1) * x_row;
    UNROLL for (int o = 0; o < DOT_FILTERS; o++) ws[o] = w + at_most(o, filters - 1) * w_row;
    UNROLL for (int i = 0; i < DOT_ROWS * DOT_FILTERS; i++) sum[i] = zero();
    ptrdiff_t i = 0;
    for (; i + VL <= length; i += VL) {
        vf weights[DOT_FILTERS];
        UNROLL for (int o = 0; o < DOT_FILTERS; o++) weights[o] = load(ws[o] + i);
        UNROLL for (int b = 0; b < DOT_ROWS; b++) {
            vf value = load(xs[b] + i);
            UNROLL for (int o = 0; o < DOT_FILTERS; o++)
                sum[b * DOT_FILTERS + o] = madd(value, weights[o], sum[b * DOT_FILTERS + o]);
        }
    }
    if (i < length) {
        UNROLL for (int b = 0; b < DOT_ROWS; b++) UNROLL for (int o = 0; o < DOT_FILTERS; o++)
            sum[b * DOT_FILTERS + o] =
                madd(load_part(xs[b] + i, length - i), load_part(ws[o] + i, length - i), sum[b * DOT_FILTERS + o]);
    }
    float totals[DOT_ROWS * DOT_FILTERS];
    sum_tile(sum, totals);
#if VL == 16
    if (rows >= DOT_ROWS && filters >= DOT_FILTERS) {
        UNROLL for (int b = 0; b < DOT_ROWS; b++) {
            float *to = y + b * y_row;
            _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm_loadu_ps(totals + b * DOT_FILTERS)));
        }
        return;
    }
#elif defined(HANSA_NEON)
    if (rows >= DOT_ROWS && filters >= DOT_FILTERS) {
        UNROLL for (int b = 0; b < DOT_ROWS; b++) {
            float *to = y + b * y_row;
            store(to, load(to) + load(totals + b * DOT_FILTERS));
        }
        return;
    }
#endif
    for (ptrdiff_t b = 0; b < at_most(DOT_ROWS, rows); b++)
        for (ptrdiff_t o = 0; o < at_most(DOT_FILTERS, filters); o++) y[b * y_row + o] += totals[b * DOT_FILTERS + o];
}

/* y = bias + x w'. A block of inputs stays in the L1 cache while the weights stream: few long rows if the weights fit
 * in the L2 cache, otherwise many short rows, so that the weights are read less often. */
static void linear_forward(const float *x, ptrdiff_t x_row, ptrdiff_t rows, const float *w, const float *bias,
                           ptrdiff_t in, ptrdiff_t out, float *y, ptrdiff_t y_row) {
    for (ptrdiff_t b = 0; b < rows; b++) {
        if (bias) memcpy(y + b * y_row, bias, sizeof(float) * out);
        else memset(y + b * y_row, 0, sizeof(float) * out);
    }
    ptrdiff_t most = in * out <= DOT_NEAR ? 8 : 24, longest = DOT_BLOCK / most;
    ptrdiff_t cuts = (in + longest - 1) / longest, cut = round_up((in + cuts - 1) / cuts, VL);
    for (ptrdiff_t b0 = 0; b0 < rows; b0 += most)
        for (ptrdiff_t i = 0; i < in; i += cut)
            for (ptrdiff_t o = 0; o < out; o += DOT_FILTERS)
                for (ptrdiff_t b = b0; b < at_most(b0 + most, rows); b += DOT_ROWS)
                    dot_tile(x + b * x_row + i, x_row, at_most(DOT_ROWS, rows - b), w + o * in + i, in, out - o,
                             at_most(cut, in - i), y + b * y_row + o, y_row);
}

/* Backward: c[m][n] = sum over k of a(m, k) b[k][n] --------------------------------------------------------------- */

#define OUTER_ROWS 6
#define OUTER_VECTORS (WIDE_REGISTERS ? 4 : 2)

/* Examples of the next step, which are prefetched during this one. */
typedef struct {
    const char *values; /* null if unknown */
    const int64_t *index;
    ptrdiff_t rows, bytes; /* the number of rows, and the length of one */
} ahead_t;

typedef struct {
    const float *a; /* a(m, k) = a[m * a_m + k * a_k] */
    ptrdiff_t a_m, a_k;
    const float *b;
    ptrdiff_t b_row, depth;
    float *c; /* receives the sums; if null, `step` is applied at parameter `at` + m * c_row + n */
    ptrdiff_t c_row;
    const step_t *step;
    ptrdiff_t at;
} outer_t;

/* Store a finished tile, or apply it as a step. */
INLINE void outer_end(const int M, const int N, const int PART, const outer_t *job, ptrdiff_t m, ptrdiff_t n,
                      ptrdiff_t lanes, const vf *sum) {
    float *c = (job->c ? job->c : target(job->step) + job->at) + m * job->c_row + n;
    if (job->c) {
        UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++)
            store_part(c + i * job->c_row + j * VL, sum[i * N + j], PART ? lanes : VL);
    } else if (plain(job->step) && job->step->change) {
        vf rate = splat(-job->step->lr);
        UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++)
            store_part(c + i * job->c_row + j * VL, rate * sum[i * N + j], PART ? lanes : VL);
    } else if (plain(job->step) && job->step->to) {
        vf rate = splat(-job->step->lr);
        ptrdiff_t first = job->at + m * job->c_row + n;
        const float *from = job->step->y + first, *less = job->step->minus ? job->step->minus + first : NULL;
        UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) {
            ptrdiff_t at = i * job->c_row + j * VL, some = PART ? lanes : VL;
            vf y = madd(rate, sum[i * N + j], load_part(from + at, some));
            if (less) y = y - load_part(less + at, some);
            store_part(c + at, y, some);
        }
    } else if (plain(job->step)) {
        vf rate = splat(-job->step->lr);
        UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) {
            float *to = c + i * job->c_row + j * VL;
            store_part(to, madd(rate, sum[i * N + j], load_part(to, PART ? lanes : VL)), PART ? lanes : VL);
        }
    } else {
        float tile[6 * 4 * VL];
        UNROLL for (int i = 0; i < M * N; i++) store(tile + i * VL, sum[i]);
        for (int i = 0; i < M; i++)
            step_span(job->step, job->at + (m + i) * job->c_row + n, tile + i * N * VL, PART ? lanes : N * VL, 1.0f);
    }
}

INLINE void outer_tile(const int M, const int N, const int PART, const outer_t *job, ptrdiff_t m, ptrdiff_t n,
                       ptrdiff_t lanes) {
    vf sum[6 * 4];
    const float *a = job->a + m * job->a_m, *b = job->b + n;
    ptrdiff_t a_m = job->a_m, a_k = job->a_k, b_row = job->b_row;
    float *c = (job->c ? job->c : target(job->step) + job->at) + m * job->c_row + n;
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) {
        __builtin_prefetch(c + i * job->c_row + j * VL, 1);
        sum[i * N + j] = zero();
    }
    for (ptrdiff_t k = 0; k < job->depth; k++, a += a_k, b += b_row) {
        vf row[4];
        UNROLL for (int j = 0; j < N; j++) row[j] = PART ? load_part(b + j * VL, lanes) : load(b + j * VL);
        UNROLL for (int i = 0; i < M; i++) {
            vf value = splat(a[i * a_m]);
            UNROLL for (int j = 0; j < N; j++) sum[i * N + j] = madd(value, row[j], sum[i * N + j]);
        }
    }
    outer_end(M, N, PART, job, m, n, lanes, sum);
}

#define OUTER_CASE(M, N)                                                                                            \
    case 8 * M + N: outer_tile(M, N, 0, job, m, n, VL); break;
#define OUTER_CASES(M)                                                                                              \
    OUTER_CASE(M, 1)                                                                                               \
    OUTER_CASE(M, 2)                                                                                               \
    case 8 * M: outer_tile(M, 1, 1, job, m, n, lanes); break;

static void outer_tiles(const outer_t *job, ptrdiff_t M, ptrdiff_t N, ptrdiff_t m, ptrdiff_t n, ptrdiff_t lanes) {
    switch (8 * M + N) {
        OUTER_CASES(1) OUTER_CASES(2) OUTER_CASES(3) OUTER_CASES(4) OUTER_CASES(5) OUTER_CASES(6)
#if WIDE_REGISTERS
        OUTER_CASE(1, 3) OUTER_CASE(2, 3) OUTER_CASE(3, 3) OUTER_CASE(4, 3) OUTER_CASE(5, 3) OUTER_CASE(6, 3)
        OUTER_CASE(1, 4) OUTER_CASE(2, 4) OUTER_CASE(3, 4) OUTER_CASE(4, 4) OUTER_CASE(5, 4) OUTER_CASE(6, 4)
#endif
    }
}

static void outer(const outer_t *job, ptrdiff_t rows, ptrdiff_t columns) {
    ptrdiff_t whole = columns / VL, blocks = (whole + OUTER_VECTORS - 1) / OUTER_VECTORS;
    ptrdiff_t bands = (rows + OUTER_ROWS - 1) / OUTER_ROWS;
    for (ptrdiff_t block = 0, v = 0; block <= blocks; block++) {
        int part = block == blocks; /* the last, partial vector is a separate block */
        ptrdiff_t N = part ? 0 : (whole - v + blocks - block - 1) / (blocks - block);
        if (part && columns == whole * VL) break;
        for (ptrdiff_t band = 0, m = 0; band < bands; band++) {
            ptrdiff_t M = (rows - m + bands - band - 1) / (bands - band);
            outer_tiles(job, M, N, m, v * VL, columns - whole * VL);
            m += M;
        }
        v += N;
    }
}

/* The same for an `a` that is mostly zeros: row m has the entries start[m] to start[m + 1] of a list. */

#define LIST_VECTORS 13
#define LIST_AHEAD 4 /* filters whose weights are prefetched */

typedef struct {
    const float *value;
    const int32_t *place; /* k */
    const int32_t *start;
} outer_list_t;

/* Lists the nonzero entries of a[k][m], m < rows. `value` and `place` hold at most rows * depth plus one vector;
 * `turned` is scratch of VL times the depth, rounded up. */
static void list_outer(const float *a, ptrdiff_t a_k, ptrdiff_t rows, ptrdiff_t depth, float *turned, float *value,
                       int32_t *place, int32_t *start) {
    ptrdiff_t end = 0, stride = round_up(depth, VL);
    int32_t ramp[VL];
    for (int i = 0; i < VL; i++) ramp[i] = i;
    for (ptrdiff_t m = 0; m < rows; m += VL) {
        ptrdiff_t some = at_most(VL, rows - m);
        transpose(a + m, a_k, turned, stride, depth, some);
        for (ptrdiff_t i = 0; i < some; i++) {
            start[m + i] = (int32_t)end;
            for (ptrdiff_t k = 0; k < depth; k += VL)
                end = append(value, place, end, load_part(turned + i * stride + k, depth - k),
                             add_int(load_int(ramp), splat_int((int32_t)k)));
        }
    }
    start[rows] = (int32_t)end;
}

INLINE void listed_tile(const int N, const int PART, const outer_t *job, const outer_list_t *list, ptrdiff_t m,
                        ptrdiff_t n, ptrdiff_t lanes) {
    vf sum[LIST_VECTORS];
    const float *b = job->b + n;
    ptrdiff_t b_row = job->b_row;
    const float *next = (job->c ? job->c : target(job->step) + job->at) + (m + LIST_AHEAD) * job->c_row + n;
    UNROLL for (int j = 0; j < N; j++) {
        __builtin_prefetch(next + j * VL, 1);
        sum[j] = zero();
    }
    for (ptrdiff_t i = list->start[m]; i < list->start[m + 1]; i++) {
        const float *row = b + list->place[i] * b_row;
        vf value = splat(list->value[i]);
        UNROLL for (int j = 0; j < N; j++)
            sum[j] = madd(value, PART ? load_part(row + j * VL, lanes) : load(row + j * VL), sum[j]);
    }
    outer_end(1, N, PART, job, m, n, lanes, sum);
}

static void outer_listed(const outer_t *job, const outer_list_t *list, ptrdiff_t rows, ptrdiff_t columns,
                         const ahead_t *ahead) {
    ptrdiff_t whole = columns / VL, blocks = (whole + LIST_VECTORS - 1) / LIST_VECTORS, lanes = columns - whole * VL;
    ptrdiff_t asked = 0, byte = 0, lines = ahead->values ? ahead->rows * ((ahead->bytes + 63) / 64) : 0;
    ptrdiff_t tiles = at_least(1, blocks * rows), each = (lines + tiles - 1) / tiles;
    for (ptrdiff_t block = 0, v = 0, N; block < blocks; block++, v += N) {
        N = (whole - v + blocks - block - 1) / (blocks - block);
        for (ptrdiff_t m = 0; m < rows; m++) {
#define LISTED_CASE(N)                                                                                              \
    case N: listed_tile(N, 0, job, list, m, v * VL, VL); break;
            switch (N) {
                LISTED_CASE(1) LISTED_CASE(2) LISTED_CASE(3) LISTED_CASE(4)
                LISTED_CASE(5) LISTED_CASE(6) LISTED_CASE(7) LISTED_CASE(8)
                LISTED_CASE(9) LISTED_CASE(10) LISTED_CASE(11) LISTED_CASE(12) LISTED_CASE(13)
            }
#undef LISTED_CASE
            for (ptrdiff_t i = 0; i < each && asked < ahead->rows; i++) {
                __builtin_prefetch(ahead->values + ahead->index[asked] * ahead->bytes + byte, 0, 2);
                byte += 64;
                if (byte < ahead->bytes) continue;
                byte = 0;
                asked++;
            }
        }
    }
    for (ptrdiff_t m = 0; lanes && m < rows; m++) listed_tile(1, 1, job, list, m, whole * VL, lanes);
}

#endif
