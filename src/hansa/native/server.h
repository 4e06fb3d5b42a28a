/* The server's passes over whole vectors: optimizer steps, weighted sums, squared norms. Each reads and writes every
 * entry once. An output may be the input of the same name; otherwise arrays must not overlap. */
#ifndef HANSA_SERVER_H
#define HANSA_SERVER_H

#include <math.h>

#include "native.h"
#include "vector.h"

#define T float
#define NAMED(name) name##32
#define ROOT sqrtf
#include "server_typed.h"
#undef T
#undef NAMED
#undef ROOT

#define T double
#define NAMED(name) name##64
#define ROOT sqrt
#include "server_typed.h"
#undef T
#undef NAMED
#undef ROOT

/* Sums of squares run in 32 float64 lanes (entry i joins lane i mod 32), then the lanes pairwise: one order for all
 * instruction sets. Squares of float32 are exact and cannot overflow: the sum is finite just if all entries are. */
typedef double lanes_t __attribute__((vector_size(64)));
typedef float floats_t __attribute__((vector_size(32)));

INLINE double sum_of_lanes(const lanes_t *sum) {
    double flat[32];
    memcpy(flat, sum, sizeof flat);
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++) flat[i] += flat[i + half];
    return flat[0];
}

static double squares32(const float *x, int64_t n, int64_t *finite) {
    lanes_t sum[4] = {{0}};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        UNROLL for (int j = 0; j < 4; j++) {
            floats_t narrow;
            memcpy(&narrow, x + i + 8 * j, sizeof narrow);
            lanes_t wide = __builtin_convertvector(narrow, lanes_t);
            sum[j] += wide * wide;
        }
    }
    for (int j = 0; i < n; i++, j++) sum[j / 8][j % 8] += (double)x[i] * (double)x[i];
    double total = sum_of_lanes(sum);
    if (finite) *finite = isfinite(total) != 0;
    return total;
}

static double squares64(const double *x, int64_t n, int64_t *finite) {
    lanes_t sum[4] = {{0}}, bad[4] = {{0}}; /* 0 * x is NaN just if x is not finite */
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        UNROLL for (int j = 0; j < 4; j++) {
            lanes_t wide;
            memcpy(&wide, x + i + 8 * j, sizeof wide);
            sum[j] += wide * wide;
            bad[j] += wide * 0.0;
        }
    }
    for (int j = 0; i < n; i++, j++) {
        sum[j / 8][j % 8] += x[i] * x[i];
        bad[j / 8][j % 8] += x[i] * 0.0;
    }
    if (finite) *finite = isfinite(sum_of_lanes(bad)) != 0;
    return sum_of_lanes(sum);
}

#endif
