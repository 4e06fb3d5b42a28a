/* Included by server.h once for float32 and once for float64: T, NAMED(name) and ROOT are set there. */

/* a times the sign of b, which is 0 for 0 and NaN for NaN. */
INLINE T NAMED(signed)(T a, T b) { return b > 0 ? a : b < 0 ? -a : a * b; }

/* torch.maximum: NaN on either side is the result. */
INLINE T NAMED(larger)(T a, T b) { return (a != a || a >= b) ? a : b; }

INLINE void NAMED(server_pass)(const int kind, const int inside, const hansa_rule *rule, int64_t n, const T *delta,
                               const T *m, const T *v, const T *vhat, T *step, T *m_out, T *v_out, T *vhat_out, T *x) {
    const T b1 = (T)rule->beta1, b2 = (T)rule->beta2, eps = (T)rule->eps, rate = (T)rule->rate;
    const T d1 = kind == HANSA_MOMENTUM ? (T)1 : (T)(1 - rule->beta1), d2 = (T)(1 - rule->beta2);
    const T c1 = (T)rule->correct1, c2 = (T)rule->correct2;
    INDEPENDENT for (int64_t i = 0; i < n; i++) {
        T d = delta[i], first = b1 * m[i] + d1 * d, move;
        m_out[i] = first;
        if (kind == HANSA_MOMENTUM) {
            move = first;
        } else {
            T square = d * d, old = v[i], second, under, root;
            if (kind == HANSA_ADAGRAD) second = old + square;
            else if (kind == HANSA_YOGI) second = old - d2 * NAMED(signed)(square, old - square);
            else second = b2 * old + d2 * square;
            v_out[i] = under = second;
            if (kind == HANSA_AMSGRAD || kind == HANSA_AMS) {
                under = NAMED(larger)(vhat[i], second);
                if (kind == HANSA_AMS) under = NAMED(larger)(under, eps);
                vhat_out[i] = under;
            }
            under *= c2;
            if (kind == HANSA_AMS) root = ROOT(under);
            else root = inside ? ROOT(under + eps) : ROOT(under) + eps;
            move = first * c1 / (root == 0 ? (T)1 : root); /* only if m, v and eps are 0 */
        }
        step[i] = rate * move;
    }
    if (x) INDEPENDENT for (int64_t i = 0; i < n; i++) x[i] += step[i];
}

/* The vector is processed in cuts, so that the step is in the L1 cache when it is added to x. */
static void NAMED(server)(const hansa_rule *rule, int64_t n, const T *delta, const T *m, const T *v, const T *vhat,
                          T *step, T *m_out, T *v_out, T *vhat_out, T *x) {
#define PASS(kind, inside)                                                                                          \
    NAMED(server_pass)(kind, inside, rule, some, delta + i, m + i, v ? v + i : v, vhat ? vhat + i : vhat, step + i,  \
                       m_out + i, v_out ? v_out + i : v_out, vhat_out ? vhat_out + i : vhat_out, x ? x + i : x)
#define EITHER(kind)                                                                                                \
    case kind:                                                                                                     \
        if (rule->eps_inside) PASS(kind, 1);                                                                       \
        else PASS(kind, 0);                                                                                        \
        break;
    for (int64_t i = 0, some; i < n; i += some) {
        some = at_most(2048, n - i);
        switch (rule->kind) {
            EITHER(HANSA_ADAGRAD) EITHER(HANSA_ADAM) EITHER(HANSA_YOGI) EITHER(HANSA_AMSGRAD)
        case HANSA_AMS: PASS(HANSA_AMS, 0); break;
        case HANSA_MOMENTUM: PASS(HANSA_MOMENTUM, 0); break;
        }
    }
#undef EITHER
#undef PASS
}

/* out = w_0 row_0, then out += w_i row_i in the given order. Four rows are read at a time and the next four prefetched,
 * since memory is the bottleneck. */
static void NAMED(mean)(const T *const *rows, const double *weights, int64_t count, int64_t n, T *out) {
    enum { CUT = 2048, LINE = 64 / sizeof(T) };
    for (int64_t i = 0, some; i < n; i += some) {
        some = at_most(CUT, n - i);
        T *to = out + i;
        const T w0 = (T)weights[0], *first = rows[0] + i;
        INDEPENDENT for (int64_t j = 0; j < some; j++) to[j] = first[j] * w0;
        int64_t r = 1;
        for (; r + 4 <= count; r += 4) {
            const T *a = rows[r] + i, *b = rows[r + 1] + i, *c = rows[r + 2] + i, *d = rows[r + 3] + i;
            const T wa = (T)weights[r], wb = (T)weights[r + 1], wc = (T)weights[r + 2], wd = (T)weights[r + 3];
            const T *ahead[4];
            for (int k = 0; k < 4; k++) ahead[k] = rows[r + 4 + k < count ? r + 4 + k : count - 1] + i;
            for (int64_t j = 0; j < some; j += LINE) {
                int64_t stop = at_most(some, j + LINE);
                UNROLL for (int k = 0; k < 4; k++) __builtin_prefetch(ahead[k] + j);
                INDEPENDENT for (int64_t l = j; l < stop; l++) {
                    T sum = to[l] + a[l] * wa;
                    sum += b[l] * wb;
                    sum += c[l] * wc;
                    to[l] = sum + d[l] * wd;
                }
            }
        }
        for (; r < count; r++) {
            const T *from = rows[r] + i, w = (T)weights[r];
            INDEPENDENT for (int64_t j = 0; j < some; j++) to[j] += from[j] * w;
        }
    }
}

/* X <- W X for n rows of d entries: out_i = sum of w_ij x_j over the links j of i in the given order. All rows of a cut
 * are processed before the next cut. */
static void NAMED(mix)(const T *x, const int64_t *starts, const int64_t *links, const double *weights, int64_t n,
                       int64_t d, T *out) {
    enum { CUT = 1024 };
    for (int64_t i = 0, some; i < d; i += some) {
        some = at_most(CUT, d - i);
        for (int64_t row = 0; row < n; row++) {
            T *to = out + row * d + i;
            int64_t k = starts[row], end = starts[row + 1];
            if (k == end) memset(to, 0, sizeof(T) * (size_t)some);
            for (int fresh = 1; k < end; fresh = 0) {
                const T *a = x + links[k] * d + i, wa = (T)weights[k];
                if (k + 1 == end || fresh) {
                    if (fresh) INDEPENDENT for (int64_t j = 0; j < some; j++) to[j] = a[j] * wa;
                    else INDEPENDENT for (int64_t j = 0; j < some; j++) to[j] += a[j] * wa;
                    k++;
                    continue;
                }
                const T *b = x + links[k + 1] * d + i, wb = (T)weights[k + 1];
                INDEPENDENT for (int64_t j = 0; j < some; j++) {
                    T sum = to[j] + a[j] * wa;
                    to[j] = sum + b[j] * wb;
                }
                k += 2;
            }
        }
    }
}
