/* Elementwise activations and their derivatives, from one exponential each.
 *
 * exp(x) = 2^n (1 + p(r)), n = round(x / ln 2), r = x - n ln 2, with p a minimax polynomial of expm1. Results are
 * within 3 units in the last place on all instruction sets, except where the activation itself is near 0. */
#ifndef HANSA_ELEMENTWISE_H
#define HANSA_ELEMENTWISE_H

#include "native.h"
#include "vector.h"

typedef uint32_t bits_t __attribute__((vector_size(4 * VL)));

INLINE vf magnitude(vf x) { return (vf)((bits_t)x & ~(bits_t)splat(-0.0f)); }
INLINE vf with_sign(vf x, vf sign) { return (vf)((bits_t)x | ((bits_t)sign & (bits_t)splat(-0.0f))); }

/* exp(x) = scale (1 + part) for x from -87.3 to 88.3, and at these limits beyond; NaN stays NaN. */
typedef struct {
    vf scale, part;
} power_t;

INLINE power_t power_of(vf x) {
    const vf shift = splat(0x1.8p23f); /* the sum's low bits are the rounded number */
    x = smaller(splat(88.3f), larger(splat(-87.3f), x));
    vf sum = madd(x, splat(0x1.715476p+0f), shift), n = sum - shift;
    vf r = madd(n, splat(0x1.bd0106p-13f), madd(n, splat(-0x1.63p-1f), x)); /* ln 2 in two parts, the first of 9 bits */
    vf p = splat(0.00019846045f);
    p = madd(p, r, splat(0.0013940687f));
    p = madd(p, r, splat(0.00833339f));
    p = madd(p, r, splat(0.04166636f));
    p = madd(p, r, splat(0.16666666f));
    p = madd(p, r, splat(0.5f));
    return (power_t){(vf)(((bits_t)sum << 23) + (bits_t)splat(1.0f)), madd(p * r, r, r)};
}

INLINE vf exp_of(vf x) {
    power_t power = power_of(x);
    return madd(power.scale, power.part, power.scale);
}

INLINE vf expm1_of(vf x) {
    power_t power = power_of(x);
    return madd(power.scale, power.part, power.scale - splat(1.0f));
}

INLINE vf tanh_of(vf x) {
    vf e = expm1_of(smaller(splat(20.0f), magnitude(x + x)));
    return with_sign(e / (e + splat(2.0f)), x);
}

/* The normal distribution function from erfcx(z) = exp(z^2) erfc(z), a minimax polynomial of t = 1 / (1 + 0.3 z), and
 * its density. */
INLINE vf normal_of(vf x, vf *density) {
    vf z = smaller(splat(9.0f), magnitude(x)) * splat(0x1.6a09e6p-1f); /* |x| / sqrt(2) */
    vf e = exp_of(x * x * splat(-0.5f)), t = splat(1.0f) / madd(z, splat(0.3f), splat(1.0f));
    vf p = splat(-0x1.ff9f4cp-4f);
    p = madd(p, t, splat(0x1.d7d0c6p-2f));
    p = madd(p, t, splat(-0x1.d1dc1ap-2f));
    p = madd(p, t, splat(0x1.e4b696p-2f));
    p = madd(p, t, splat(-0x1.22e21ep-5f));
    p = madd(p, t, splat(0x1.7bbe0cp-3f));
    p = madd(p, t, splat(0x1.424032p-3f));
    p = madd(p, t, splat(0x1.5a7938p-3f));
    p = madd(p, t, splat(0x1.5aba34p-3f));
    vf tail = splat(0.5f) * e * t * p;
    *density = e * splat(0x1.988454p-2f); /* 1 / sqrt(2 pi) */
    return select_positive(x, splat(1.0f) - tail, tail);
}

/* Value and derivative of one activation; `alpha` is the slope of LeakyReLU or the scale of ELU. */
INLINE vf activated(const int KIND, vf x, vf alpha, vf *slope) {
    const vf one = splat(1.0f);
    if (KIND == HANSA_RELU) {
        *slope = where_positive(x, one);
        return where_positive(x, x);
    }
    if (KIND == HANSA_LEAKY_RELU) {
        *slope = select_positive(x, one, alpha);
        return x * *slope;
    }
    if (KIND == HANSA_ELU) {
        vf below = alpha * expm1_of(x);
        *slope = select_positive(x, one, below + alpha);
        return select_positive(x, x, below);
    }
    if (KIND == HANSA_TANH) {
        vf t = tanh_of(x);
        *slope = (one - t) * (one + t);
        return t;
    }
    if (KIND == HANSA_GELU) {
        vf density, share = normal_of(x, &density);
        *slope = madd(x, density, share);
        return x * share;
    }
    vf u = x, du = one;
    if (KIND == HANSA_GELU_TANH) { /* (1 + tanh(u / 2)) / 2 is the sigmoid of u */
        const vf outer = splat(1.5957691216f), inner = splat(0.044715f); /* 2 sqrt(2 / pi) */
        vf square = x * x;
        u = outer * x * madd(inner, square, one);
        du = outer * madd(splat(3 * 0.044715f), square, one);
    }
    vf e = exp_of(zero() - u), s = one / (one + e), rest = e * s; /* rest = 1 - s, without cancellation */
    if (KIND == HANSA_SIGMOID) {
        *slope = s * rest;
        return s;
    }
    *slope = s * madd(x * du, rest, one); /* of x s(u) */
    return x * s;
}

#define ACTIVATE_ALL(KIND)                                                                                          \
    case KIND:                                                                                                      \
        for (ptrdiff_t i = 0; i < count; i += VL) {                                                                \
            vf slope, value = activated(KIND, load(x + i), number, &slope);                                         \
            store(out + i, value);                                                                                  \
            store(slopes + i, slope);                                                                               \
        }                                                                                                           \
        break;

/* `count` values, a multiple of VL, and their derivatives. */
static void activate(int64_t kind, double alpha, const float *x, float *out, float *slopes, ptrdiff_t count) {
    const vf number = splat((float)alpha);
    switch (kind) {
        ACTIVATE_ALL(HANSA_RELU)
        ACTIVATE_ALL(HANSA_LEAKY_RELU)
        ACTIVATE_ALL(HANSA_ELU)
        ACTIVATE_ALL(HANSA_SIGMOID)
        ACTIVATE_ALL(HANSA_TANH)
        ACTIVATE_ALL(HANSA_SILU)
        ACTIVATE_ALL(HANSA_GELU)
        ACTIVATE_ALL(HANSA_GELU_TANH)
    }
}

#endif
