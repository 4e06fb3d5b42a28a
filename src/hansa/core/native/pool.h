/* Pools of any window and step over one image [height][width][channels], channels a multiple of VL; conv.h has the fast
 * 2x2 maximum. */
#ifndef HANSA_POOL_H
#define HANSA_POOL_H

#include "native.h"
#include "vector.h"

typedef struct {
    ptrdiff_t h, w, down, right; /* window and steps */
} pool_t;

/* The maximum of each window, then ReLU if requested; `which` gets the first of equals in row order, as in torch. */
static void pool_max(pool_t pool, const float *x, ptrdiff_t row, ptrdiff_t channels, ptrdiff_t height, ptrdiff_t width,
                     int relu, float *out, ptrdiff_t out_row, int32_t *which) {
    for (ptrdiff_t y = 0; y < height; y++)
        for (ptrdiff_t i = 0; i < width; i++)
            for (ptrdiff_t c = 0; c < channels; c += VL, which += VL) {
                const float *at = x + y * pool.down * row + i * pool.right * channels + c;
                vf best = load(at);
                vi index = splat_int(0);
                for (ptrdiff_t q = 1; q < pool.h * pool.w; q++)
                    challenge(&best, &index, load(at + q / pool.w * row + q % pool.w * channels), (int32_t)q);
                store(out + y * out_row + i * channels + c, relu ? where_positive(best, best) : best);
                store_int(which, index);
            }
}

static void pool_mean(pool_t pool, const float *x, ptrdiff_t row, ptrdiff_t channels, ptrdiff_t height, ptrdiff_t width,
                      int relu, float *out, ptrdiff_t out_row) {
    const vf count = splat((float)(pool.h * pool.w));
    for (ptrdiff_t y = 0; y < height; y++)
        for (ptrdiff_t i = 0; i < width; i++)
            for (ptrdiff_t c = 0; c < channels; c += VL) {
                const float *at = x + y * pool.down * row + i * pool.right * channels + c;
                vf sum = load(at);
                for (ptrdiff_t q = 1; q < pool.h * pool.w; q++)
                    sum = sum + load(at + q / pool.w * row + q % pool.w * channels);
                vf mean = sum / count;
                store(out + y * out_row + i * channels + c, relu ? where_positive(mean, mean) : mean);
            }
}

/* Adds the gradient g [height][width][channels] of the pooled image to the chosen places, or (with `which` null)
 * divides it among all places of a window. */
static void pool_spread(pool_t pool, const float *g, const int32_t *which, ptrdiff_t channels, ptrdiff_t height,
                        ptrdiff_t width, float *to, ptrdiff_t row) {
    const vf count = splat((float)(pool.h * pool.w));
    for (ptrdiff_t y = 0; y < height; y++)
        for (ptrdiff_t i = 0; i < width; i++)
            for (ptrdiff_t c = 0; c < channels; c += VL, g += VL) {
                float *at = to + y * pool.down * row + i * pool.right * channels + c;
                vf all = load(g), share = all / count;
                vi place = which ? load_int(which) : splat_int(0);
                for (ptrdiff_t q = 0; q < pool.h * pool.w; q++) {
                    float *cell = at + q / pool.w * row + q % pool.w * channels;
                    store(cell, load(cell) + (which ? where_equal(place, splat_int((int32_t)q), all) : share));
                }
                if (which) which += VL;
            }
}

#endif
