/* Scaled signs of the difference of two vectors, in one look at them: what compressed gossip sends. */
#ifndef HANSA_SIGNS_H
#define HANSA_SIGNS_H

#include <math.h>

#include "server.h"
#include "wire.h"

/* The exactly rounded sum (Shewchuk 1997), as Python's fsum has it, of numbers that are not negative. */
static double exact_sum(const double *x, int64_t n) {
    double part[64], high = 0, low = 0;
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        double value = x[i];
        int kept = 0;
        for (int j = 0; j < count; j++) {
            double a = value, b = part[j];
            if (fabs(a) < fabs(b)) {
                double swap = a;
                a = b;
                b = swap;
            }
            volatile double sum = a + b, back = sum - a;
            double rest = b - back;
            if (rest != 0) part[kept++] = rest;
            value = sum;
        }
        part[kept++] = value;
        count = kept;
    }
    while (count > 0) {
        double a = high, b = part[--count];
        volatile double sum = a + b, back = sum - a;
        high = sum;
        low = b - back;
        if (low != 0) break;
    }
    if (count > 0 && low != 0 && (low < 0) == (part[count - 1] < 0) && part[count - 1] != 0) {
        volatile double twice = 2 * low, sum = high + twice, back = sum - high;
        if (back == twice) high = sum;
    }
    return high;
}

/* The sum of |a - b| as `sign_pack` has it, to the last bit. */
static double exact_distance(const float *a, const float *b, int64_t n) {
    double lanes[HANSA_SUM_LANES], part[HANSA_SUM_LANES];
    memset(lanes, 0, sizeof lanes);
    for (int64_t start = 0; start < n; start += 64 * HANSA_SUM_LANES) {
        int64_t stop = at_most(n, start + 64 * HANSA_SUM_LANES);
        memset(part, 0, sizeof part);
        for (int64_t i = start; i < stop; i += HANSA_SUM_LANES)
            for (int64_t j = 0; j < at_most(HANSA_SUM_LANES, stop - i); j++) {
                float apart = a[i + j] - b[i + j];
                part[j] += (double)fabsf(apart);
            }
        for (int j = 0; j < HANSA_SUM_LANES; j++) lanes[j] += part[j];
    }
    return exact_sum(lanes, HANSA_SUM_LANES);
}

/* The scale of the signs of a - b, and the signs themselves as bits: what `sign_pack` has of that vector. The sum need be
 * exact only as far as its float32 shows. NaN where an entry of a - b is not finite. */
static float sign_difference(const float *a, const float *b, int64_t n, uint8_t *bits) {
    double sum = 0;
    for (int64_t i = 0, stop; i < n; i = stop) { /* few enough additions a lane for the slack below */
        wide_t lanes[32 / WIDE];
        stop = at_most(n, i + 64 * HANSA_SUM_LANES);
        memset(lanes, 0, sizeof lanes);
        for (; i < stop; i += 32) {
            float apart[32], size[32];
            ptrdiff_t some = at_most(32, stop - i);
            uint32_t word = 0;
            if (some == 32) {
                UNROLL for (int k = 0; k < 32; k += VL) store(apart + k, load(a + i + k) - load(b + i + k));
            } else {
                for (int k = 0; k < 32; k++) apart[k] = k < some ? a[i + k] - b[i + k] : -0.0f;
            }
            UNROLL for (int k = 0; k < 32; k += VL) word |= sign_bits(apart + k) << k;
            if (some < 32) word &= (1u << some) - 1u;
            UNROLL for (int k = 0; k < 32; k++) size[k] = fabsf(apart[k]);
            UNROLL for (int k = 0; k < 32; k += WIDE) lanes[k / WIDE] += widened(size + k);
            uint8_t bytes[4] = {(uint8_t)word, (uint8_t)(word >> 8), (uint8_t)(word >> 16), (uint8_t)(word >> 24)};
            memcpy(bits + i / 8, bytes, (size_t)((some + 7) / 8));
        }
        sum += sum_of_lanes(lanes);
    }
    if (!isfinite(sum)) return (float)NAN;
    double slack = sum * 0x1p-40;
    if ((float)((sum - slack) / (double)n) != (float)((sum + slack) / (double)n)) sum = exact_distance(a, b, n);
    return (float)(sum / (double)n);
}

#endif
