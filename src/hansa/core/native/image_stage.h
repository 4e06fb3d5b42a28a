/* Stages on images, one image at a time: convolution, group normalisation, addition, each with ReLU or activation, pool
 * and dropout. An image that only one convolution takes is stored in that one's padded input, and its gradient is found
 * there; others are stored without a border, and the gradients of those that take them are added. */
#ifndef HANSA_IMAGE_STAGE_H
#define HANSA_IMAGE_STAGE_H

#include "group_norm.h"

/* Copies or, if `adds`, adds rows of an image. */
static void pass_image(const float *from, ptrdiff_t from_row, float *to, ptrdiff_t to_row, ptrdiff_t height,
                       ptrdiff_t line, int adds) {
    for (ptrdiff_t y = 0; y < height; y++, from += from_row, to += to_row)
        for (ptrdiff_t i = 0; i < line; i += VL) {
            vf v = load(from + i);
            if (adds) v = v + load(to + i);
            store(to + i, v);
        }
}

static void add_images(const stage_t *s, ptrdiff_t n, int relu, float *to, ptrdiff_t to_row) {
    const ptrdiff_t line = s->conv_w * s->out_step;
    const float *x = s->in + n * image(s), *other = s->other->out + n * s->other->out_image;
    for (ptrdiff_t y = 0; y < s->conv_h; y++)
        for (ptrdiff_t i = 0; i < line; i += VL) {
            vf v = load(x + y * line + i) + load(other + y * line + i);
            store(to + y * to_row + i, relu ? where_positive(v, v) : v);
        }
}

static void image_forward(const stage_t *s, ptrdiff_t n, const scratch_t *scratch) {
    if (s->is.kind == HANSA_CONV) {
        ptrdiff_t row = s->padded_w * s->in_step, line = s->is.width * s->in_step;
        if (s->copies)
            pass_image(s->from->out + n * s->from->out_image, line,
                       s->in + n * image(s) + s->is.padding * (row + s->in_step), row, s->is.height, line, 0);
        conv_forward(s, n, scratch);
        return;
    }
    const int pooled = s->is.pool != 0, relu = pooled ? relu_inside(&s->is) : s->is.relu != 0;
    float *whole = s->whole + n * s->whole_image;
    float *to = pooled ? whole : s->out + n * s->out_image + s->out_0;
    ptrdiff_t to_row = pooled ? s->conv_w * s->out_step : s->out_row;
    if (s->is.kind == HANSA_GROUP_NORM) group_norm_forward(s, n, relu, to, to_row);
    else add_images(s, n, relu, to, to_row);
    if (pooled) pool_whole(s, n, whole);
    activate_outputs(s, n);
}

/* Adds image n to the sums of the parameters' gradients and, unless this is the first stage, passes its gradient on. */
static void image_backward(const stage_t *s, ptrdiff_t n, const float *keep, int first, const scratch_t *scratch) {
    const ptrdiff_t line = s->is.width * s->in_step;
    if (s->is.kind == HANSA_CONV) {
        ptrdiff_t row = s->padded_w * s->in_step;
        conv_backward(s, n, s->gradient, s->gradient_row, keep, first, scratch);
        if (s->copies)
            pass_image(s->in_gradient + s->is.padding * (row + s->in_step), row, s->from->gradient, line, s->is.height,
                       line, s->adds);
        return;
    }
    const float *d = s->gradient;
    ptrdiff_t d_row = s->gradient_row;
    if (s->is.relu || s->is.activation || keep || s->is.pool) {
        const float *slopes = s->is.activation && !activated_inside(&s->is) ? s->saved + n * slopes_of(s) : NULL;
        conv_mask(s, d, d_row, s->out + n * s->out_image + s->out_0, keep, slopes, scratch->masked);
        d = scratch->masked;
        d_row = line;
        if (s->is.pool) {
            conv_spread(s, n, scratch->masked, s->is.pool == HANSA_MAX ? s->which + n * positions(s) * s->out_step : NULL,
                        scratch->dense);
            d = scratch->dense;
        }
    }
    if (s->is.kind == HANSA_GROUP_NORM) {
        group_norm_backward(s, n, d, d_row, s->from->gradient, s->adds);
        return;
    }
    pass_image(d, d_row, s->from->gradient, line, s->is.height, line, s->adds);
    pass_image(d, d_row, s->other->gradient, line, s->is.height, line, s->addend_adds);
}

static void image_prepare(const stage_t *s, const float *y, int backward, int first, const scratch_t *scratch) {
    if (s->is.kind == HANSA_CONV) conv_prepare(s, y, backward, first, scratch);
    else memset(s->db, 0, sizeof(float) * s->out_step);
    if (s->is.kind == HANSA_GROUP_NORM) group_norm_prepare(s, y);
}

/* The sums over the batch, in the order of the flat parameters, and the step if there is one. */
static void image_gradient(const stage_t *s, float *sums, const step_t *step, const scratch_t *scratch) {
    ptrdiff_t weights = s->is.kind == HANSA_CONV ? taps(s) * s->is.out : s->is.out;
    if (s->is.kind == HANSA_CONV) conv_gradient(s, sums, scratch);
    else {
        if (s->weight >= 0) memcpy(sums + s->weight, s->dw, sizeof(float) * s->is.out);
        if (s->bias >= 0) memcpy(sums + s->bias, s->dw + s->out_step, sizeof(float) * s->is.out);
    }
    if (!step) return;
    if (s->weight >= 0) step_span(step, s->weight, sums + s->weight, weights, 1.0f);
    if (s->bias >= 0) step_span(step, s->bias, sums + s->bias, s->is.out, 1.0f);
}

#endif
