/* The mean or the sum of the embeddings of a row's tokens: always the first stage.
 *
 * A batch touches few rows of the table. Their gradients are summed in a slot each, in the order of the tokens; all
 * other rows have the gradient zero, which a plain step in place need not apply. */
#ifndef HANSA_EMBEDDING_H
#define HANSA_EMBEDDING_H

#include "stage.h"

/* The stored tokens of a row. */
INLINE const int64_t *tokens_of(const stage_t *s, const hansa_data *data, int64_t row) {
    return (const int64_t *)data->values + row * s->features;
}

static int tokens_exist(const stage_t *s, const hansa_data *data, int64_t row) {
    const int64_t *tokens = tokens_of(s, data, row);
    int exist = 1;
    for (ptrdiff_t t = 0; t < s->features; t++) exist &= (uint64_t)tokens[t] < (uint64_t)s->is.words;
    return exist;
}

static void fill_tokens(const stage_t *s, const hansa_data *data, const int64_t *index, ptrdiff_t size) {
    for (ptrdiff_t b = 0; b < size; b++) {
        const int64_t *tokens = tokens_of(s, data, index[b]);
        for (ptrdiff_t t = 0; t < s->features; t++) s->which[b * s->features + t] = (int32_t)tokens[t];
    }
}

INLINE float share_of(const stage_t *s) { return s->is.pool == HANSA_MEAN ? 1.0f / (float)s->features : 1.0f; }

static void embed_forward(const stage_t *s, const float *y, ptrdiff_t size) {
    const ptrdiff_t width = s->is.out;
    const vf share = splat(share_of(s));
    for (ptrdiff_t b = 0; b < size; b++) {
        const int32_t *tokens = s->which + b * s->features;
        for (ptrdiff_t i = 0; i < width; i += VL) {
            const float *column = y + s->weight + i;
            vf sum = zero();
            if (width - i >= VL)
                for (ptrdiff_t t = 0; t < s->features; t++) sum = sum + load(column + tokens[t] * width);
            else
                for (ptrdiff_t t = 0; t < s->features; t++) sum = sum + load_part(column + tokens[t] * width, width - i);
            store_part(s->out + b * s->out_row + i, sum * share, width - i);
        }
    }
}

/* Sums the gradients of the table's rows in slots; returns how many there are. slot_of[word] is 1 + its slot. */
static ptrdiff_t embed_slots(const stage_t *s, ptrdiff_t size) {
    const vf share = splat(share_of(s));
    ptrdiff_t count = 0;
    for (ptrdiff_t b = 0; b < size; b++) {
        const float *g = s->out_gradient + b * s->flat_step;
        for (ptrdiff_t t = 0; t < s->features; t++) {
            int32_t word = s->which[b * s->features + t];
            if (word == s->is.skip) continue;
            int old = s->slot_of[word] != 0;
            if (!old) {
                s->words[count] = word;
                s->slot_of[word] = (int32_t)++count;
            }
            float *slot = s->saved + (s->slot_of[word] - 1) * s->out_step;
            for (ptrdiff_t i = 0; i < s->out_step; i += VL) {
                vf part = load(g + i) * share;
                if (old) part = part + load(slot + i);
                store(slot + i, part);
            }
        }
    }
    return count;
}

/* The table's gradient, stored at `gradient` or, if that is null, applied at once. */
static void embed_backward(const stage_t *s, ptrdiff_t size, float *gradient, const step_t *step) {
    const ptrdiff_t width = s->is.out, count = embed_slots(s, size);
    if (gradient) memset(gradient + s->weight, 0, sizeof(float) * s->is.words * width);
    int some = gradient || (plain(step) && !step->change && !step->to); /* nothing else changes */
    for (ptrdiff_t i = 0; i < (some ? count : s->is.words); i++) {
        ptrdiff_t word = some ? s->words[i] : i, slot = s->slot_of[word], at = s->weight + word * width;
        const float *g = slot ? s->saved + (slot - 1) * s->out_step : s->scales;
        if (gradient) memcpy(gradient + at, g, sizeof(float) * width);
        else step_span(step, at, g, width, 1.0f);
    }
    for (ptrdiff_t i = 0; i < count; i++) s->slot_of[s->words[i]] = 0;
}

#endif
