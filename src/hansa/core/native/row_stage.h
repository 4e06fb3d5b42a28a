/* Stages on rows of a batch: linear, activation, layer normalisation, addition, embedding. */
#ifndef HANSA_ROW_STAGE_H
#define HANSA_ROW_STAGE_H

#include <math.h>

#include "elementwise.h"
#include "embedding.h"
#include "workspace.h"

/* Layer normalisation: y = gamma (x - mean) / sqrt(var + eps) + beta --------------------------------------------- */

static void norm_forward(const stage_t *s, const float *y, ptrdiff_t size) {
    const ptrdiff_t count = s->features;
    const float *gamma = s->weight >= 0 ? y + s->weight : NULL, *beta = s->bias >= 0 ? y + s->bias : NULL;
    for (ptrdiff_t b = 0; b < size; b++) {
        const float *x = s->in + b * s->in_step;
        float *hat = s->saved + b * s->in_step, *out = s->out + b * s->out_row;
        vf sum = zero(), squares = zero();
        for (ptrdiff_t i = 0; i < count; i += VL) sum = sum + load_part(x + i, count - i);
        const vf mean = splat(sum_lanes(sum) / (float)count);
        for (ptrdiff_t i = 0; i < count; i += VL) {
            vf centred = load_part(x + i, count - i) - mean;
            store_part(hat + i, centred, count - i); /* what lies behind the row stays 0 */
            centred = load(hat + i);
            squares = madd(centred, centred, squares);
        }
        const float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)count + (float)s->is.eps);
        s->scales[b] = scale;
        for (ptrdiff_t i = 0; i < count; i += VL) {
            vf v = load(hat + i) * splat(scale);
            store(hat + i, v);
            if (gamma) v = v * load_part(gamma + i, count - i);
            if (beta) v = v + load_part(beta + i, count - i);
            store_part(out + i, v, count - i);
        }
    }
}

/* With h the normalised row and d = gamma g: dx = scale (d - mean(d) - h mean(d h)). */
static void norm_inputs(const stage_t *s, const float *y, ptrdiff_t size, float *to, ptrdiff_t to_step) {
    const ptrdiff_t count = s->features;
    const float *gamma = s->weight >= 0 ? y + s->weight : NULL;
    for (ptrdiff_t b = 0; b < size; b++) {
        const float *g = s->out_gradient + b * s->flat_step, *hat = s->saved + b * s->in_step;
        float *dx = to + b * to_step;
        vf sum = zero(), along = zero();
        for (ptrdiff_t i = 0; i < count; i += VL) {
            vf d = load_part(g + i, count - i);
            if (gamma) d = d * load_part(gamma + i, count - i);
            store_part(dx + i, d, count - i);
            sum = sum + d;
            along = madd(d, load(hat + i), along);
        }
        const vf mean = splat(sum_lanes(sum) / (float)count), share = splat(sum_lanes(along) / (float)count);
        for (ptrdiff_t i = 0; i < count; i += VL) {
            vf d = load_part(dx + i, count - i) - mean;
            store_part(dx + i, splat(s->scales[b]) * (d - share * load(hat + i)), count - i);
        }
    }
}

/* A parameter's gradient, stored at `gradient` or, if that is null, applied at once. */
INLINE void finish_part(float *gradient, const step_t *step, ptrdiff_t at, ptrdiff_t lanes, vf sum) {
    if (gradient) store_part(gradient + at, sum, lanes);
    else store_part(target(step) + at, stepped(step, at, lanes, sum), lanes);
}

/* The sums over rows of g, and of g h if the stage normalises. */
static void sum_rows(const stage_t *s, ptrdiff_t size, float *gradient, const step_t *step) {
    const int norm = s->is.kind == HANSA_NORM && s->weight >= 0;
    if (s->bias < 0 && !norm) return;
    for (ptrdiff_t o = 0; o < s->is.out; o += VL) {
        ptrdiff_t lanes = at_most(VL, s->is.out - o);
        vf sum = zero(), along = zero();
        for (ptrdiff_t b = 0; b < size; b++) {
            vf g = load(s->out_gradient + b * s->flat_step + o);
            sum = sum + g;
            if (norm) along = madd(g, load(s->saved + b * s->in_step + o), along);
        }
        if (s->bias >= 0) finish_part(gradient, step, s->bias + o, lanes, sum);
        if (norm) finish_part(gradient, step, s->weight + o, lanes, along);
    }
}

/* Forward ---------------------------------------------------------------------------------------------------------- */

static void row_forward(const stage_t *s, const float *addend, const float *y, ptrdiff_t size) {
    const ptrdiff_t count = size * s->flat_step;
    switch (s->is.kind) {
        case HANSA_LINEAR:
            linear_forward(s->in, s->in_step, size, y + s->weight, s->bias >= 0 ? y + s->bias : NULL, s->features,
                           s->is.out, s->out, s->out_row);
            if (s->is.relu) relu_row(s->out, s->out, count, 1);
            return;
        case HANSA_ACTIVATION: activate(s->is.activation, s->is.alpha, s->in, s->out, s->saved, count); return;
        case HANSA_NORM: norm_forward(s, y, size); return;
        case HANSA_EMBED: embed_forward(s, y, size); return;
        default:
            for (ptrdiff_t i = 0; i < count; i += VL) store(s->out + i, load(s->in + i) + load(addend + i));
    }
}

/* Backward --------------------------------------------------------------------------------------------------------- */

/* The weights' gradient of a linear stage, stored at `gradient` or, if that is null, applied at once. */
static void linear_gradient(const stage_t *s, ptrdiff_t size, float *gradient, const step_t *step,
                            const scratch_t *scratch, const ahead_t *ahead) {
    const sparse_t *list = &scratch->list;
    outer_t job = {s->out_gradient, 1, s->out_step, s->in, s->in_step, size, gradient ? gradient + s->weight : NULL,
                   s->features,     step, s->weight};
    if (!s->is.relu) {
        outer(&job, s->is.out, s->features);
        return;
    }
    outer_list_t some = {list->value, list->place, list->start};
    list_outer(s->out_gradient, s->out_step, s->is.out, size, scratch->turned, list->value, list->place, list->start);
    outer_listed(&job, &some, s->is.out, s->features, ahead);
}

/* g or, if `adds`, what is there plus g. */
static void pass_gradient(float *to, const float *g, ptrdiff_t count, int adds) {
    for (ptrdiff_t i = 0; i < count; i += VL) {
        vf v = load(g + i);
        if (adds) v = v + load(to + i);
        store(to + i, v);
    }
}

/* The input's gradient, before the weights change. */
static void row_inputs(const stage_t *s, float *source, float *addend, const float *y, ptrdiff_t size) {
    const ptrdiff_t count = size * s->in_step;
    float *to = s->adds ? s->in_gradient : source;
    if (s->is.kind == HANSA_ADD) {
        if (source) pass_gradient(source, s->out_gradient, count, s->adds);
        if (addend) pass_gradient(addend, s->out_gradient, count, s->addend_adds);
        return;
    }
    if (!source) return;
    if (s->is.kind == HANSA_LINEAR) {
        outer_t job = {s->out_gradient, s->out_step, 1, y + s->weight, s->features, s->is.out, to, s->in_step, NULL, 0};
        outer(&job, size, s->features);
    } else if (s->is.kind == HANSA_NORM) {
        norm_inputs(s, y, size, to, s->in_step);
    } else {
        for (ptrdiff_t i = 0; i < count; i += VL) store(to + i, load(s->out_gradient + i) * load(s->saved + i));
    }
    if (s->adds) pass_gradient(source, to, count, 1);
}

static void row_backward(const stage_t *s, float *source, float *addend, const float *y, ptrdiff_t size,
                         float *gradient, const step_t *step, const scratch_t *scratch, const ahead_t *ahead) {
    if (s->is.kind == HANSA_EMBED) {
        embed_backward(s, size, gradient, step);
        return;
    }
    if (s->is.kind == HANSA_LINEAR && s->is.relu)
        for (ptrdiff_t i = 0; i < size * s->flat_step; i += VL)
            store(s->out_gradient + i, where_positive(load(s->out + i), load(s->out_gradient + i)));
    row_inputs(s, source, addend, y, size);
    if (s->is.kind == HANSA_LINEAR) linear_gradient(s, size, gradient, step, scratch, ahead);
    sum_rows(s, size, gradient, step);
}

#endif
