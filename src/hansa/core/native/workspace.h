/* A network's workspace: the shapes of its stages and every buffer they need for up to `batch` examples. */
#ifndef HANSA_WORKSPACE_H
#define HANSA_WORKSPACE_H

#include <stdlib.h>

#include "platform.h"
#include "stage.h"

struct hansa_network {
    const hansa_kernels *kernels; /* of the instruction set that made it */
    ptrdiff_t stages, batch, classes, parameters, logits_row;
    ptrdiff_t keeps;   /* dropout factors per row, of all stages */
    const float *keep; /* those of the current batch, or null */
    ahead_t ahead;     /* the next batch, if known */
    int failed;
    stage_t *stage;
    float *logits, *gradient;
    scratch_t scratch;
    int64_t *drawn, room; /* a client's batches, as many as the largest client needed */
    void **blocks;        /* every buffer, to be freed */
    ptrdiff_t block_count;
};

/* Zeroed, aligned, and with a vector of slack. */
static void *take(hansa_network *network, ptrdiff_t count) {
    size_t bytes = (size_t)round_up(4 * count, 64) + 128;
    void **blocks = realloc(network->blocks, sizeof(void *) * (size_t)(network->block_count + 1));
    if (blocks) network->blocks = blocks;
    void *block = blocks ? take_aligned(bytes) : NULL;
    if (!block) {
        network->failed = 1;
        return NULL;
    }
    network->blocks[network->block_count++] = block;
    return memset(block, 0, bytes);
}

static void network_free(hansa_network *network) {
    if (!network) return;
    for (ptrdiff_t i = 0; i < network->block_count; i++) free_aligned(network->blocks[i]);
    free(network->blocks);
    free(network->drawn);
    free(network->stage);
    free(network);
}

/* Shapes first, then buffers. */
static void shape_stage(stage_t *s, const hansa_stage *is, int first, ptrdiff_t *parameters) {
    ptrdiff_t K = is->kernel, pad = is->padding;
    s->is = *is;
    s->features = is->channels * is->height * is->width;
    s->weight = is->weight;
    s->bias = is->bias;
    ptrdiff_t each = is->kind == HANSA_CONV ? K * K * is->channels : is->kind == HANSA_LINEAR ? s->features : 1;
    if (is->kind == HANSA_EMBED) each = is->words;
    *parameters += (is->weight >= 0 ? is->out * each : 0) + (is->bias >= 0 ? is->out : 0);
    s->out_step = round_up(is->out, VL);
    s->keeps = is->drop ? is->out : 0;
    if (!on_images(s)) {
        s->in_step = round_up(s->features, VL);
        s->flat_step = s->out_step;
        return;
    }
    s->in_step = first && is->channels < VL ? is->channels : round_up(is->channels, VL);
    s->padded_h = is->height + 2 * pad;
    s->padded_w = is->width + 2 * pad;
    s->conv_h = (s->padded_h - K) / is->stride + 1;
    s->conv_w = (s->padded_w - K) / is->stride + 1;
    s->out_h = is->pool ? (s->conv_h - is->pool_h) / is->step_h + 1 : s->conv_h;
    s->out_w = is->pool ? (s->conv_w - is->pool_w) / is->step_w + 1 : s->conv_w;
    if (is->drop && is->drop != HANSA_DROP_CHANNELS) s->keeps *= positions(s);
    s->border = is->stride > 1 ? (K - 1) / is->stride : K - 1 - pad;
    s->dense_h = s->conv_h + 2 * s->border;
    s->dense_w = s->conv_w + 2 * s->border;
    if (is->stride > 1) { /* up to the last place that is read */
        s->dense_h = s->border + at_least(s->conv_h, (pad + is->height - 1) / is->stride + 1);
        s->dense_w = s->border + at_least(s->conv_w, (pad + is->width - 1) / is->stride + 1);
    }
    ptrdiff_t row = s->padded_w * s->in_step;
    s->forward.window = s->in_step == is->channels ? (window_t){K, row, 1, 0, K * is->channels}
                                                   : (window_t){K, row, K, s->in_step, is->channels};
    s->forward.position = is->stride * s->in_step;
    s->forward.out_step = s->out_step;
    row = s->dense_w * s->out_step;
    for (ptrdiff_t phase = 0; phase < is->stride * is->stride; phase++) {
        filters_t *back = s->backward + phase;
        ptrdiff_t H = taps_of(K, is->stride, phase / is->stride), W = taps_of(K, is->stride, phase % is->stride);
        back->window = s->out_step == is->out ? (window_t){H, row, 1, 0, W * is->out}
                                              : (window_t){H, row, W, s->out_step, is->out};
        back->out_step = s->in_step;
        back->position = s->out_step;
    }
    int fast = is->kind == HANSA_CONV && is->stride == 1 && quartered(is);
    if (fast && s->in_step % VL == 0 && (K == 3 || K == 5)) s->plan = SPARSE;
    else if (fast && first && s->in_step == is->channels && few_supported(K, is->channels)) s->plan = FEW;
    else s->plan = DENSE;
    s->minimal = s->plan == SPARSE && is->channels >= 8;
}

static void winograd_buffers(hansa_network *network, stage_t *s) {
    ptrdiff_t points = s->is.kernel + 1, band = at_most(at_least(1, WINOGRAD_TILES / s->out_w), s->out_h);
    ptrdiff_t windows = band * s->out_w;
    s->points = take(network, points * points * s->is.channels * s->out_step);
    s->winograd = (winograd_t){
        .band = band,
        .in_step = s->in_step,
        .padded_h = s->padded_h,
        .out_h = s->out_h,
        .out_w = s->out_w,
        .filters = {{1, s->forward.window.row, 1, 0, s->is.channels}, s->in_step, s->out_step, s->points,
                    take(network, s->out_step)},
        .columns = take(network, points * s->padded_w * s->in_step),
        .inputs = take(network, points * points * windows * s->in_step),
        .products = take(network, points * windows * s->out_step),
        .halves = take(network, 2 * points * windows * s->out_step),
        .doubt = take(network, s->out_step),
        .again = take(network, 4 * s->out_step),
    };
}

static void conv_buffers(hansa_network *network, stage_t *s) {
    const hansa_stage *is = &s->is;
    ptrdiff_t cells = is->kernel * is->kernel, wide_in = round_up(is->channels, VL);
    s->in = take(network, network->batch * image(s));
    s->in_gradient = take(network, image(s));
    s->forward_weight = take(network, taps(s) * s->out_step);
    s->backward_weight = take(network, cells * wide_in * is->out);
    s->padded_bias = take(network, s->out_step);
    s->forward.weight = s->forward_weight;
    s->forward.bias = s->padded_bias;
    const float *none = take(network, s->in_step);
    for (ptrdiff_t phase = 0, at = 0; s->backward_weight && phase < is->stride * is->stride; phase++) {
        s->backward[phase].weight = s->backward_weight + at;
        s->backward[phase].bias = none;
        s->backward_at[phase] = at;
        at += taps_of(is->kernel, is->stride, phase / is->stride) * taps_of(is->kernel, is->stride, phase % is->stride) *
              is->out * wide_in;
    }
    if (s->minimal) winograd_buffers(network, s);
    s->dw = take(network, gradient_sums(s));
}

static void group_norm_buffers(hansa_network *network, stage_t *s) {
    s->forward_weight = take(network, s->out_step);
    s->padded_bias = take(network, s->out_step);
    s->scales = take(network, 2 * network->batch * s->out_step);
    s->saved_sums = take(network, 2 * s->out_step);
    s->dw = take(network, 2 * s->out_step);
}

/* Of what follows on images: activation and pool. */
static void pool_buffers(hansa_network *network, stage_t *s) {
    const hansa_stage *is = &s->is;
    s->db = take(network, s->out_step);
    if (is->pool && (is->kind != HANSA_CONV || !quartered(is))) {
        s->whole_image = relu_inside(is) ? s->conv_h * s->conv_w * s->out_step : 0;
        s->whole = take(network, (relu_inside(is) ? network->batch : 1) * s->conv_h * s->conv_w * s->out_step);
    }
    if (is->activation) s->saved = take(network, network->batch * slopes_of(s));
    if (is->pool != HANSA_MAX) return;
    s->which = take(network, network->batch * positions(s) * s->out_step);
    s->base = take(network, round_up(positions(s), VL));
    if (!s->base) return;
    for (ptrdiff_t p = 0; p < positions(s); p++)
        s->base[p] = (int32_t)((2 * (p / s->out_w) * s->padded_w + 2 * (p % s->out_w)) * s->in_step);
}

/* The convolution that alone takes the output of a stage on images, or null. */
static stage_t *only_convolution(const hansa_network *network, ptrdiff_t number) {
    stage_t *only = NULL;
    for (stage_t *s = network->stage + number + 1; on_images(s); s++) {
        int uses = (s->is.source == number) + (s->is.kind == HANSA_IMAGE_ADD && s->is.addend == number);
        if (uses && (only || s->is.kind != HANSA_CONV)) return NULL;
        if (uses) only = s;
    }
    return only;
}

/* Where a stage on images stores its output: in a convolution's input, or in images without a border, the last of which
 * are then flattened. Its gradient is found in that of the input, or in a buffer for one image. */
static void image_output(hansa_network *network, ptrdiff_t number) {
    stage_t *s = network->stage + number, *next = only_convolution(network, number);
    s->from = number ? network->stage + s->is.source : NULL;
    s->other = s->is.kind == HANSA_IMAGE_ADD ? network->stage + s->is.addend : NULL;
    if (s->is.kind != HANSA_CONV) s->in = s->from->out;
    s->copies = s->is.kind == HANSA_CONV && number && s->from->out != s->in;
    if (next) {
        s->out = next->in;
        s->out_image = image(next);
        s->out_row = next->padded_w * next->in_step;
        s->out_0 = next->is.padding * (s->out_row + next->in_step);
        s->gradient_row = s->out_row;
        s->gradient = next->in_gradient ? next->in_gradient + s->out_0 : NULL;
        return;
    }
    s->gradient_row = s->out_row = s->out_w * s->out_step;
    s->out_image = s->out_h * s->out_row;
    s->out = take(network, network->batch * s->out_image);
    if (on_images(s + 1)) {
        s->gradient = take(network, s->out_image);
        return;
    }
    s->flat_step = round_up(s->is.out * positions(s), VL);
    s->flat = take(network, network->batch * s->flat_step);
    s->out_gradient = take(network, network->batch * s->flat_step);
}

static void row_buffers(hansa_network *network, stage_t *s) {
    s->flat = s->out = take(network, network->batch * s->flat_step);
    s->out_gradient = take(network, network->batch * s->flat_step);
    s->out_row = s->flat_step;
    if (s->is.kind == HANSA_ACTIVATION || s->is.kind == HANSA_NORM) s->saved = take(network, network->batch * s->in_step);
    if (s->is.kind == HANSA_NORM) s->scales = take(network, network->batch);
    if (s->is.kind != HANSA_EMBED) return;
    ptrdiff_t most = at_most(network->batch * s->features, s->is.words);
    s->which = take(network, network->batch * s->features);
    s->words = take(network, most);
    s->slot_of = take(network, s->is.words);
    s->saved = take(network, most * s->out_step);
    s->scales = take(network, s->out_step); /* zeros */
}

/* Connects stages on rows to their sources, and says which of all add to their inputs' gradients. Of the stages that take one value, the last, which is the first in the
 * backward pass, stores its gradient and the others add to it. */
static void share_gradients(hansa_network *network) {
    stage_t *stage = network->stage;
    ptrdiff_t i = network->stages - 1;
    if (!on_images(stage)) stage->in = take(network, network->batch * stage->in_step);
    for (; i >= 0 && !on_images(stage + i); i--) {
        stage_t *s = stage + i, *from = s->is.source < 0 ? NULL : stage + s->is.source;
        s->in = from ? from->flat : stage->in;
        s->adds = from && from->taken;
        if (s->adds) s->in_gradient = take(network, network->batch * s->in_step);
        if (from) from->taken = 1;
        if (s->is.kind != HANSA_ADD || s->is.addend < 0) continue;
        s->addend_adds = stage[s->is.addend].taken;
        stage[s->is.addend].taken = 1;
    }
    for (; i > 0; i--) {
        stage_t *s = stage + i;
        s->adds = s->from->taken;
        s->from->taken = 1;
        if (!s->other) continue;
        s->addend_adds = s->other->taken;
        s->other->taken = 1;
    }
}

static void shared_buffers(hansa_network *network) {
    ptrdiff_t rows = 0, masked = 0, turned = 0, dense = 0, weights = 0, starts = 0, listed = 0;
#define GROW(size, need) size = (size) > (need) ? (size) : (need)
    for (ptrdiff_t i = 0; i < network->stages; i++) {
        const stage_t *s = network->stage + i;
        GROW(starts, s->is.out + 1);
        GROW(listed, s->is.kind == HANSA_LINEAR && s->is.relu ? network->batch * s->is.out + VL : 0);
        GROW(turned, s->is.kind == HANSA_LINEAR && s->is.relu ? round_up(network->batch, VL) * VL : 0);
        if (!on_images(s)) continue;
        GROW(rows, 4 * (s->out_w + 1) * s->out_step);
        GROW(rows, s->is.width * s->in_step);
        GROW(masked, positions(s) * s->out_step);
        GROW(turned, round_up(positions(s), VL) * s->out_step);
        GROW(dense, s->plan == DENSE ? s->dense_h * s->dense_w * s->out_step : 0);
        GROW(weights, s->is.kind == HANSA_CONV ? taps(s) * s->is.out : 0);
        GROW(starts, 4 * positions(s) + s->is.out + 1);
        GROW(listed, masked + VL);
    }
#undef GROW
    scratch_t *scratch = &network->scratch;
    scratch->rows = take(network, rows);
    scratch->masked = take(network, masked);
    scratch->turned = take(network, turned);
    scratch->turned_which = take(network, turned);
    scratch->dense = take(network, dense);
    scratch->weights = take(network, weights);
    scratch->ordered = take(network, weights);
    scratch->list.value = take(network, listed);
    scratch->list.place = take(network, listed);
    scratch->list.start = take(network, starts);
}

static hansa_network *network_new(const hansa_stage *spec, int64_t stages, int64_t batch) {
    hansa_network *network = calloc(1, sizeof *network);
    if (!network) return NULL;
    network->kernels = &HANSA_KERNELS;
    network->stages = stages;
    network->batch = batch;
    network->stage = calloc((size_t)stages, sizeof(stage_t));
    if (!network->stage) {
        network_free(network);
        return NULL;
    }
    for (ptrdiff_t i = 0; i < stages; i++) {
        stage_t *s = network->stage + i;
        shape_stage(s, spec + i, i == 0, &network->parameters);
        s->keep_at = network->keeps;
        network->keeps += s->keeps;
        if (s->is.kind == HANSA_CONV) conv_buffers(network, s);
        if (s->is.kind == HANSA_GROUP_NORM) group_norm_buffers(network, s);
        if (on_images(s)) pool_buffers(network, s);
        else row_buffers(network, s);
    }
    ptrdiff_t images = 0;
    for (; on_images(network->stage + images); images++) image_output(network, images);
    share_gradients(network);
    const stage_t *top = network->stage + stages - 1;
    network->classes = top->is.out;
    network->logits_row = top->flat_step;
    network->logits = top->flat;
    network->gradient = take(network, network->parameters);
    shared_buffers(network);
    if (images) network->stage[images - 1].gradient = network->scratch.turned;
    if (network->failed) {
        network_free(network);
        return NULL;
    }
    return network;
}

#endif
