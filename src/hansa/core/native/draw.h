/* The batches of a client: NumPy's Philox generator and shuffle, bit-identical. */
#ifndef HANSA_DRAW_H
#define HANSA_DRAW_H

#include <stdint.h>
#include <string.h>

#define PHILOX_STEP0 0x9E3779B97F4A7C15u
#define PHILOX_STEP1 0xBB67AE8584CAA73Bu
#define PHILOX_TIMES0 0xD2E7470EE14C6C93u
#define PHILOX_TIMES1 0xCA5A826395121157u

/* Philox 4x64 with ten rounds (Salmon et al. 2011) in NumPy's order: the counter is incremented before each block of
 * four, and 32-bit numbers are the lower half of 64 bits first, then the upper. */
typedef struct {
    uint64_t counter[4], key[2], block[4];
    int used;
    int has_half;
    uint32_t half;
} philox_t;

static inline philox_t philox_new(const uint64_t *key) {
    return (philox_t){.key = {key[0], key[1]}, .used = 4};
}

/* The ten rounds: map a counter to its block of four. */
static inline void philox_block(const uint64_t *key, uint64_t *x) {
    uint64_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        unsigned __int128 a = (unsigned __int128)x[0] * PHILOX_TIMES0;
        unsigned __int128 b = (unsigned __int128)x[2] * PHILOX_TIMES1;
        uint64_t y0 = (uint64_t)(b >> 64) ^ x[1] ^ k0, y2 = (uint64_t)(a >> 64) ^ x[3] ^ k1;
        x[0] = y0;
        x[1] = (uint64_t)b;
        x[2] = y2;
        x[3] = (uint64_t)a;
        k0 += PHILOX_STEP0;
        k1 += PHILOX_STEP1;
    }
}

/* The keys of the ten rounds, in pairs. */
static inline void philox_keys(const uint64_t *key, uint64_t *keys) {
    for (uint64_t i = 0; i < 20; i++) keys[i] = key[i % 2] + i / 2 * (i % 2 ? PHILOX_STEP1 : PHILOX_STEP0);
}

/* The blocks of two consecutive counters, interleaved to hide the latency of multiplication. */
static inline void philox_pair(const uint64_t *keys, uint64_t counter, uint64_t *out) {
    uint64_t a0 = counter, a1 = 0, a2 = 0, a3 = 0, b0 = counter + 1, b1 = 0, b2 = 0, b3 = 0;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        unsigned __int128 p = (unsigned __int128)a0 * PHILOX_TIMES0, q = (unsigned __int128)a2 * PHILOX_TIMES1;
        unsigned __int128 r = (unsigned __int128)b0 * PHILOX_TIMES0, s = (unsigned __int128)b2 * PHILOX_TIMES1;
        a0 = (uint64_t)(q >> 64) ^ a1 ^ keys[2 * round];
        a2 = (uint64_t)(p >> 64) ^ a3 ^ keys[2 * round + 1];
        b0 = (uint64_t)(s >> 64) ^ b1 ^ keys[2 * round];
        b2 = (uint64_t)(r >> 64) ^ b3 ^ keys[2 * round + 1];
        a1 = (uint64_t)q;
        a3 = (uint64_t)p;
        b1 = (uint64_t)s;
        b3 = (uint64_t)r;
    }
    out[0] = a0, out[1] = a1, out[2] = a2, out[3] = a3, out[4] = b0, out[5] = b1, out[6] = b2, out[7] = b3;
}

static inline uint64_t philox_next(philox_t *draw) {
    if (draw->used < 4) return draw->block[draw->used++];
    for (int i = 0; i < 4 && !++draw->counter[i]; i++) {}
    for (int i = 0; i < 4; i++) draw->block[i] = draw->counter[i];
    philox_block(draw->key, draw->block);
    draw->used = 1;
    return draw->block[0];
}

static inline uint32_t philox_half(philox_t *draw) {
    if (draw->has_half) {
        draw->has_half = 0;
        return draw->half;
    }
    uint64_t both = philox_next(draw);
    draw->has_half = 1;
    draw->half = (uint32_t)(both >> 32);
    return (uint32_t)both;
}

/* An integer from 0 to `most`, by masks and rejection. */
static inline uint64_t philox_within(philox_t *draw, uint64_t most) {
    const uint64_t mask = most ? UINT64_MAX >> __builtin_clzll(most) : 0;
    uint64_t value;
    do value = (most <= 0xffffffffu ? philox_half(draw) : philox_next(draw)) & mask;
    while (value > most);
    return value;
}

/* The same by products (Lemire 2019), for `most` below 2^32 - 1. */
static inline uint64_t philox_below(philox_t *draw, uint32_t most) {
    const uint32_t numbers = most + 1, bad = (UINT32_MAX - most) % numbers;
    uint64_t product;
    if (!most) return 0;
    do product = (uint64_t)philox_half(draw) * numbers;
    while ((uint32_t)product < bad);
    return product >> 32;
}

/* For each of `count` keys `some` of the numbers below `many`, at most 10,000, as Generator.choice without replacement or
 * shuffle (Floyd's algorithm): number j, or a lower one if that is not taken yet. */
static void choose(const char *keys, int64_t count, int64_t many, int64_t some, int64_t *out) {
    for (int64_t at = 0; at < count; at++, out += some) {
        uint64_t words[2];
        memcpy(words, keys + at * (int64_t)sizeof words, sizeof words);
        philox_t draw = philox_new(words);
        for (int64_t i = 0; i < some; i++) {
            int64_t j = many - some + i, value = (int64_t)philox_below(&draw, (uint32_t)j);
            for (int64_t k = 0; k < i; k++)
                if (out[k] == value) {
                    value = j;
                    break;
                }
            out[i] = value;
        }
    }
}

/* `length` entries of `own` from consecutive passes, each shuffled as by Generator.permutation. `order` has room for
 * `samples`. */
static void draw_batches(const uint64_t *key, const int64_t *own, int64_t samples, int64_t length, int64_t *order,
                         int64_t *out) {
    philox_t draw = philox_new(key);
    for (int64_t done = 0; done < length; done += samples) {
        for (int64_t i = 0; i < samples; i++) order[i] = i;
        for (int64_t i = samples - 1; i > 0; i--) {
            int64_t j = (int64_t)philox_within(&draw, (uint64_t)i), other = order[j];
            order[j] = order[i];
            order[i] = other;
        }
        int64_t some = length - done < samples ? length - done : samples;
        for (int64_t i = 0; i < some; i++) out[done + i] = own ? own[order[i]] : order[i];
    }
}

/* `draw_batches` of `count` clients, one after the other in `out`. `own` may be null, or null for a client; `order` has
 * room for the most samples. */
static void draw_clients(const uint64_t *keys, const int64_t *const *own, const int64_t *samples, const int64_t *lengths,
                         int64_t count, int64_t *order, int64_t *out) {
    for (int64_t c = 0; c < count; out += lengths[c++])
        draw_batches(keys + 2 * c, own ? own[c] : NULL, samples[c], lengths[c], order, out);
}

#endif
