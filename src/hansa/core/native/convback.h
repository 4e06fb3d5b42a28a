/* Backward pass of a convolution, one image at a time.
 *
 * With a 2x2 pool three of four output gradients are zero, and ReLU zeroes more. For 3x3 and 5x5 kernels the gradients
 * are therefore stored as sparse lists (value, place): at most a quarter of the dense work. Other kernels, and
 * convolutions without a pool, use the dense form. */
#ifndef HANSA_CONVBACK_H
#define HANSA_CONVBACK_H

#include "conv.h"

/* Nonzero gradient values of one image in groups: group i is start[i] .. start[i + 1]. A group is a filter, with
 * `place` the offset of the window in the padded image; or one of the four positions of a pool window, with `place` the
 * filter. */
typedef struct {
    float *value;
    int32_t *place, *start;
} sparse_t;

/* From [positions][channels] to lists by filter. `turned` and `turned_which` are scratch of [channels][stride]. */
static void list_by_filter(const float *g, const int32_t *which, ptrdiff_t positions, ptrdiff_t channels,
                           ptrdiff_t filters, const int32_t *base, ptrdiff_t right, ptrdiff_t down, float *turned,
                           int32_t *turned_which, sparse_t list) {
    ptrdiff_t stride = round_up(positions, VL), end = 0;
    transpose(g, channels, turned, stride, positions, channels);
    transpose((const float *)which, channels, (float *)turned_which, stride, positions, channels);
    const vi right_step = splat_int((int32_t)right), down_step = splat_int((int32_t)down);
    for (ptrdiff_t o = 0; o < filters; o++) {
        list.start[o] = (int32_t)end;
        for (ptrdiff_t p = 0; p < positions; p += VL) {
            vi q = load_int(turned_which + o * stride + p), place = load_int(base + p);
            place = add_int(place, add_int(where_bit(q, 1, right_step), where_bit(q, 2, down_step)));
            end = append(list.value, list.place, end, load_part(turned + o * stride + p, positions - p), place);
        }
    }
    list.start[filters] = (int32_t)end;
}

/* From [positions][channels], of which the first `filters` count, to lists by position and place in the pool's window:
 * start[4 p + which]. */
static void list_by_position(const float *g, const int32_t *which, ptrdiff_t positions, ptrdiff_t channels,
                             ptrdiff_t filters, sparse_t list) {
    ptrdiff_t end = 0;
    int32_t ramp[VL];
    for (int i = 0; i < VL; i++) ramp[i] = i;
    const vi lanes = load_int(ramp);
    for (ptrdiff_t p = 0; p < positions; p++) {
        for (int32_t q = 0; q < 4; q++) {
            list.start[4 * p + q] = (int32_t)end;
            for (ptrdiff_t o = 0; o < filters; o += VL) {
                vf all = load_part(g + p * channels + o, filters - o);
                vf value = where_equal(load_int(which + p * channels + o), splat_int(q), all);
                end = append(list.value, list.place, end, value, add_int(lanes, splat_int((int32_t)o)));
            }
        }
    }
    list.start[4 * positions] = (int32_t)end;
}

/* dW of one filter, R of its K rows and CV channel vectors, all in registers: sum of value * window. */
INLINE void sparse_filter(const int K, const int R, const int CV, const float *x, ptrdiff_t row, ptrdiff_t channels,
                          const float *value, const int32_t *place, ptrdiff_t count, float *dw) {
    vf sum[27];
    ptrdiff_t column = channels * (ptrdiff_t)sizeof(float), column3 = 3 * column;
    ptrdiff_t row1 = row * (ptrdiff_t)sizeof(float), row3 = 3 * row1;
    OPAQUE(column);
    OPAQUE(column3);
    OPAQUE(row1);
    OPAQUE(row3);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < K; k++) UNROLL for (int c = 0; c < CV; c++)
        sum[(r * K + k) * CV + c] = load(dw + (r * K + k) * channels + c * VL);
    for (ptrdiff_t i = 0; i < count; i++) {
        const char *at = (const char *)(x + place[i]);
        vf g = splat(value[i]);
        UNROLL for (int r = 0; r < R; r++) {
            const char *line = r == 3 ? at + row3 : at + r * row1;
            UNROLL for (int k = 0; k < K; k++) {
                const char *cell = k == 3 ? line + column3 : line + k * column;
                UNROLL for (int c = 0; c < CV; c++) {
                    const int s = (r * K + k) * CV + c;
                    sum[s] = madd(g, load((const float *)cell + c * VL), sum[s]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < K; k++) UNROLL for (int c = 0; c < CV; c++)
        store(dw + (r * K + k) * channels + c * VL, sum[(r * K + k) * CV + c]);
}

/* dW[filter][K][K][channels] += for one image. Wide registers hold all rows of a kernel, narrow ones some of them. */
#define SPARSE_ROWS(K, R, CV, from, c)                                                                              \
    sparse_filter(K, R, CV, x + (from) * row + (c), row, channels, value, place, count,                            \
                  to + (from) * K * channels + (c))
#define SPARSE_FILTERS(K, BODY)                                                                                     \
    static void sparse_filters_##K(const float *x, ptrdiff_t row, ptrdiff_t channels, sparse_t list,               \
                                   ptrdiff_t filters, float *dw) {                                                 \
        for (ptrdiff_t o = 0; o < filters; o++) {                                                                  \
            const float *value = list.value + list.start[o];                                                       \
            const int32_t *place = list.place + list.start[o];                                                     \
            ptrdiff_t count = list.start[o + 1] - list.start[o];                                                   \
            float *to = dw + o * K * K * channels;                                                                 \
            for (ptrdiff_t i = 0; i < K * K * channels; i += 16) __builtin_prefetch(to + K * K * channels + i, 1); \
            if (count) BODY                                                                                        \
        }                                                                                                          \
    }
#if WIDE_REGISTERS
SPARSE_FILTERS(3, {
    ptrdiff_t c = 0;
    for (; c + 2 * VL <= channels; c += 2 * VL) SPARSE_ROWS(3, 3, 2, 0, c);
    if (c < channels) SPARSE_ROWS(3, 3, 1, 0, c);
})
SPARSE_FILTERS(5, {
    for (ptrdiff_t c = 0; c < channels; c += VL) SPARSE_ROWS(5, 5, 1, 0, c);
})
#else
SPARSE_FILTERS(3, {
    for (ptrdiff_t c = 0; c < channels; c += VL) SPARSE_ROWS(3, 3, 1, 0, c);
})
SPARSE_FILTERS(5, {
    for (ptrdiff_t c = 0; c < channels; c += VL) {
        SPARSE_ROWS(5, 2, 1, 0, c);
        SPARSE_ROWS(5, 2, 1, 2, c);
        SPARSE_ROWS(5, 1, 1, 4, c);
    }
})
#endif

/* dX of R kernel rows of one channel vector: the (R + 1) x (K + 1) places that a pool window's four positions reach
 * stay in registers while all filters add to them. `slab` is [filter][R][K][VL]. */
INLINE void sparse_input(const int K, const int R, const float *slab, sparse_t list, ptrdiff_t height, ptrdiff_t width,
                         float *dx, ptrdiff_t row, ptrdiff_t channels) {
    for (ptrdiff_t py = 0, p = 0; py < height; py++) {
        for (ptrdiff_t px = 0; px < width; px++, p++) {
            vf sum[4 * 6];
            UNROLL for (int s = 0; s < (R + 1) * (K + 1); s++) sum[s] = zero();
            UNROLL for (int q = 0; q < 4; q++) {
                for (ptrdiff_t i = list.start[4 * p + q]; i < list.start[4 * p + q + 1]; i++) {
                    const float *w = slab + list.place[i] * (ptrdiff_t)(R * K * VL);
                    vf g = splat(list.value[i]);
                    UNROLL for (int r = 0; r < R; r++) UNROLL for (int k = 0; k < K; k++) {
                        const int s = (r + (q >> 1)) * (K + 1) + k + (q & 1);
                        sum[s] = madd(g, load(w + (r * K + k) * VL), sum[s]);
                    }
                }
            }
            float *to = dx + 2 * py * row + 2 * px * channels;
            UNROLL for (int r = 0; r <= R; r++) UNROLL for (int k = 0; k <= K; k++) {
                float *cell = to + r * row + k * channels;
                store(cell, load(cell) + sum[r * (K + 1) + k]);
            }
        }
    }
}

/* The division of a kernel's rows into passes of sparse_input. */
INLINE ptrdiff_t input_pass(ptrdiff_t kernel, ptrdiff_t from) {
    if (WIDE_REGISTERS) return at_most(3, kernel - from);
    return kernel == 3 ? at_most(2, kernel - from) : 1;
}

/* Reorder weights [filter][K][K][in] into the slabs of sparse_input: [vector][pass][filter][R][K][VL]. */
static void pack_sparse(const float *weight, ptrdiff_t filters, ptrdiff_t K, ptrdiff_t in, float *slab) {
    for (ptrdiff_t c = 0; c < in; c += VL)
        for (ptrdiff_t from = 0, R; from < K; from += R) {
            R = input_pass(K, from);
            for (ptrdiff_t o = 0; o < filters; o++)
                for (ptrdiff_t t = 0; t < R * K; t++, slab += VL)
                    store(slab, load_part(weight + ((o * K + from) * K + t) * in + c, in - c));
        }
}

/* dX += for one image, over all channel vectors and passes. */
static void sparse_inputs(ptrdiff_t K, const float *slab, sparse_t list, ptrdiff_t filters, ptrdiff_t height,
                          ptrdiff_t width, float *dx, ptrdiff_t row, ptrdiff_t channels) {
    for (ptrdiff_t c = 0; c < channels; c += VL)
        for (ptrdiff_t from = 0, R; from < K; from += R) {
            float *to = dx + from * row + c;
            R = input_pass(K, from);
            if (K == 3 && R == 1) sparse_input(3, 1, slab, list, height, width, to, row, channels);
            if (K == 3 && R == 2) sparse_input(3, 2, slab, list, height, width, to, row, channels);
            if (K == 5 && R == 1) sparse_input(5, 1, slab, list, height, width, to, row, channels);
#if WIDE_REGISTERS
            if (K == 3 && R == 3) sparse_input(3, 3, slab, list, height, width, to, row, channels);
            if (K == 5 && R == 2) sparse_input(5, 2, slab, list, height, width, to, row, channels);
            if (K == 5 && R == 3) sparse_input(5, 3, slab, list, height, width, to, row, channels);
#endif
            slab += filters * R * K * VL;
        }
}

/* dW of a dense gradient: R contiguous window values times V output vectors over all positions. */
INLINE void dense_tile(const int R, const int V, const float *x, ptrdiff_t row, ptrdiff_t column, const float *g,
                       ptrdiff_t g_row, ptrdiff_t out_step, ptrdiff_t height, ptrdiff_t width, float *dw) {
    vf sum[14 * 2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
        sum[r * V + v] = load(dw + r * out_step + v * VL);
    for (ptrdiff_t y = 0; y < height; y++) {
        const float *at = x + y * row, *gradient = g + y * g_row;
        for (ptrdiff_t i = 0; i < width; i++, at += column, gradient += out_step) {
            vf upper[2];
            UNROLL for (int v = 0; v < V; v++) upper[v] = load(gradient + v * VL);
            UNROLL for (int r = 0; r < R; r++) {
                vf value = splat(at[r]);
                UNROLL for (int v = 0; v < V; v++) sum[r * V + v] = madd(value, upper[v], sum[r * V + v]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
        store(dw + r * out_step + v * VL, sum[r * V + v]);
}

#define DENSE_CASE(R)                                                                                               \
    case R:                                                                                                        \
        if (pair) dense_tile(R, 2, x, row, column, g, g_row, out_step, height, width, dw);                         \
        else dense_tile(R, 1, x, row, column, g, g_row, out_step, height, width, dw);                              \
        break;
static void dense_tiles(ptrdiff_t R, int pair, const float *x, ptrdiff_t row, ptrdiff_t column, const float *g,
                        ptrdiff_t g_row, ptrdiff_t out_step, ptrdiff_t height, ptrdiff_t width, float *dw) {
    switch (R) {
        DENSE_CASE(1) DENSE_CASE(2) DENSE_CASE(3) DENSE_CASE(4) DENSE_CASE(5) DENSE_CASE(6)
#if WIDE_REGISTERS
        DENSE_CASE(7) DENSE_CASE(8) DENSE_CASE(9) DENSE_CASE(10) DENSE_CASE(11) DENSE_CASE(12) DENSE_CASE(13)
        DENSE_CASE(14)
#endif
    }
}

/* dW[taps][out_step] += for one image, whose windows are `row` and `column` floats apart. */
static void dense_filters(const float *x, ptrdiff_t row, ptrdiff_t column, window_t window, const float *g,
                          ptrdiff_t g_row, ptrdiff_t out_step, ptrdiff_t height, ptrdiff_t width, float *dw) {
    ptrdiff_t tiles = (window.length + TILE_POSITIONS - 1) / TILE_POSITIONS;
    for (ptrdiff_t r = 0; r < window.rows; r++)
        for (ptrdiff_t run = 0; run < window.runs; run++)
            for (ptrdiff_t t = 0, k = 0; t < tiles; t++) {
                ptrdiff_t many = (window.length - k + tiles - t - 1) / (tiles - t);
                const float *at = x + r * window.row + run * window.run_step + k;
                float *to = dw + ((r * window.runs + run) * window.length + k) * out_step;
                for (ptrdiff_t o = 0; o < out_step; o += 2 * VL)
                    dense_tiles(many, out_step - o >= 2 * VL, at, row, column, g + o, g_row, out_step, height,
                                width, to + o);
                k += many;
            }
}

/* The number of a kernel's K taps that reach places congruent to `phase` modulo the stride. */
INLINE ptrdiff_t taps_of(ptrdiff_t K, ptrdiff_t stride, ptrdiff_t phase) { return (K - phase + stride - 1) / stride; }

/* Weights [filter][K][K][in] of the transposed convolution in the order of pack_forward: [in][H][W][filter], rotated.
 * With a stride only those that reach the places of one phase; all for stride one. */
static void pack_dense(const float *weight, ptrdiff_t filters, ptrdiff_t K, ptrdiff_t in, ptrdiff_t stride,
                       ptrdiff_t down, ptrdiff_t right, float *scratch, float *packed) {
    ptrdiff_t H = taps_of(K, stride, down), W = taps_of(K, stride, right);
    for (ptrdiff_t o = 0; o < filters; o++)
        for (ptrdiff_t t = 0; t < H * W; t++) {
            const float *tap = weight + ((o * K + down + t / W * stride) * K + right + t % W * stride) * in;
            for (ptrdiff_t c = 0; c < in; c++) scratch[(c * H * W + (H * W - 1 - t)) * filters + o] = tap[c];
        }
    pack_forward(scratch, in, H * W * filters, packed);
}

#endif
