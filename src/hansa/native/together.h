/* A cohort's local steps and gossip, all of them in one call: the models are rows of a matrix that stay where they are.
 *
 * Mixing works in place: a cut of all rows is copied aside, near at hand, and the new values are folded from there. */
#ifndef HANSA_TOGETHER_H
#define HANSA_TOGETHER_H

#include "stack.h"
#include "wire.h"

/* Whether no entry is NaN or infinite: 0 x is then 0. */
static int all_finite32(const float *x, int64_t n) {
    vf sum[8];
    int64_t i = 0;
    UNROLL for (int j = 0; j < 8; j++) sum[j] = zero();
    for (; i + 8 * VL <= n; i += 8 * VL)
        UNROLL for (int j = 0; j < 8; j++) sum[j] = madd(load(x + i + j * VL), zero(), sum[j]);
    float flat[8 * VL], total = 0;
    memcpy(flat, sum, sizeof flat);
    for (; i < n; i++) total += x[i] * 0.0f;
    for (int j = 0; j < 8 * VL; j++) total += flat[j];
    return total == 0;
}

INLINE int alive(const hansa_cohort *c, int64_t row) { return c->starts[row] < c->starts[row + 1]; }

/* N vectors of a row, the last of them not whole if PART: w_ij from_j folded over its links j in the order given, and
 * then what is to become of the sum. */
INLINE void fold_tile(const int KIND, const int N, const int PART, const hansa_cohort *c, int64_t row, const float *from,
                      ptrdiff_t step, ptrdiff_t lanes, float *x, const float *later) {
    const int64_t *links = c->links + c->starts[row], *end = c->links + c->starts[row + 1];
    const double *weights = c->weights + c->starts[row];
    vf sum[4];
#define TAKE(p, j) (PART ? load_part((p) + (j) * VL, lanes) : load((p) + (j) * VL))
    vf weight = splat((float)*weights);
    UNROLL for (int j = 0; j < N; j++) sum[j] = TAKE(from + *links * step, j) * weight;
    while (++links < end) {
        const float *at = from + *links * step;
        weight = splat((float)*++weights);
        UNROLL for (int j = 0; j < N; j++) sum[j] = madd(TAKE(at, j), weight, sum[j]);
    }
    const float *own = from + row * step;
    const vf rate = splat((float)c->rate);
    UNROLL for (int j = 0; j < N; j++) {
        if (KIND == HANSA_SETTLE) sum[j] = TAKE(later, j) + (sum[j] - TAKE(own, j));
        if (KIND == HANSA_PULL) sum[j] = madd(rate, sum[j] - TAKE(own, j), TAKE(x, j));
        if (PART) store_part(x + j * VL, sum[j], lanes);
        else store(x + j * VL, sum[j]);
    }
#undef TAKE
}

INLINE void fold(const int KIND, const hansa_cohort *c, int64_t row, const float *from, ptrdiff_t step, ptrdiff_t some,
                 float *x, const float *later) {
    ptrdiff_t i = 0;
    for (; i + 4 * VL <= some; i += 4 * VL)
        fold_tile(KIND, 4, 0, c, row, from + i, step, VL, x + i, later ? later + i : NULL);
    for (; i < some; i += VL)
        fold_tile(KIND, 1, 1, c, row, from + i, step, some - i, x + i, later ? later + i : NULL);
}

/* How much of each row is at hand at a time: all rows of a cut together stay in the second cache. */
INLINE ptrdiff_t cut_of(const hansa_cohort *c) {
    ptrdiff_t fair = 32 * HANSA_CUT / c->rows / 64 * 64;
    return at_most(HANSA_CUT, fair < 64 ? 64 : fair);
}

/* A cut of every row, copied aside where it is about to be overwritten. */
static void aside(const hansa_cohort *c, ptrdiff_t d, ptrdiff_t i, ptrdiff_t cut, ptrdiff_t some) {
    for (int64_t row = 0; row < c->rows; row++) {
        const float *from = c->x + row * d + i;
        for (ptrdiff_t j = cut; j < at_most(2 * cut, d - i); j += 16) __builtin_prefetch(from + j, 1);
        memcpy(c->scratch + row * cut, from, sizeof(float) * (size_t)some);
    }
}

/* X <- W X; of rows that stepped in `later`, X <- later + (W X - X), which is later where nobody mixes in. */
static void mix_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (ptrdiff_t i = 0, cut = cut_of(c), some; i < d; i += some) {
        some = at_most(cut, d - i);
        aside(c, d, i, cut, some);
        for (int64_t row = 0; row < c->rows; row++) {
            float *x = c->x + row * d + i;
            if (!alive(c, row)) continue;
            if (c->later && c->stepped[row])
                fold(HANSA_SETTLE, c, row, c->scratch, cut, some, x, c->later + row * d + i);
            else fold(HANSA_MIX, c, row, c->scratch, cut, some, x, NULL);
        }
    }
}

/* The same with W = 11'/n over the rows that are left. */
static void average_rows(const hansa_cohort *c, ptrdiff_t d) {
    int64_t left = 0;
    for (int64_t row = 0; row < c->rows; row++) left += alive(c, row);
    const float share = (float)(1.0 / (double)left);
    float mean[HANSA_CUT];
    for (ptrdiff_t i = 0, some; i < d; i += some) {
        some = at_most(HANSA_CUT, d - i);
        memset(mean, 0, sizeof mean);
        for (int64_t row = 0; row < c->rows; row++) {
            const float *x = c->x + row * d + i;
            if (alive(c, row)) INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) mean[j] += x[j] * share;
        }
        for (int64_t row = 0; row < c->rows; row++) {
            float *x = c->x + row * d + i;
            if (!alive(c, row)) continue;
            if (c->later && c->stepped[row]) {
                const float *later = c->later + row * d + i;
                INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) x[j] = later[j] + (mean[j] - x[j]);
            } else {
                memcpy(x, mean, sizeof(float) * (size_t)some);
            }
        }
    }
}

/* Steps made in `later`, where nobody mixes. */
static void settle_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (int64_t row = 0; row < c->rows; row++)
        if (c->stepped[row] && alive(c, row)) memcpy(c->x + row * d, c->later + row * d, sizeof(float) * (size_t)d);
}

/* X <- X + rate (W - I) open. */
static void pull_rows(const hansa_cohort *c, ptrdiff_t d) {
    for (ptrdiff_t i = 0, cut = cut_of(c), some; i < d; i += some) {
        some = at_most(cut, d - i);
        for (int64_t row = 0; row < c->rows; row++)
            if (alive(c, row)) fold(HANSA_PULL, c, row, c->open + i, d, some, c->x + row * d + i, NULL);
    }
}

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

/* The scale of the signs of a - b, and the signs themselves as bits: what `sign_pack` has of that vector. The sum need be
 * exact only as far as its float32 shows. NaN where an entry of a - b is not finite. */
static float sign_difference(const float *a, const float *b, int64_t n, uint8_t *bits) {
    double lanes[HANSA_SUM_LANES], part[HANSA_SUM_LANES];
    float apart[HANSA_SUM_LANES];
    memset(lanes, 0, sizeof lanes);
    for (int64_t start = 0; start < n; start += 64 * HANSA_SUM_LANES) {
        int64_t stop = at_most(n, start + 64 * HANSA_SUM_LANES);
        memset(part, 0, sizeof part);
        for (int64_t i = start; i < stop; i += HANSA_SUM_LANES) {
            int64_t some = at_most(HANSA_SUM_LANES, stop - i);
            INDEPENDENT for (int64_t j = 0; j < some; j++) apart[j] = a[i + j] - b[i + j];
            for (int64_t j = some; j % 32; j++) apart[j] = -1;
            for (int64_t j = 0; j < some; j += 32) {
                uint32_t word = 0;
                UNROLL for (int k = 0; k < 32; k += VL) word |= sign_bits(apart + j + k) << k;
                uint8_t bytes[4] = {(uint8_t)word, (uint8_t)(word >> 8), (uint8_t)(word >> 16), (uint8_t)(word >> 24)};
                memcpy(bits + (i + j) / 8, bytes, (size_t)at_most(4, (some - j + 7) / 8));
            }
            INDEPENDENT for (int64_t j = 0; j < some; j++) part[j] += (double)fabsf(apart[j]);
        }
        INDEPENDENT for (int j = 0; j < HANSA_SUM_LANES; j++) lanes[j] += part[j];
    }
    double near[8] = {0}, sum = 0;
    for (int j = 0; j < HANSA_SUM_LANES; j += 8)
        UNROLL for (int k = 0; k < 8; k++) near[k] += lanes[j + k];
    for (int k = 0; k < 8; k++) sum += near[k];
    if (!isfinite(sum)) return (float)NAN;
    double slack = sum * 0x1p-40;
    if ((float)((sum - slack) / (double)n) != (float)((sum + slack) / (double)n)) sum = exact_sum(lanes, HANSA_SUM_LANES);
    return (float)(sum / (double)n);
}

/* Compressed gossip by scaled signs (CHOCO): open <- open + C(x - open) for every row, then the pull. */
static int64_t signs_of_rows(const hansa_cohort *c, ptrdiff_t d) {
    ptrdiff_t bytes = round_up((d + 7) / 8, 64);
    float *scales = c->scratch + c->rows * HANSA_CUT;
    uint8_t *bits = (uint8_t *)(scales + c->rows);
    for (int64_t row = 0; row < c->rows; row++) {
        if (!alive(c, row)) continue;
        scales[row] = sign_difference(c->x + row * d, c->open + row * d, d, bits + row * bytes);
        if (!isfinite(scales[row])) return row + 1;
    }
    for (ptrdiff_t i = 0, cut = cut_of(c), some; i < d; i += some) {
        some = at_most(cut, d - i);
        for (int64_t row = 0; row < c->rows; row++) {
            const uint8_t *given = bits + row * bytes + i / 8;
            if (alive(c, row)) sign_add(&given, scales + row, 1, some, 0, c->open + row * d + i);
        }
        for (int64_t row = 0; row < c->rows; row++)
            if (alive(c, row)) fold(HANSA_PULL, c, row, c->open + i, d, some, c->x + row * d + i, NULL);
    }
    return 0;
}

static int64_t check_turns(const hansa_stack *stack, const hansa_data *data, const hansa_cohort *c) {
    for (int64_t t = 0; t < c->count; t++) {
        const hansa_turn *turn = c->turns + t;
        hansa_batches batches = {turn->index, NULL, 1, turn->batch, NULL};
        if (turn->row < 0) continue;
        int64_t wrong = turn->row >= c->rows ? HANSA_BAD_ROW : check(stack, data, &batches);
        if (wrong) return wrong;
    }
    return HANSA_OK;
}

static int64_t cohort(hansa_stack *stack, const hansa_data *data, const hansa_update *update, hansa_cohort *c) {
    ptrdiff_t d = stack->parameters;
    int64_t wrong = c->done ? HANSA_OK : check_turns(stack, data, c);
    if (wrong) return wrong;
    step_t step = step_on(NULL, update);
    double end = now() + c->seconds;
    stack->keep = NULL;
    c->lost = -1;
    while (c->done < c->count) {
        int64_t at = c->done++, row = c->turns[at].row;
        if (row >= 0) {
            float *x = c->x + row * d;
            step.y = c->later ? c->later + row * d : x;
            step.momentum = c->momenta ? c->momenta[row] : NULL;
            if (c->later) {
                memcpy(step.y, x, sizeof(float) * (size_t)d);
                c->stepped[row] = 1;
            }
            c->losses[at] = step_once(stack, data, c->turns[at].index, c->turns[at].batch, &step, update->clip);
            if (!all_finite32(step.y, d)) {
                c->lost = row;
                return HANSA_OK;
            }
        } else {
            if (row == HANSA_MIX) mix_rows(c, d);
            else if (row == HANSA_AVERAGE) average_rows(c, d);
            else if (row == HANSA_SETTLE) settle_rows(c, d);
            else if (row == HANSA_PULL) pull_rows(c, d);
            else if ((wrong = signs_of_rows(c, d))) {
                c->lost = wrong - 1;
                return HANSA_BAD_SUM;
            }
            if (c->later) memset(c->stepped, 0, sizeof(int64_t) * (size_t)c->rows);
        }
        if (now() >= end) break;
    }
    return HANSA_OK;
}

/* sum_i ||x_i - mean||^2 over the chosen rows, of `stride` entries each, in float64 throughout. */
static double spread(const float *x, const int64_t *chosen, int64_t count, int64_t d, int64_t stride) {
    double mean[HANSA_CUT], squares[HANSA_CUT], total = 0;
    const double share = 1.0 / (double)count;
    for (ptrdiff_t i = 0, some; i < d; i += some) {
        some = at_most(HANSA_CUT, d - i);
        memset(mean, 0, sizeof mean);
        memset(squares, 0, sizeof squares);
        for (int64_t r = 0; r < count; r++) {
            const float *row = x + chosen[r] * stride + i;
            INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) mean[j] += (double)row[j];
        }
        INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) mean[j] *= share;
        for (int64_t r = 0; r < count; r++) {
            const float *row = x + chosen[r] * stride + i;
            INDEPENDENT for (ptrdiff_t j = 0; j < some; j++) {
                double apart = (double)row[j] - mean[j];
                squares[j] += apart * apart;
            }
        }
        for (ptrdiff_t j = 0; j < some; j++) total += squares[j];
    }
    return total;
}

#endif
