/* Inner products of many float32 rows with a few vectors, in float64. */
#ifndef HANSA_GRAM_H
#define HANSA_GRAM_H

#include <stdlib.h>

#include "native.h"
#include "server.h"
#include "vector.h"

enum { GRAM_LANES = 8 };
#if VL == 16
enum { GRAM_ROWS = 4, GRAM_VECTORS = 5, GRAM_SPAN = 1024 };
#elif VL == 8 /* a tile fits in the L1 cache; 1024 takes half as long again */
enum { GRAM_ROWS = 3, GRAM_VECTORS = 4, GRAM_SPAN = 512 };
#elif defined(HANSA_NEON)
enum { GRAM_ROWS = 4, GRAM_VECTORS = 4, GRAM_SPAN = 512 };
#else
enum { GRAM_ROWS = 2, GRAM_VECTORS = 2, GRAM_SPAN = 512 };
#endif

/* A tile of pairs over one span, one register of lanes per pair and pass. `lanes` is [row][vector][8]. */
INLINE void gram_tile(const int rows, const float *a, int64_t row, const double *b, int64_t n, double *lanes,
                      int64_t row_lanes) {
    for (int part = 0; part < GRAM_LANES; part += WIDE) {
        wide_t sum[GRAM_ROWS][GRAM_VECTORS];
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < GRAM_VECTORS; v++)
            memcpy(&sum[r][v], lanes + r * row_lanes + v * GRAM_LANES + part, sizeof(wide_t));
        for (int64_t i = part; i + WIDE <= n; i += GRAM_LANES) {
            wide_t x[GRAM_ROWS], y;
            UNROLL for (int r = 0; r < rows; r++) x[r] = widened(a + r * row + i);
            UNROLL for (int v = 0; v < GRAM_VECTORS; v++) {
                memcpy(&y, b + v * GRAM_SPAN + i, sizeof y);
                UNROLL for (int r = 0; r < rows; r++) sum[r][v] += x[r] * y;
            }
        }
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < GRAM_VECTORS; v++)
            memcpy(lanes + r * row_lanes + v * GRAM_LANES + part, &sum[r][v], sizeof(wide_t));
    }
}

/* Adds `n` entries of each row and vector to lanes[row][HANSA_GRAM_ROOM(many)][8]. Entry i is added to lane i mod 8 in
 * order, independent of the instruction set and of the other rows in the call. All pieces but the last have a multiple
 * of 8 entries; `row` and `vector` are the strides of rows and vectors. */
static int64_t gram32_add(const float *rows, int64_t row, int64_t count, const float *vectors, int64_t vector,
                          int64_t many, int64_t n, double *lanes) {
    int64_t padded = round_up(many, GRAM_VECTORS), row_lanes = HANSA_GRAM_ROOM(many) * GRAM_LANES;
    double *wide = calloc((size_t)(padded * GRAM_SPAN), sizeof *wide);
    int64_t whole = n - n % GRAM_LANES;
    if (!wide) return HANSA_NO_MEMORY;
    for (int64_t start = 0, some; start < whole; start += some) {
        some = at_most(GRAM_SPAN, whole - start);
        for (int64_t v = 0; v < many; v++)
            INDEPENDENT for (int64_t i = 0; i < some; i++) wide[v * GRAM_SPAN + i] = vectors[v * vector + start + i];
        int64_t r = 0;
        for (; r + GRAM_ROWS <= count; r += GRAM_ROWS)
            for (int64_t v = 0; v < padded; v += GRAM_VECTORS)
                gram_tile(GRAM_ROWS, rows + r * row + start, row, wide + v * GRAM_SPAN, some,
                          lanes + r * row_lanes + v * GRAM_LANES, row_lanes);
        for (; r < count; r++)
            for (int64_t v = 0; v < padded; v += GRAM_VECTORS)
                gram_tile(1, rows + r * row + start, row, wide + v * GRAM_SPAN, some,
                          lanes + r * row_lanes + v * GRAM_LANES, row_lanes);
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t v = 0; v < many; v++)
            for (int64_t i = whole; i < n; i++)
                lanes[r * row_lanes + v * GRAM_LANES + i - whole] +=
                    (double)rows[r * row + i] * (double)vectors[v * vector + i];
    free(wide);
    return HANSA_OK;
}

/* out[r][v] = the pairwise sum of the lanes of a pair. */
static void gram32_sum(double *lanes, int64_t count, int64_t many, double *out) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t v = 0; v < many; v++) {
            double *lane = lanes + (r * HANSA_GRAM_ROOM(many) + v) * GRAM_LANES;
            for (int half = GRAM_LANES / 2; half; half /= 2)
                for (int i = 0; i < half; i++) lane[i] += lane[i + half];
            out[r * many + v] = lane[0];
        }
}

/* out[r][v] = <row_r, vector_v>. A product of two float32 is exact in float64. */
static int64_t gram32(const float *rows, int64_t count, const float *vectors, int64_t many, int64_t n, double *out) {
    double *lanes = calloc((size_t)(count * HANSA_GRAM_ROOM(many) * GRAM_LANES), sizeof *lanes);
    if (!lanes) return HANSA_NO_MEMORY;
    int64_t told = gram32_add(rows, n, count, vectors, n, many, n, lanes);
    if (told == HANSA_OK) gram32_sum(lanes, count, many, out);
    free(lanes);
    return told;
}

#endif
