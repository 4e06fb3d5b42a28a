/* A network of stages with mean cross-entropy: batches, loss, and a client's whole local phase in one call. */
#ifndef HANSA_NETWORK_H
#define HANSA_NETWORK_H

#include <math.h>

#include "draw.h"
#include "image_stage.h"
#include "platform.h"
#include "row_stage.h"
#include "server.h"
#include "workspace.h"

/* Batches ---------------------------------------------------------------------------------------------------------- */

/* Copies one stored row to the input of the first stage, in its order: C, H, W for linear, else H, W, C. */
static void copy_row(const hansa_data *data, const stage_t *s, int64_t row, float *to) {
    ptrdiff_t C = s->is.channels, H = s->is.height, W = s->is.width;
    int conv = s->is.kind == HANSA_CONV, planar_to = !conv;
    ptrdiff_t to_c = planar_to ? H * W : 1, to_x = planar_to ? 1 : s->in_step;
    ptrdiff_t to_y = planar_to ? W : s->padded_w * s->in_step;
    ptrdiff_t from_c = data->planar ? H * W : 1, from_x = data->planar ? 1 : C, from_y = data->planar ? W : W * C;
    if (data->table) {
        const uint8_t *from = (const uint8_t *)data->values + row * s->features;
        for (ptrdiff_t c = 0; c < C; c++) {
            const float *table = data->table + 256 * c;
            for (ptrdiff_t y = 0; y < H; y++)
                for (ptrdiff_t x = 0; x < W; x++)
                    to[y * to_y + x * to_x + c * to_c] = table[from[y * from_y + x * from_x + c * from_c]];
        }
        return;
    }
    const float *from = (const float *)data->values + row * s->features;
    if (!conv && (data->planar || C == 1)) {
        memcpy(to, from, sizeof(float) * s->features);
    } else if (conv && s->in_step == C && (!data->planar || C == 1)) {
        for (ptrdiff_t y = 0; y < H; y++) memcpy(to + y * to_y, from + y * W * C, sizeof(float) * W * C);
    } else {
        for (ptrdiff_t c = 0; c < C; c++)
            for (ptrdiff_t y = 0; y < H; y++)
                for (ptrdiff_t x = 0; x < W; x++)
                    to[y * to_y + x * to_x + c * to_c] = from[y * from_y + x * from_x + c * from_c];
    }
}

static void fill_batch(const hansa_network *network, const hansa_data *data, const int64_t *index, ptrdiff_t size) {
    const stage_t *s = network->stage;
    if (s->is.kind == HANSA_EMBED) {
        fill_tokens(s, data, index, size);
        return;
    }
    ptrdiff_t inside = s->is.kind == HANSA_CONV ? s->is.padding * (s->padded_w + 1) * s->in_step : 0;
    ptrdiff_t step = s->is.kind == HANSA_CONV ? image(s) : s->in_step;
    for (ptrdiff_t b = 0; b < size; b++) copy_row(data, s, index[b], s->in + b * step + inside);
}

INLINE ptrdiff_t batch_size(const hansa_batches *batches, int64_t t) {
    return batches->sizes ? batches->sizes[t] : batches->batch;
}

/* Check all inputs before anything is changed. */
static int64_t check(const hansa_network *network, const hansa_data *data, const hansa_batches *batches) {
    const int tokens = network->stage->is.kind == HANSA_EMBED;
    if (batches->batch < 1 || batches->batch > network->batch) return HANSA_BAD_SIZE;
    for (int64_t t = 0; t < batches->steps; t++) {
        ptrdiff_t size = batch_size(batches, t);
        if (size < 1 || size > batches->batch) return HANSA_BAD_SIZE;
        for (ptrdiff_t b = 0; b < size; b++) {
            int64_t row = batches->index[t * batches->batch + b];
            if (row < 0 || row >= data->rows) return HANSA_BAD_ROW;
            if (data->labels && (data->labels[row] < 0 || data->labels[row] >= network->classes)) return HANSA_BAD_LABEL;
            if (tokens && !tokens_exist(network->stage, data, row)) return HANSA_BAD_TOKEN;
        }
    }
    return HANSA_OK;
}

/* Forward, loss, backward ------------------------------------------------------------------------------------------ */

static void prepare(const hansa_network *network, const float *y, int backward) {
    for (ptrdiff_t i = 0; i < network->stages; i++)
        if (on_images(network->stage + i))
            image_prepare(network->stage + i, y, backward, i == 0, &network->scratch);
}

/* The dropout factors of a stage for row n of a batch, or null. */
INLINE const float *keep_of(const hansa_network *network, const stage_t *s, ptrdiff_t size, ptrdiff_t n) {
    return network->keep && s->is.drop ? network->keep + s->keep_at * size + s->keeps * n : NULL;
}

static void drop(float *x, const float *keep, ptrdiff_t count) {
    INDEPENDENT for (ptrdiff_t i = 0; i < count; i++) x[i] *= keep[i];
}

static void forward(const hansa_network *network, const float *y, ptrdiff_t size) {
    ptrdiff_t i = 0;
    for (ptrdiff_t n = 0; n < size; n++) {
        const float *keep = NULL;
        for (i = 0; on_images(network->stage + i); i++) {
            const stage_t *s = network->stage + i;
            image_forward(s, n, &network->scratch);
            keep = keep_of(network, s, size, n);
            if (keep && s->is.drop != HANSA_DROP_FLAT) conv_drop(s, keep, s->out + n * s->out_image + s->out_0);
        }
        if (i == 0) break;
        const stage_t *last = network->stage + i - 1;
        float *flat = last->flat + n * last->flat_step;
        transpose(last->out + n * last->out_image, last->out_step, flat, positions(last), positions(last),
                  last->is.out);
        if (keep && last->is.drop == HANSA_DROP_FLAT) drop(flat, keep, last->keeps);
    }
    for (; i < network->stages; i++) {
        const stage_t *s = network->stage + i;
        const float *addend = s->is.addend < 0 ? network->stage->in : network->stage[s->is.addend].flat;
        row_forward(s, addend, y, size);
        if (!keep_of(network, s, size, 0)) continue;
        for (ptrdiff_t b = 0; b < size; b++) drop(s->out + b * s->out_row, keep_of(network, s, size, b), s->is.out);
    }
}

/* Cross-entropy of one row; `g` (may be null) gets (softmax - onehot) * scale. */
static double cross_entropy(const float *z, ptrdiff_t classes, int64_t label, float scale, float *g) {
    float most = z[0], total = 0;
    for (ptrdiff_t c = 1; c < classes; c++) most = z[c] > most ? z[c] : most;
    for (ptrdiff_t c = 0; c < classes; c++) {
        float e = expf(z[c] - most);
        total += e;
        if (g) g[c] = e;
    }
    if (g) {
        float share = scale / total;
        for (ptrdiff_t c = 0; c < classes; c++) g[c] *= share;
        g[label] -= scale;
    }
    return (double)(logf(total) + most - z[label]);
}

/* The gradient of a stage's output as rows, or null for the network's input. */
INLINE float *gradient_of(const hansa_network *network, int64_t stage) {
    return stage < 0 ? NULL : network->stage[stage].out_gradient;
}

/* The gradient of the mean loss, stored at `gradient` or, if that is null, applied stage by stage. */
static float backward(const hansa_network *network, const float *y, const hansa_data *data, const int64_t *index,
                      ptrdiff_t size, float *gradient, const step_t *step) {
    const scratch_t *scratch = &network->scratch;
    const stage_t *top = network->stage + network->stages - 1;
    double loss = 0;
    for (ptrdiff_t b = 0; b < size; b++) {
        float *g = top->out_gradient + b * top->out_step;
        loss += cross_entropy(network->logits + b * network->logits_row, network->classes, data->labels[index[b]],
                              1.0f / (float)size, g);
    }
    ptrdiff_t i = network->stages - 1;
    for (; i >= 0 && !on_images(network->stage + i); i--) {
        const stage_t *s = network->stage + i;
        for (ptrdiff_t b = 0; keep_of(network, s, size, 0) && b < size; b++)
            drop(s->out_gradient + b * s->out_step, keep_of(network, s, size, b), s->is.out);
        row_backward(s, gradient_of(network, s->is.source), gradient_of(network, s->is.addend), y, size, gradient, step,
                     scratch, i == 0 ? &network->ahead : &(ahead_t){0});
    }
    if (i >= 0) {
        const stage_t *last = network->stage + i;
        for (ptrdiff_t n = 0; n < size; n++) {
            const float *keep = keep_of(network, last, size, n);
            float *flat = last->out_gradient + n * last->flat_step;
            if (keep && last->is.drop == HANSA_DROP_FLAT) drop(flat, keep, last->keeps);
            transpose(flat, positions(last), last->gradient, last->out_step, last->is.out, positions(last));
            for (const stage_t *s = last; s >= network->stage; s--) {
                keep = s->is.drop == HANSA_DROP_FLAT ? NULL : keep_of(network, s, size, n);
                image_backward(s, n, keep, s == network->stage, scratch);
            }
        }
        float *sums = gradient ? gradient : network->gradient;
        for (const stage_t *s = last; s >= network->stage; s--) image_gradient(s, sums, gradient ? NULL : step, scratch);
    }
    return (float)(loss / (double)size);
}

/* Entry points ----------------------------------------------------------------------------------------------------- */

/* One step on one batch, in place; returns the loss before the step. */
static float step_once(const hansa_network *network, const hansa_data *data, const int64_t *index, ptrdiff_t size,
                       const step_t *step, double clip) {
    int clipped = isfinite(clip);
    fill_batch(network, data, index, size);
    prepare(network, step->y, 1);
    forward(network, step->y, size);
    float loss = backward(network, step->y, data, index, size, clipped ? network->gradient : NULL, step);
    if (clipped) { /* g times min(1, clip / |g|), for the gradient as a whole */
        double scale = clip / (sqrt(squares32(network->gradient, network->parameters, NULL)) + 1e-12);
        step_span(step, 0, network->gradient, network->parameters, scale < 1 ? (float)scale : 1.0f);
    }
    return loss;
}

INLINE step_t step_on(float *y, const hansa_update *update) {
    return (step_t){y, update->velocity, update->anchor, update->shift, (float)update->lr,
                    (float)update->prox_weight, (float)update->weight_decay, (float)update->momentum, NULL};
}

/* Steps from `done` on, until all are done or `seconds` have passed. */
static void descend(hansa_network *network, float *y, const hansa_data *data, const hansa_batches *batches,
                    const hansa_update *update, float *losses, int64_t *done, double seconds) {
    step_t step = step_on(y, update);
    double end = now() + seconds;
    do {
        int64_t t = *done;
        network->keep = batches->keep ? batches->keep + t * batches->batch * network->keeps : NULL;
        if (t + 1 < batches->steps)
            network->ahead = (ahead_t){data->values, batches->index + (t + 1) * batches->batch,
                                     batch_size(batches, t + 1),
                                     network->stage->features * (data->table ? 1 : (ptrdiff_t)sizeof(float))};
        losses[t] = step_once(network, data, batches->index + t * batches->batch, batch_size(batches, t), &step,
                              update->max_grad_norm);
        network->ahead = (ahead_t){0};
    } while (++*done < batches->steps && now() < end);
}

static int64_t train(hansa_network *network, float *y, const hansa_data *data, const hansa_batches *batches,
                     const hansa_update *update, float *losses, int64_t *done, double seconds) {
    int64_t wrong = *done ? HANSA_OK : check(network, data, batches);
    if (!wrong && *done < batches->steps) descend(network, y, data, batches, update, losses, done, seconds);
    return wrong;
}

/* One client's steps from `done` on, until all are done or `seconds` have passed. */
static int64_t client_steps(hansa_network *network, const hansa_data *data, const hansa_update *update,
                            hansa_client *client, double seconds) {
    int64_t length = client->steps * client->batch, need = length + client->samples;
    if (need > network->room) {
        int64_t *drawn = realloc(network->drawn, sizeof(int64_t) * (size_t)need);
        if (!drawn) return HANSA_NO_MEMORY;
        network->drawn = drawn;
        network->room = need;
    }
    hansa_batches batches = {network->drawn, NULL, client->steps, client->batch, NULL};
    if (!client->done) {
        draw_batches(client->key, client->own, client->samples, length, network->drawn + length, network->drawn);
        int64_t wrong = check(network, data, &batches);
        if (wrong) return wrong;
        client->finite = 1;
    }
    step_t step = step_on(client->y, update);
    double end = now() + seconds;
    do { /* the first step reads x, and the last writes the delta */
        int64_t t = client->done;
        int last = !client->keep_model && t + 1 == client->steps;
        step.y = t ? client->y : (float *)client->x;
        step.to = last ? client->delta : t ? NULL : client->y;
        step.minus = last ? client->x : NULL;
        network->keep = NULL;
        client->losses[t] = step_once(network, data, network->drawn + t * client->batch, client->batch, &step, update->max_grad_norm);
    } while (++client->done < client->steps && now() < end);
    if (client->done < client->steps) return HANSA_OK;
    if (client->keep_model) difference32(client->y, client->x, network->parameters, client->delta, &client->finite);
    else squares32(client->delta, network->parameters, &client->finite);
    return HANSA_OK;
}

/* Train the clients from `at` on. A call returns early after `seconds`: it is called again until `at` is `count`. */
static int64_t train_clients(hansa_network *network, const hansa_data *data, const hansa_update *update, hansa_client *all,
                       int64_t count, int64_t *at, double seconds) {
    double end = now() + seconds, left = seconds;
    if (*at >= count) return HANSA_OK;
    do {
        int64_t wrong = client_steps(network, data, update, all + *at, left);
        if (wrong) return wrong;
        *at += all[*at].done == all[*at].steps;
        left = end - now();
    } while (*at < count && left > 0);
    return HANSA_OK;
}

static int64_t gradient(hansa_network *network, const float *y, const hansa_data *data, const hansa_batches *batches,
                        float *g, float *loss) {
    int64_t wrong = check(network, data, batches);
    if (wrong) return wrong;
    network->keep = batches->keep;
    fill_batch(network, data, batches->index, batch_size(batches, 0));
    prepare(network, y, 1);
    forward(network, y, batch_size(batches, 0));
    *loss = backward(network, y, data, batches->index, batch_size(batches, 0), g, NULL);
    return HANSA_OK;
}

static int64_t logits(hansa_network *network, const float *y, const hansa_data *data, const hansa_batches *batches,
                      float *out) {
    int64_t wrong = check(network, data, batches);
    if (wrong) return wrong;
    network->keep = NULL;
    prepare(network, y, 0);
    for (int64_t t = 0; t < batches->steps; t++) {
        ptrdiff_t size = batch_size(batches, t);
        fill_batch(network, data, batches->index + t * batches->batch, size);
        forward(network, y, size);
        for (ptrdiff_t b = 0; b < size; b++, out += network->classes)
            memcpy(out, network->logits + b * network->logits_row, sizeof(float) * network->classes);
    }
    return HANSA_OK;
}

static int64_t evaluate(hansa_network *network, const float *y, const hansa_data *data, int64_t from, int64_t to,
                        hansa_score *score) {
    if (from < 0 || to > data->rows || from > to) return HANSA_BAD_ROW;
    for (int64_t row = from; row < to; row++) {
        if (data->labels[row] < 0 || data->labels[row] >= network->classes) return HANSA_BAD_LABEL;
        if (network->stage->is.kind == HANSA_EMBED && !tokens_exist(network->stage, data, row)) return HANSA_BAD_TOKEN;
    }
    network->keep = NULL;
    prepare(network, y, 0);
    *score = (hansa_score){0, 0};
    for (int64_t row = from, size; row < to; row += size) {
        int64_t index[64];
        size = at_most(at_most(64, network->batch), to - row);
        for (int64_t b = 0; b < size; b++) index[b] = row + b;
        fill_batch(network, data, index, size);
        forward(network, y, size);
        for (int64_t b = 0; b < size; b++) {
            const float *z = network->logits + b * network->logits_row;
            ptrdiff_t best = 0;
            for (ptrdiff_t c = 1; c < network->classes; c++)
                if (z[c] > z[best] || (z[c] != z[c] && z[best] == z[best])) best = c;
            score->loss += cross_entropy(z, network->classes, data->labels[row + b], 0, NULL);
            score->correct += best == data->labels[row + b];
        }
    }
    return HANSA_OK;
}

#endif
