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

/* Sums of squares use 32 float64 lanes (entry i is added to lane i mod 32), then add the lanes pairwise: one order for
 * all instruction sets. Squares of float32 are exact and cannot overflow: the sum is finite iff all entries are. */
typedef double lanes_t __attribute__((vector_size(64)));

/* Float64 lanes as wide as the machine's: compilers generate slow code for wider vectors. */
#if VL == 16
typedef __m512d wide_t;
INLINE wide_t widened(const float *x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
#elif VL == 8
typedef __m256d wide_t;
INLINE wide_t widened(const float *x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
#elif defined(HANSA_NEON)
typedef double wide_t __attribute__((vector_size(16)));
INLINE wide_t widened(const float *x) { return (wide_t)vcvt_f64_f32(vld1_f32(x)); }
#else
typedef double wide_t __attribute__((vector_size(16)));
INLINE wide_t widened(const float *x) { return (wide_t){x[0], x[1]}; }
#endif
#define WIDE (int)(sizeof(wide_t) / sizeof(double))

INLINE double sum_of_lanes(const void *sum) {
    double flat[32];
    memcpy(flat, sum, sizeof flat);
    for (int half = 16; half; half /= 2)
        for (int i = 0; i < half; i++) flat[i] += flat[i + half];
    return flat[0];
}

/* The products a_i b_i in 32 lanes; both may be the same. */
static double products32(const float *a, const float *b, int64_t n) {
    wide_t sum[32 / WIDE];
    double flat[32];
    int64_t i = 0;
    memset(sum, 0, sizeof sum);
    for (; i + 32 <= n; i += 32)
        UNROLL for (int j = 0; j < 32 / WIDE; j++) sum[j] += widened(a + i + WIDE * j) * widened(b + i + WIDE * j);
    memcpy(flat, sum, sizeof flat);
    for (int j = 0; i < n; i++, j++) flat[j] += (double)a[i] * (double)b[i];
    return sum_of_lanes(flat);
}

static double squares32(const float *x, int64_t n, int64_t *finite) {
    double total = products32(x, x, n);
    if (finite) *finite = isfinite(total) != 0;
    return total;
}

/* out = y - x and its sum of squares in one pass, 32 entries at a time so that they stay in the cache. */
static double difference32(const float *y, const float *x, int64_t n, float *out, int64_t *finite) {
    wide_t sum[32 / WIDE];
    double flat[32], total;
    int64_t i = 0;
    memset(sum, 0, sizeof sum);
    for (; i + 32 <= n; i += 32) {
        UNROLL for (int j = 0; j < 32; j += VL) store(out + i + j, load(y + i + j) - load(x + i + j));
        UNROLL for (int j = 0; j < 32 / WIDE; j++) {
            wide_t change = widened(out + i + WIDE * j);
            sum[j] += change * change;
        }
    }
    memcpy(flat, sum, sizeof flat);
    for (int j = 0; i < n; i++, j++) {
        out[i] = y[i] - x[i];
        flat[j] += (double)out[i] * (double)out[i];
    }
    total = sum_of_lanes(flat);
    *finite = isfinite(total) != 0;
    return total;
}

static double squares64(const double *x, int64_t n, int64_t *finite) {
    lanes_t sum[4] = {{0}}, bad[4] = {{0}}; /* 0 * x is NaN iff x is not finite */
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
