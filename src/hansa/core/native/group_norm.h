/* Group normalisation of images [positions][channels]: y = gamma (x - mean) / sqrt(var + eps) + beta, with mean and
 * variance of all positions of a group of channels. Sums are per channel first, and channels are vectorized. */
#ifndef HANSA_GROUP_NORM_H
#define HANSA_GROUP_NORM_H

#include <math.h>

#include "stage.h"

enum { SUM_PARTS = 4 }; /* independent sums, added at the end */

/* Mean and scale of each channel for image n, as they were in the forward pass. */
INLINE float *group_means(const stage_t *s, ptrdiff_t n) { return s->scales + 2 * n * s->out_step; }
INLINE float *group_scales(const stage_t *s, ptrdiff_t n) { return group_means(s, n) + s->out_step; }

/* Replaces the sum of each channel by that of its group over `count`. */
static void share_groups(const stage_t *s, float *sums, float count) {
    const ptrdiff_t each = s->is.out / s->is.groups;
    for (ptrdiff_t c = 0; c < s->is.out; c += each) {
        float total = 0;
        for (ptrdiff_t i = 0; i < each; i++) total += sums[c + i];
        for (ptrdiff_t i = 0; i < each; i++) sums[c + i] = total / count;
    }
}

INLINE vf added(const int SQUARES, vf v, vf mean, vf sum) {
    if (!SQUARES) return sum + v;
    v = v - mean;
    return madd(v, v, sum);
}

/* The sums over positions of x, or with SQUARES of (x - mean)^2, of VL channels. */
INLINE vf sum_positions(const int SQUARES, const float *x, ptrdiff_t step, ptrdiff_t count, vf mean) {
    vf sum[SUM_PARTS];
    UNROLL for (int i = 0; i < SUM_PARTS; i++) sum[i] = zero();
    ptrdiff_t p = 0;
    for (; p + SUM_PARTS <= count; p += SUM_PARTS, x += SUM_PARTS * step) {
        UNROLL for (int i = 0; i < SUM_PARTS; i++) sum[i] = added(SQUARES, load(x + i * step), mean, sum[i]);
    }
    for (; p < count; p++, x += step) sum[0] = added(SQUARES, load(x), mean, sum[0]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Image n, normalised, then ReLU if requested, to rows `to_row` floats apart. */
static void group_norm_forward(const stage_t *s, ptrdiff_t n, int relu, float *to, ptrdiff_t to_row) {
    const ptrdiff_t count = s->conv_h * s->conv_w, step = s->out_step;
    const float share = (float)(count * (s->is.out / s->is.groups)), *x = s->in + n * image(s);
    float *mean = group_means(s, n), *scale = group_scales(s, n);
    for (ptrdiff_t c = 0; c < step; c += VL) store(mean + c, sum_positions(0, x + c, step, count, zero()));
    share_groups(s, mean, share);
    for (ptrdiff_t c = 0; c < step; c += VL) store(scale + c, sum_positions(1, x + c, step, count, load(mean + c)));
    share_groups(s, scale, share);
    for (ptrdiff_t c = 0; c < s->is.out; c++) scale[c] = 1.0f / sqrtf(scale[c] + (float)s->is.eps);
    for (ptrdiff_t c = 0; c < step; c += VL) {
        const vf centre = load(mean + c), factor = load(scale + c) * load(s->forward_weight + c);
        const vf beta = load(s->padded_bias + c);
        for (ptrdiff_t y = 0; y < s->conv_h; y++) {
            const float *from = x + y * s->conv_w * step + c;
            float *row = to + y * to_row + c;
            for (ptrdiff_t i = 0; i < s->conv_w * step; i += step) {
                vf v = madd(load(from + i) - centre, factor, beta);
                store(row + i, relu ? where_positive(v, v) : v);
            }
        }
    }
}

/* With h the normalised image and d the gradient of the output: adds the sums of d h and d to dw, and stores or adds
 * dx = scale (gamma d - mean(gamma d) - h mean(gamma d h)), the means over groups. */
static void group_norm_backward(const stage_t *s, ptrdiff_t n, const float *d, ptrdiff_t d_row, float *dx, int adds) {
    const ptrdiff_t step = s->out_step, line = s->conv_w * step;
    const float share = (float)(s->conv_h * s->conv_w * (s->is.out / s->is.groups)), *x = s->in + n * image(s);
    const float *mean = group_means(s, n), *scale = group_scales(s, n), *gamma = s->forward_weight;
    float *along = s->saved_sums, *sums = along + step;
    for (ptrdiff_t c = 0; c < step; c += VL) {
        const vf centre = load(mean + c), factor = load(scale + c);
        vf sum = zero(), product = zero();
        for (ptrdiff_t y = 0; y < s->conv_h; y++) {
            vf some = zero(), part = zero();
            for (ptrdiff_t i = c; i < line; i += step) {
                vf v = load(d + y * d_row + i);
                some = some + v;
                part = madd(v, load(x + y * line + i) - centre, part);
            }
            sum = sum + some;
            product = product + part;
        }
        product = product * factor;
        store(s->dw + c, load(s->dw + c) + product);
        store(s->dw + step + c, load(s->dw + step + c) + sum);
        store(along + c, product * load(gamma + c));
        store(sums + c, sum * load(gamma + c));
    }
    share_groups(s, along, share);
    share_groups(s, sums, share);
    for (ptrdiff_t c = 0; c < step; c += VL) {
        const vf centre = load(mean + c), factor = load(scale + c), own = factor * load(gamma + c);
        const vf less = zero() - factor * load(sums + c), slope = zero() - factor * factor * load(along + c);
        for (ptrdiff_t y = 0; y < s->conv_h; y++)
            for (ptrdiff_t i = c; i < line; i += step) {
                vf v = madd(slope, load(x + y * line + i) - centre, madd(own, load(d + y * d_row + i), less));
                if (adds) v = v + load(dx + y * line + i);
                store(dx + y * line + i, v);
            }
    }
}

/* Gamma and beta, which change every step, as whole vectors, and no sums yet. */
static void group_norm_prepare(const stage_t *s, const float *y) {
    for (ptrdiff_t c = 0; c < s->is.out; c++) {
        s->forward_weight[c] = s->weight >= 0 ? y[s->weight + c] : 1.0f;
        s->padded_bias[c] = s->bias >= 0 ? y[s->bias + c] : 0.0f;
    }
    memset(s->dw, 0, sizeof(float) * 2 * s->out_step);
}

#endif
