/* Convolution over padded NHWC images, one image at a time.
 *
 * A tile holds P neighbouring output positions of V output vectors in registers and traverses the window once: every
 * input is broadcast against V weight vectors. ReLU and pool process two new rows in the L1 cache. */
#ifndef HANSA_CONV_H
#define HANSA_CONV_H

#include "vector.h"

#define TILE_POSITIONS (WIDE_REGISTERS ? 14 : 6)

/* The memory layout of one window: `rows` rows `row` floats apart, each of `runs` runs `run_step` floats apart, each of
 * `length` contiguous floats. If channels need no padding, a window's row is a single run. */
typedef struct {
    ptrdiff_t rows, row, runs, run_step, length;
} window_t;

/* A layer's filters over inputs `position` floats apart: weights as pack_forward leaves them, `out_step` filters. */
typedef struct {
    window_t window;
    ptrdiff_t position, out_step;
    const float *weight, *bias;
} filters_t;

INLINE void conv_tile(const int P, const int V, const filters_t *filters, ptrdiff_t first, const float *x, float *out) {
    const window_t window = filters->window;
    const ptrdiff_t position = filters->position, out_step = filters->out_step;
    const float *weight = filters->weight + first * window.rows * window.runs * window.length;
    vf sum[14 * 2];
    ptrdiff_t odd[7]; /* odd multiples of the step between positions, in bytes; x86 addressing doubles them */
    UNROLL for (int i = 0; i < P / 2; i++) {
        odd[i] = (2 * i + 1) * position * (ptrdiff_t)sizeof(float);
        OPAQUE(odd[i]);
    }
    UNROLL for (int v = 0; v < V; v++) {
        vf b = load(filters->bias + first + v * VL);
        UNROLL for (int p = 0; p < P; p++) sum[p * V + v] = b;
    }
    for (ptrdiff_t row = 0; row < window.rows; row++) {
        for (ptrdiff_t run = 0; run < window.runs; run++) {
            const char *at = (const char *)(x + row * window.row + run * window.run_step);
            const char *end = at + window.length * (ptrdiff_t)sizeof(float);
            for (; at < end; at += sizeof(float), weight += V * VL) {
                vf w[2];
                UNROLL for (int v = 0; v < V; v++) w[v] = load(weight + v * VL);
                UNROLL for (int p = 0; p < P; p++) {
                    const int low = p ? p & -p : 1; /* p = odd number times a power of two */
                    vf value = splat(*(const float *)(p ? at + odd[p / low / 2] * low : at));
                    UNROLL for (int v = 0; v < V; v++) sum[p * V + v] = madd(value, w[v], sum[p * V + v]);
                }
            }
        }
    }
    UNROLL for (int p = 0; p < P; p++) {
        UNROLL for (int v = 0; v < V; v++) store(out + p * out_step + first + v * VL, sum[p * V + v]);
    }
}

typedef void (*conv_tile_t)(const filters_t *, ptrdiff_t first, const float *x, float *out);

#define CONV_TILE(P, V)                                                                                             \
    static void conv_tile_##P##_##V(const filters_t *filters, ptrdiff_t first, const float *x, float *out) {       \
        conv_tile(P, V, filters, first, x, out);                                                                   \
    }
#define CONV_TILES(P) CONV_TILE(P, 1) CONV_TILE(P, 2)
CONV_TILES(1) CONV_TILES(2) CONV_TILES(3) CONV_TILES(4) CONV_TILES(5) CONV_TILES(6)
#if WIDE_REGISTERS
CONV_TILES(7) CONV_TILES(8) CONV_TILES(9) CONV_TILES(10) CONV_TILES(11) CONV_TILES(12) CONV_TILES(13) CONV_TILES(14)
#endif
#define CONV_PAIR(P) {conv_tile_##P##_1, conv_tile_##P##_2}
static const conv_tile_t conv_tiles[][2] = {
    CONV_PAIR(1), CONV_PAIR(2), CONV_PAIR(3), CONV_PAIR(4), CONV_PAIR(5), CONV_PAIR(6),
#if WIDE_REGISTERS
    CONV_PAIR(7), CONV_PAIR(8), CONV_PAIR(9), CONV_PAIR(10), CONV_PAIR(11), CONV_PAIR(12), CONV_PAIR(13), CONV_PAIR(14),
#endif
};

/* One row of `count` output positions, all output vectors. */
static void conv_row(const filters_t *filters, const float *x, float *out, ptrdiff_t count) {
    ptrdiff_t tiles = (count + TILE_POSITIONS - 1) / TILE_POSITIONS;
    for (ptrdiff_t o = 0; o < filters->out_step; o += 2 * VL) {
        int pair = filters->out_step - o >= 2 * VL;
        for (ptrdiff_t t = 0, p = 0, width; t < tiles; t++, p += width) {
            width = (count - p + tiles - t - 1) / (tiles - t);
            conv_tiles[width - 1][pair](filters, o, x + p * filters->position, out + p * filters->out_step);
        }
    }
}

/* Reorder the weights of `out` filters of `taps` values, filter-major, for conv_tile: pairs of output vectors (the last
 * may be single), each [taps][one or two vectors], filters beyond `out` zero. */
static void pack_forward(const float *weight, ptrdiff_t out, ptrdiff_t taps, float *packed) {
    ptrdiff_t padded = round_up(out, VL);
    for (ptrdiff_t o = 0; o < padded; o += 2 * VL) {
        ptrdiff_t width = at_most(2 * VL, padded - o), present = at_most(width, out - o);
        float *block = packed + o * taps;
        transpose(weight + o * taps, taps, block, width, present, taps);
        for (ptrdiff_t t = 0; present < width && t < taps; t++)
            memset(block + t * width + present, 0, sizeof(float) * (width - present));
    }
}

/* ReLU (if requested) over `count` vectors. */
static void relu_row(const float *from, float *to, ptrdiff_t floats, int relu) {
    for (ptrdiff_t i = 0; i < floats; i += VL) {
        vf v = load(from + i);
        store(to + i, relu ? where_positive(v, v) : v);
    }
}

/* 2x2 maximum of two rows, then ReLU if requested; `which` gets 0..3, the first of equals, as in torch's max_pool2d. */
static void pool_rows(const float *upper, const float *lower, ptrdiff_t channels, ptrdiff_t count, int relu, float *to,
                      int32_t *which) {
    for (ptrdiff_t p = 0; p < count; p++) {
        for (ptrdiff_t c = 0; c < channels; c += VL) {
            const float *a = upper + 2 * p * channels + c, *b = lower + 2 * p * channels + c;
            vf best = load(a);
            vi index = splat_int(0);
            challenge(&best, &index, load(a + channels), 1);
            challenge(&best, &index, load(b), 2);
            challenge(&best, &index, load(b + channels), 3);
            store(to + p * channels + c, relu ? where_positive(best, best) : best);
            store_int(which + p * channels + c, index);
        }
    }
}

#endif
