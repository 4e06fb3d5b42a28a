/* Winograd's minimal filtering for 3x3 and 5x5 kernels before a 2x2 pool.
 *
 * The 2x2 outputs of a pool window come from (K + 1) x (K + 1) inputs d by (K + 1)^2 products instead of 4 K^2:
 * Y = A' ((G g G') * (B' d B)) A, a matrix product for each of the (K + 1)^2 points (Lavin and Gray, "Fast Algorithms
 * for Convolutional Neural Networks", CVPR 2016). 3x3 kernels interpolate at 0, 1, -1 and infinity, which rounds like
 * the plain sum; 5x5 kernels at 0, 1, -1, 1/2, -2 and infinity, with two to three times the error of the plain sum
 * (Barabasz et al., ACM TOMS 46, 2020). If the error could change the maximum of a window or ReLU's mask, the plain
 * sums are computed and decide: the first of equal maxima is chosen. */
#ifndef HANSA_WINOGRAD_H
#define HANSA_WINOGRAD_H

#include "conv.h"

enum { WINOGRAD_TILES = 14 }; /* pool windows processed together, or a row of them if that is more */

/* Outputs closer than this times the sum of a filter's weights times the largest input are recomputed. */
#define WINOGRAD_DOUBT 0x1p-20f

typedef struct {
    ptrdiff_t band; /* rows of pool windows processed together */
    ptrdiff_t in_step, padded_h, out_h, out_w;
    filters_t filters; /* of one point; `weight` of the first */
    float *columns;    /* [K + 1][columns of a row's inputs][in_step] */
    float *inputs;     /* [(K + 1)^2][windows of a band][in_step] */
    float *products;   /* [K + 1][windows][out_step] */
    float *halves;     /* [K + 1][2][windows][out_step] */
    float *doubt;      /* [out_step], for inputs of 1 */
    float *again;      /* [2][2][out_step] */
} winograd_t;

/* B' d, `points` = K + 1 of them. */
INLINE void winograd_in(const int K, const vf *d, vf *v) {
    if (K == 3) {
        v[0] = d[0] - d[2];
        v[1] = d[1] + d[2];
        v[2] = d[2] - d[1];
        v[3] = d[3] - d[1];
        return;
    }
    const vf half = splat(0.5f), more = splat(1.5f), twice = splat(2.0f);
    vf low = d[3] - d[1], high = d[4] - d[2];
    vf q0 = madd(more, d[1], d[2] - d[0]), q1 = madd(more, d[2], low); /* d times x^2 + 3/2 x - 1, shifted */
    vf q2 = madd(more, d[3], high), q3 = madd(more, d[4], d[5] - d[3]);
    v[0] = q2 - q0;
    v[1] = q2 + q1;
    v[2] = q2 - q1;
    v[3] = madd(twice, low, high);
    v[4] = high - half * low;
    v[5] = q3 - q1;
}

/* G g. */
INLINE void winograd_weight(const int K, const vf *g, vf *u) {
    if (K == 3) {
        vf even = splat(0.5f) * (g[0] + g[2]), odd = splat(0.5f) * g[1];
        u[0] = g[0];
        u[1] = even + odd;
        u[2] = even - odd;
        u[3] = g[2];
        return;
    }
    vf even = g[0] + g[2] + g[4], odd = g[1] + g[3];
    vf small = madd(splat(0.5f), g[1], g[0]), large = madd(splat(-2.0f), g[1], g[0]);
    small = madd(splat(0.25f), g[2], small);
    large = madd(splat(4.0f), g[2], large);
    small = madd(splat(0.125f), g[3], small);
    large = madd(splat(-8.0f), g[3], large);
    small = madd(splat(0.0625f), g[4], small);
    large = madd(splat(16.0f), g[4], large);
    u[0] = g[0];
    u[1] = splat(1.0f / 3.0f) * (even + odd);
    u[2] = splat(-1.0f / 3.0f) * (even - odd);
    u[3] = splat(-16.0f / 15.0f) * small;
    u[4] = splat(1.0f / 15.0f) * large;
    u[5] = g[4];
}

/* A' m: the two outputs. */
INLINE void winograd_out(const int K, const vf *m, vf *y) {
    vf sum = m[1] + m[2], difference = m[1] - m[2];
    if (K == 3) {
        y[0] = m[0] + sum;
        y[1] = difference + m[3];
    } else {
        y[0] = m[0] + sum + (m[3] + m[4]);
        y[1] = madd(splat(-2.0f), m[4], madd(splat(0.5f), m[3], difference)) + m[5];
    }
}

/* From the result of pack_forward, [pair of output vectors][K K channels][width], to [point][pair][channels][width]. */
INLINE void winograd_weights(const int K, const float *packed, ptrdiff_t channels, ptrdiff_t out_step, float *points,
                             float *doubt) {
    for (ptrdiff_t o = 0; o < out_step; o += VL) {
        ptrdiff_t pair = o - o % (2 * VL), width = at_most(2 * VL, out_step - pair);
        vf total = zero();
        for (ptrdiff_t c = 0; c < channels; c++) {
            const float *from = packed + pair * K * K * channels + c * width + (o - pair);
            float *to = points + pair * channels + c * width + (o - pair);
            vf half[6][5], column[6], row[6];
            UNROLL for (int x = 0; x < K; x++) {
                UNROLL for (int y = 0; y < K; y++) {
                    column[y] = load(from + (y * K + x) * channels * width);
                    total = total + larger(column[y], -column[y]);
                }
                winograd_weight(K, column, row);
                UNROLL for (int y = 0; y <= K; y++) half[y][x] = row[y];
            }
            UNROLL for (int y = 0; y <= K; y++) {
                winograd_weight(K, half[y], row);
                UNROLL for (int x = 0; x <= K; x++)
                    store(to + (y * (K + 1) + x) * channels * out_step, row[x]);
            }
        }
        store(doubt + o, splat(WINOGRAD_DOUBT) * total);
    }
}

/* Transform the inputs of one row of pool windows, from `x`, to the points of the windows from `window` on. */
INLINE void winograd_inputs(const int K, const winograd_t *job, const float *x, ptrdiff_t windows, ptrdiff_t window) {
    ptrdiff_t row = job->filters.window.row, step = job->in_step, columns = 2 * job->out_w + K - 1;
    ptrdiff_t line = columns * step, point = windows * step;
    vf d[6], v[6];
    for (ptrdiff_t i = 0; i < line; i += VL) {
        UNROLL for (int y = 0; y <= K; y++) d[y] = load(x + y * row + i);
        winograd_in(K, d, v);
        UNROLL for (int y = 0; y <= K; y++) store(job->columns + y * line + i, v[y]);
    }
    for (ptrdiff_t y = 0; y <= K; y++)
        for (ptrdiff_t t = 0; t < job->out_w; t++)
            for (ptrdiff_t c = 0; c < step; c += VL) {
                float *to = job->inputs + y * (K + 1) * point + (window + t) * step + c;
                UNROLL for (int i = 0; i <= K; i++) d[i] = load(job->columns + y * line + (2 * t + i) * step + c);
                winograd_in(K, d, v);
                UNROLL for (int i = 0; i <= K; i++) store(to + i * point, v[i]);
            }
}

/* The largest input of an image in magnitude. */
INLINE float winograd_largest(const winograd_t *job, const float *x) {
    float lanes[VL], largest = 0;
    vf most = zero();
    for (ptrdiff_t i = 0; i < job->padded_h * job->filters.window.row; i += VL)
        most = larger(larger(load(x + i), -load(x + i)), most);
    store(lanes, most);
    for (int i = 0; i < VL; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
}

/* Whether the maximum of a window is uncertain in some lane. Outputs that ReLU certainly zeroes do not count. */
INLINE int winograd_close(const vf *y, vf doubt, int relu) {
    vf above = larger(y[0], y[1]), below = larger(y[2], y[3]), best = larger(above, below);
    vf second = larger(smaller(above, below), larger(smaller(y[0], y[1]), smaller(y[2], y[3])));
    vf lead = best - second;
    if (relu) lead = larger(smaller(lead, best), -best);
    return any_within(lead, doubt);
}

/* One image: convolution, ReLU if requested, pool. `plain` are the filters of the plain form. */
INLINE void winograd_image(const int K, const winograd_t *job, const filters_t *plain, const float *x, int relu,
                           float *out, ptrdiff_t out_row, int32_t *which) {
    const ptrdiff_t out_step = plain->out_step, row = plain->window.row, channels = job->filters.window.length;
    const vf largest = splat(winograd_largest(job, x));
    vf m[6], y[4];
    for (ptrdiff_t from = 0, rows; from < job->out_h; from += rows) {
        rows = at_most(job->band, job->out_h - from);
        ptrdiff_t windows = rows * job->out_w, size = windows * out_step;
        for (ptrdiff_t r = 0; r < rows; r++)
            winograd_inputs(K, job, x + 2 * (from + r) * row, windows, r * job->out_w);
        for (ptrdiff_t p = 0; p <= K; p++) {
            for (ptrdiff_t q = 0; q <= K; q++) {
                filters_t filters = job->filters;
                ptrdiff_t point = p * (K + 1) + q;
                filters.weight += point * channels * out_step;
                conv_row(&filters, job->inputs + point * windows * job->in_step, job->products + q * size, windows);
            }
            float *to = job->halves + 2 * p * size;
            for (ptrdiff_t i = 0; i < size; i += VL) {
                UNROLL for (int q = 0; q <= K; q++) m[q] = load(job->products + q * size + i);
                winograd_out(K, m, y);
                store(to + i, y[0]);
                store(to + size + i, y[1]);
            }
        }
        for (ptrdiff_t window = 0; window < windows; window++) {
            ptrdiff_t above = from + window / job->out_w, left = window % job->out_w, made = -1;
            for (ptrdiff_t c = 0; c < out_step; c += VL, which += VL) {
                const float *half = job->halves + window * out_step + c;
                vf b = load(plain->bias + c), column[2];
                UNROLL for (int i = 0; i < 2; i++) {
                    UNROLL for (int p = 0; p <= K; p++) m[p] = load(half + (2 * p + i) * size);
                    winograd_out(K, m, column);
                    y[i] = column[0] + b;
                    y[2 + i] = column[1] + b;
                }
                if (winograd_close(y, load(job->doubt + c) * largest, relu)) {
                    ptrdiff_t pair = c - c % (2 * VL);
                    const float *at = x + 2 * above * row + 2 * left * job->in_step;
                    if (made != pair) {
                        conv_tile_t tile = conv_tiles[1][out_step - pair >= 2 * VL];
                        tile(plain, pair, at, job->again);
                        tile(plain, pair, at + row, job->again + 2 * out_step);
                        made = pair;
                    }
                    UNROLL for (int i = 0; i < 4; i++) y[i] = load(job->again + i * out_step + c);
                }
                vf best = y[0];
                vi index = splat_int(0);
                UNROLL for (int i = 1; i < 4; i++) challenge(&best, &index, y[i], i);
                store(out + above * out_row + left * out_step + c, relu ? where_positive(best, best) : best);
                store_int(which, index);
            }
        }
    }
}

#endif
