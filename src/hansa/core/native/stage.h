/* A stage of a network: its shapes, its buffers, and forward and backward of a convolution stage for one image. */
#ifndef HANSA_STAGE_H
#define HANSA_STAGE_H

#include "elementwise.h"
#include "few_channels.h"
#include "linear.h"
#include "native.h"
#include "pool.h"
#include "winograd.h"

/* The algorithm of a convolution stage's weight gradient. */
enum { SPARSE, FEW, DENSE };
enum { MOST_STRIDE = 4 };

typedef struct stage {
    hansa_stage is;
    int plan;
    ptrdiff_t weight, bias;       /* offsets into the flat parameters; bias is -1 for none */
    ptrdiff_t features;           /* inputs */
    ptrdiff_t in_step, out_step;  /* convolution: channels as stored; on rows: length of a stored row */
    ptrdiff_t padded_h, padded_w; /* convolution: the input with its border */
    ptrdiff_t conv_h, conv_w;     /* before the pool */
    ptrdiff_t out_h, out_w;       /* after it */
    ptrdiff_t border;             /* of the dense output gradient, so that its convolution is the input gradient */
    ptrdiff_t dense_h, dense_w;   /* that gradient with its border */
    ptrdiff_t keeps, keep_at;     /* dropout factors per row, and those of the stages before */
    filters_t forward;
    int minimal;                  /* whether the forward pass uses Winograd */
    winograd_t winograd;
    filters_t backward[MOST_STRIDE * MOST_STRIDE];    /* by phase of the input's place; one for stride one */
    ptrdiff_t backward_at[MOST_STRIDE * MOST_STRIDE]; /* offset of its weights */
    struct stage *from, *other;          /* on images: source and addend */
    int copies;                          /* a convolution: whether it copies its source's image to `in` */
    float *gradient;                     /* on images: that of the current output, [out_h][out_w][out_step] */
    ptrdiff_t gradient_row;
    float *in;                           /* [batch][padded_h][padded_w][in_step], or [batch][in_step] of its source */
    float *out;                          /* the next convolution's `in`, the values to be flattened, or `flat` */
    ptrdiff_t out_image, out_row, out_0; /* strides of `out` between images and rows, and the offset of its interior */
    float *flat, *out_gradient;          /* output and its gradient as rows [batch][flat_step], but of inner convolutions */
    ptrdiff_t flat_step;
    float *in_gradient;                  /* one padded image of a convolution stage, else what is to be added */
    int taken, adds, addend_adds;        /* whether stages take its output, and whether it adds to its inputs' gradients */
    float *saved, *scales;               /* derivatives; normalised values, and factors per row; an embedding's slots */
    float *saved_sums;                   /* group normalisation: two sums per channel */
    float *whole;                        /* [conv_h][conv_w][out_step] before a pool that is not the fast one */
    ptrdiff_t whole_image;               /* its stride between images, 0 if only the current one is kept */
    int32_t *which;                      /* [batch][out_h][out_w][out_step], the pool's choice; [batch][features] tokens */
    int32_t *words, *slot_of;            /* embedding: the word of each slot, and the slot of each word */
    int32_t *base;                       /* [positions], the window's place in the padded image */
    float *forward_weight, *backward_weight, *padded_bias;
    float *points;                       /* [(K + 1)^2][channels][out_step], the weights in Winograd's form */
    float *dw, *db;
} stage_t;

/* Buffers shared by the stages, each of the largest size needed. */
typedef struct {
    float *rows, *masked, *turned, *dense, *weights, *ordered;
    int32_t *turned_which;
    sparse_t list;
} scratch_t;

INLINE int on_images(const stage_t *s) {
    return s->is.kind == HANSA_CONV || s->is.kind == HANSA_GROUP_NORM || s->is.kind == HANSA_IMAGE_ADD;
}
INLINE ptrdiff_t positions(const stage_t *s) { return s->out_h * s->out_w; }
INLINE ptrdiff_t taps(const stage_t *s) { return s->is.kernel * s->is.kernel * s->is.channels; }
INLINE ptrdiff_t image(const stage_t *s) { return s->padded_h * s->padded_w * s->in_step; }
INLINE ptrdiff_t gradient_sums(const stage_t *s) { /* the length of dw */
    if (s->plan == FEW) return s->is.out * s->is.kernel * FEW_ROW;
    return s->plan == SPARSE ? s->is.out * s->is.kernel * s->is.kernel * s->in_step : taps(s) * s->out_step;
}
INLINE pool_t pool_of(const hansa_stage *is) { return (pool_t){is->pool_h, is->pool_w, is->step_h, is->step_w}; }

/* Whether an activation other than ReLU comes between the convolution and a pool. */
INLINE int activated_inside(const hansa_stage *is) { return is->activation && is->pool && !is->after_pool; }

/* Whether the pool is the 2x2 maximum, which has a special form. */
INLINE int quartered(const hansa_stage *is) {
    return !activated_inside(is) && is->pool == HANSA_MAX && is->pool_h == 2 && is->pool_w == 2 && is->step_h == 2 && is->step_w == 2;
}

/* Whether ReLU comes between the convolution and a mean pool, whose output does not determine ReLU's mask. */
INLINE int relu_inside(const hansa_stage *is) { return is->pool == HANSA_MEAN && is->relu == 1; }

/* The length of the derivatives of an activation for one image. */
INLINE ptrdiff_t slopes_of(const stage_t *s) {
    return (activated_inside(&s->is) ? s->conv_h * s->conv_w : positions(s)) * s->out_step;
}

/* `count` matrices [rows][columns], each transposed. */
static void reorder(const float *from, ptrdiff_t count, ptrdiff_t rows, ptrdiff_t columns, float *to) {
    for (ptrdiff_t i = 0; i < count; i++, from += rows * columns, to += rows * columns)
        transpose(from, columns, to, rows, rows, columns);
}

/* Reorder the weights, which change every step, for the kernels, and clear the gradient sums. */
static void conv_prepare(const stage_t *s, const float *y, int backward, int first, const scratch_t *scratch) {
    const hansa_stage *is = &s->is;
    const float *weight = y + s->weight;
    if (is->planar) {
        reorder(weight, is->out, is->channels, is->kernel * is->kernel, scratch->ordered);
        weight = scratch->ordered;
    }
    pack_forward(weight, is->out, taps(s), s->forward_weight);
    if (s->minimal && is->kernel == 3)
        winograd_weights(3, s->forward_weight, is->channels, s->out_step, s->points, s->winograd.doubt);
    if (s->minimal && is->kernel == 5)
        winograd_weights(5, s->forward_weight, is->channels, s->out_step, s->points, s->winograd.doubt);
    if (s->bias >= 0) memcpy(s->padded_bias, y + s->bias, sizeof(float) * is->out);
    if (!backward) return;
    memset(s->dw, 0, sizeof(float) * gradient_sums(s));
    memset(s->db, 0, sizeof(float) * s->out_step);
    if (first) return;
    if (s->plan == SPARSE) {
        pack_sparse(weight, is->out, is->kernel, is->channels, s->backward_weight);
        return;
    }
    for (ptrdiff_t phase = 0; phase < is->stride * is->stride; phase++)
        pack_dense(weight, is->out, is->kernel, is->channels, is->stride, phase / is->stride, phase % is->stride,
                   scratch->weights, s->backward_weight + s->backward_at[phase]);
}

/* Dropout of one image, with a factor per value or per channel. */
INLINE vf kept(const stage_t *s, const float *keep, ptrdiff_t position, ptrdiff_t c) {
    return load_part(keep + (s->is.drop == HANSA_DROP_CHANNELS ? 0 : position * s->is.out) + c, s->is.out - c);
}

static void conv_drop(const stage_t *s, const float *keep, float *out) {
    for (ptrdiff_t y = 0; y < s->out_h; y++)
        for (ptrdiff_t x = 0; x < s->out_w; x++)
            for (ptrdiff_t c = 0; c < s->out_step; c += VL) {
                float *at = out + y * s->out_row + x * s->out_step + c;
                store(at, load(at) * kept(s, keep, y * s->out_w + x, c));
            }
}

/* The activation before a pool, and the pool, of a whole image. */
static void pool_whole(const stage_t *s, ptrdiff_t n, float *whole) {
    float *out = s->out + n * s->out_image + s->out_0;
    ptrdiff_t before = s->conv_w * s->out_step;
    if (activated_inside(&s->is))
        activate(s->is.activation, s->is.alpha, whole, whole, s->saved + n * slopes_of(s), s->conv_h * before);
    if (s->is.pool == HANSA_MEAN)
        pool_mean(pool_of(&s->is), whole, before, s->out_step, s->out_h, s->out_w, s->is.relu == 2, out, s->out_row);
    else
        pool_max(pool_of(&s->is), whole, before, s->out_step, s->out_h, s->out_w, s->is.relu != 0, out, s->out_row,
                 s->which + n * positions(s) * s->out_step);
}

static void conv_outputs(const stage_t *s, ptrdiff_t n, const scratch_t *scratch) {
    const float *x = s->in + n * image(s);
    float *out = s->out + n * s->out_image + s->out_0;
    ptrdiff_t row = s->is.stride * s->padded_w * s->in_step, line = s->out_w * s->out_step;
    if (s->is.pool && !quartered(&s->is)) {
        ptrdiff_t before = s->conv_w * s->out_step;
        float *whole = s->whole + n * s->whole_image;
        for (ptrdiff_t y = 0; y < s->conv_h; y++) {
            conv_row(&s->forward, x + y * row, whole + y * before, s->conv_w);
            if (relu_inside(&s->is)) relu_row(whole + y * before, whole + y * before, before, 1);
        }
        pool_whole(s, n, whole);
        return;
    }
    if (s->minimal) {
        int32_t *which = s->which + n * s->out_h * line;
        int relu = s->is.relu != 0;
        if (s->is.kernel == 3) winograd_image(3, &s->winograd, &s->forward, x, relu, out, s->out_row, which);
        else winograd_image(5, &s->winograd, &s->forward, x, relu, out, s->out_row, which);
        return;
    }
    for (ptrdiff_t y = 0; y < s->out_h; y++) {
        if (s->plan == FEW) {
            few_forward(&s->forward, s->is.channels, x + 2 * y * row, s->is.relu != 0, out + y * s->out_row,
                        s->which + (n * s->out_h + y) * line, s->out_w);
        } else if (s->is.pool) {
            float *upper = scratch->rows, *lower = upper + 2 * line;
            conv_row(&s->forward, x + 2 * y * row, upper, 2 * s->out_w);
            conv_row(&s->forward, x + (2 * y + 1) * row, lower, 2 * s->out_w);
            pool_rows(upper, lower, s->out_step, s->out_w, s->is.relu != 0, out + y * s->out_row,
                      s->which + (n * s->out_h + y) * line);
        } else {
            conv_row(&s->forward, x + y * row, scratch->rows, s->out_w);
            relu_row(scratch->rows, out + y * s->out_row, line, s->is.relu != 0);
        }
    }
}

/* The activation after a pool, or without one. */
static void activate_outputs(const stage_t *s, ptrdiff_t n) {
    const ptrdiff_t line = s->out_w * s->out_step;
    if (!s->is.activation || activated_inside(&s->is)) return;
    for (ptrdiff_t y = 0; y < s->out_h; y++) {
        float *row = s->out + n * s->out_image + s->out_0 + y * s->out_row;
        activate(s->is.activation, s->is.alpha, row, row, s->saved + n * slopes_of(s) + y * line, line);
    }
}

static void conv_forward(const stage_t *s, ptrdiff_t n, const scratch_t *scratch) {
    conv_outputs(s, n, scratch);
    activate_outputs(s, n);
}

/* The gradient after dropout (if `keep` is not null), the activation's derivative (if `slopes` is not null) and ReLU's
 * mask, [positions][out_step], and its sums for the bias. */
static void conv_mask(const stage_t *s, const float *g, ptrdiff_t g_row, const float *out, const float *keep,
                      const float *slopes, float *masked) {
    for (ptrdiff_t c = 0; c < s->out_step; c += VL) {
        vf sum = load(s->db + c);
        for (ptrdiff_t y = 0; y < s->out_h; y++) {
            for (ptrdiff_t x = 0; x < s->out_w; x++) {
                vf v = load(g + y * g_row + x * s->out_step + c);
                if (keep) v = v * kept(s, keep, y * s->out_w + x, c);
                if (slopes) v = v * load(slopes + (y * s->out_w + x) * s->out_step + c);
                if (s->is.relu) v = where_positive(load(out + y * s->out_row + x * s->out_step + c), v);
                store(masked + (y * s->out_w + x) * s->out_step + c, v);
                sum = sum + v;
            }
        }
        if (!relu_inside(&s->is) && !activated_inside(&s->is)) store(s->db + c, sum);
    }
}

/* ReLU's mask between the convolution and a mean pool, or with `slopes` an activation's derivative before any pool, and
 * the sums for the bias. */
static void conv_mask_inside(const stage_t *s, const float *whole, const float *slopes, float *inside, ptrdiff_t row) {
    for (ptrdiff_t c = 0; c < s->out_step; c += VL) {
        vf sum = load(s->db + c);
        for (ptrdiff_t y = 0; y < s->conv_h; y++)
            for (ptrdiff_t x = 0; x < s->conv_w; x++) {
                float *at = inside + y * row + x * s->out_step + c;
                ptrdiff_t place = (y * s->conv_w + x) * s->out_step + c;
                vf v = load(at);
                if (slopes) v = v * load(slopes + place);
                else v = where_positive(load(whole + place), v);
                store(at, v);
                sum = sum + v;
            }
        store(s->db + c, sum);
    }
}

/* The dense gradient before the pool, with a border; rows and columns that the pool ignored stay zero. */
static void conv_spread(const stage_t *s, ptrdiff_t n, const float *masked, const int32_t *which, float *dense) {
    ptrdiff_t row = s->dense_w * s->out_step;
    float *inside = dense + s->border * (row + s->out_step);
    memset(dense, 0, sizeof(float) * s->dense_h * row);
    if (s->is.pool && !quartered(&s->is)) {
        pool_spread(pool_of(&s->is), masked, which, s->out_step, s->out_h, s->out_w, inside, row);
        if (relu_inside(&s->is)) conv_mask_inside(s, s->whole + n * s->whole_image, NULL, inside, row);
        if (activated_inside(&s->is)) conv_mask_inside(s, NULL, s->saved + n * slopes_of(s), inside, row);
        return;
    }
    for (ptrdiff_t y = 0; y < s->out_h; y++) {
        if (!s->is.pool) {
            memcpy(inside + y * row, masked + y * s->out_w * s->out_step, sizeof(float) * s->out_w * s->out_step);
            continue;
        }
        for (ptrdiff_t x = 0; x < s->out_w; x++) {
            for (ptrdiff_t c = 0; c < s->out_step; c += VL) {
                ptrdiff_t at = (y * s->out_w + x) * s->out_step + c;
                for (int32_t q = 0; q < 4; q++)
                    store(inside + (2 * y + (q >> 1)) * row + (2 * x + (q & 1)) * s->out_step + c,
                          where_equal(load_int(which + at), splat_int(q), load(masked + at)));
            }
        }
    }
}

/* dX with a stride: each phase of places is a separate convolution, whose rows are then interleaved. */
static void strided_inputs(const stage_t *s, const float *dense, float *rows) {
    const hansa_stage *is = &s->is;
    ptrdiff_t stride = is->stride, pad = is->padding, K = is->kernel, row = s->dense_w * s->out_step;
    memset(s->in_gradient, 0, sizeof(float) * image(s));
    for (ptrdiff_t y = pad; y < pad + is->height; y++)
        for (ptrdiff_t right = 0; right < stride; right++) {
            ptrdiff_t H = taps_of(K, stride, y % stride), W = taps_of(K, stride, right);
            ptrdiff_t from = pad > right ? (pad - right + stride - 1) / stride : 0;
            ptrdiff_t count = (pad + is->width - 1 - right + stride) / stride - from;
            if (H < 1 || W < 1 || count < 1) continue;
            conv_row(s->backward + y % stride * stride + right,
                     dense + (s->border + y / stride - H + 1) * row + (s->border + from - W + 1) * s->out_step, rows,
                     count);
            float *to = s->in_gradient + (y * s->padded_w + from * stride + right) * s->in_step;
            for (ptrdiff_t i = 0; i < count; i++)
                memcpy(to + i * stride * s->in_step, rows + i * s->in_step, sizeof(float) * s->in_step);
        }
}

/* Adds image n to dw and db and, unless this is the first stage, writes dX to in_gradient. */
static void conv_backward(const stage_t *s, ptrdiff_t n, const float *g, ptrdiff_t g_row, const float *keep, int first,
                          const scratch_t *scratch) {
    const float *x = s->in + n * image(s);
    const int32_t *which = s->is.pool == HANSA_MAX ? s->which + n * positions(s) * s->out_step : NULL;
    ptrdiff_t row = s->padded_w * s->in_step, K = s->is.kernel;
    const float *slopes = s->is.activation && !activated_inside(&s->is) ? s->saved + n * slopes_of(s) : NULL;
    conv_mask(s, g, g_row, s->out + n * s->out_image + s->out_0, keep, slopes, scratch->masked);
    if (s->plan != DENSE) {
        list_by_filter(scratch->masked, which, positions(s), s->out_step, s->is.out, s->base, s->in_step, row,
                       scratch->turned, scratch->turned_which, scratch->list);
        if (s->plan == FEW) {
            few_filters(K, s->is.channels, x, row, scratch->list, s->is.out, s->dw);
            return; /* always the first stage */
        }
        if (K == 3) sparse_filters_3(x, row, s->in_step, scratch->list, s->is.out, s->dw);
        else sparse_filters_5(x, row, s->in_step, scratch->list, s->is.out, s->dw);
        if (first) return;
        list_by_position(scratch->masked, which, positions(s), s->out_step, s->is.out, scratch->list);
        memset(s->in_gradient, 0, sizeof(float) * image(s));
        sparse_inputs(K, s->backward_weight, scratch->list, s->is.out, s->out_h, s->out_w, s->in_gradient, row,
                      s->in_step);
        return;
    }
    ptrdiff_t dense_row = s->dense_w * s->out_step;
    conv_spread(s, n, scratch->masked, which, scratch->dense);
    dense_filters(x, s->is.stride * row, s->forward.position, s->forward.window,
                  scratch->dense + s->border * (dense_row + s->out_step), dense_row, s->out_step, s->conv_h, s->conv_w,
                  s->dw);
    if (first) return;
    if (s->is.stride > 1) {
        strided_inputs(s, scratch->dense, scratch->rows);
        return;
    }
    for (ptrdiff_t y = 0; y < s->is.height; y++)
        conv_row(s->backward, scratch->dense + y * dense_row,
                 s->in_gradient + ((y + s->is.padding) * s->padded_w + s->is.padding) * s->in_step, s->is.width);
}

/* The sums over the batch, in the order of the flat parameters. */
static void conv_gradient(const stage_t *s, float *gradient, const scratch_t *scratch) {
    const hansa_stage *is = &s->is;
    float *to = is->planar ? scratch->ordered : gradient + s->weight;
    ptrdiff_t row = s->plan == FEW ? is->kernel * is->channels : is->channels;
    ptrdiff_t step = s->plan == FEW ? FEW_ROW : s->in_step;
    if (s->plan == DENSE) transpose(s->dw, s->out_step, to, taps(s), taps(s), is->out);
    else
        for (ptrdiff_t i = 0; i * row < taps(s) * is->out; i++)
            memcpy(to + i * row, s->dw + i * step, sizeof(float) * row);
    if (is->planar) reorder(to, is->out, is->kernel * is->kernel, is->channels, gradient + s->weight);
    if (s->bias >= 0) memcpy(gradient + s->bias, s->db, sizeof(float) * is->out);
}

#endif
