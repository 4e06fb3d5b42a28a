/* The interface between Python and the kernels of the instruction sets. abi.py parses structures and constants
 * from this file: keep to plain declarations. */
#ifndef HANSA_NATIVE_H
#define HANSA_NATIVE_H

#include <stdint.h>

#if defined(_WIN32)
#define HANSA_EXPORT __declspec(dllexport)
#else
#define HANSA_EXPORT __attribute__((visibility("default")))
#endif

#define HANSA_ABI 16
#define HANSA_SUM_LANES 1024 /* of sign_pack's sum of magnitudes */

enum { HANSA_CONV = 0, HANSA_LINEAR = 1, HANSA_ACTIVATION = 2, HANSA_NORM = 3, HANSA_ADD = 4, HANSA_EMBED = 5 };
enum { HANSA_GROUP_NORM = 6, HANSA_IMAGE_ADD = 7 }; /* further stages; all but HANSA_CONV and these are on rows */
enum { HANSA_MAX = 1, HANSA_MEAN = 2, HANSA_SUM = 3 };                 /* pools */
enum { HANSA_DROP = 1, HANSA_DROP_FLAT = 2, HANSA_DROP_CHANNELS = 3 }; /* dropouts */

/* Activations; alpha is the slope of LeakyReLU below 0, or the scale of ELU. */
enum { HANSA_RELU = 1, HANSA_LEAKY_RELU = 2, HANSA_ELU = 3, HANSA_SIGMOID = 4, HANSA_TANH = 5, HANSA_SILU = 6 };
enum { HANSA_GELU = 7, HANSA_GELU_TANH = 8 };

/* One stage: on images convolution, group normalisation or addition [ReLU or activation] [pool] [dropout], or on rows of
 * values linear [ReLU] [dropout], activation [dropout], layer normalisation [dropout], addition [dropout], embedding
 * [dropout]. Stages on images come first, and only a convolution as the first of all takes the network's input. A stage
 * takes the output of stage `source`, an earlier stage on images for one on images, and for one on rows the last of these
 * or an earlier stage on rows, or with -1 the network's input; an addition adds that of stage `addend`. On rows kernel =
 * stride = padding = 0, and channels, height, width are the shape that was flattened, in torch's C, H, W order; group
 * normalisations and additions of images have kernel = stride = 1. The last stage
 * gives the logits. A pool has windows of pool_h x pool_w, step_h and step_w apart; `relu` is 2 if it follows a mean
 * pool and not the convolution, and `after_pool` is set if another activation follows the pool. Dropout has a factor per
 * value in H, W, C order, in C, H, W order of flattened values, or per channel. `weight` and `bias` are the offsets of
 * its parameters in the flat vector, -1 for none; `planar` means that convolution weights are stored as O, I, H, W and
 * not as O, H, W, I.
 *
 * An embedding is the first stage of a network whose rows are `width` tokens: the mean or the sum (`pool`) of their rows
 * of a table of `words` rows. The row `skip` has no gradient; -1 is none. */
typedef struct {
    int64_t kind, channels, height, width, out, kernel, stride, padding, relu, pool, pool_h, pool_w, step_h, step_w;
    int64_t drop, weight, bias, planar, source, addend, activation, after_pool, words, skip, groups;
    double alpha, eps;
} hansa_stage;

/* Rows of examples: float32, or uint8 with the value of each byte in `table`[channel][256], or for an embedding int64.
 * `planar` rows are stored C, H, W, others H, W, C. */
typedef struct {
    const void *values;
    const float *table;
    const int64_t *labels;
    int64_t rows, planar;
} hansa_data;

/* `steps` batches of `batch` rows; `sizes` (may be null) gives the smaller batch of each step. `keep` (null without
 * dropout) has the dropout factors: for each step, for each stage with dropout, for each row. */
typedef struct {
    const int64_t *index, *sizes;
    int64_t steps, batch;
    const float *keep;
} hansa_batches;

/* The local step y <- y - lr d, d = clipped g + weight_decay y + prox_weight (y - anchor) + shift; with a velocity,
 * velocity <- momentum velocity + d replaces d. max_grad_norm is infinity without clipping. */
typedef struct {
    float *velocity;
    const float *anchor, *shift;
    double lr, prox_weight, weight_decay, momentum, max_grad_norm;
} hansa_update;

/* One client's round: from x, `steps` steps on batches of its rows, drawn by NumPy's Philox with the given key; `delta`
 * receives y - x, and y the trained model if keep_model is set. */
typedef struct {
    const float *x;
    float *y, *delta;
    const int64_t *own;
    int64_t samples, steps, batch;
    uint64_t key[2];
    float *losses;
    int64_t done, finite, keep_model;
} hansa_client;

/* A turn of a gossiping cohort: the step of a row on `batch` examples, or an operation on all rows: X <- W X, X <- the
 * mean, the steps of combine-then-adapt, or compressed gossip of the public copies. */
enum { HANSA_MIX = -1, HANSA_AVERAGE = -2, HANSA_SETTLE = -3, HANSA_PULL = -4, HANSA_SIGNS = -5 };

typedef struct {
    int64_t row, batch; /* row: the stepping row, or one of the above */
    const int64_t *index;
} hansa_turn;

/* A cohort: its models are the rows of x. W is given by its links; rows without links do not change. If `later` is not
 * null, steps are stored there, and the next operation on all rows adds the change to x. `public_copies` are those of
 * compressed gossip, X <- X + rate (W - I) public_copies. A call ends after `seconds`, or after a non-finite step with
 * the row in `dropped`; it is called again until `done` is `count`. */
typedef struct {
    float *x, *later, *public_copies;
    int64_t *stepped; /* per row: whether it has stepped in `later`, or its signs are known */
    int64_t rows;
    const hansa_turn *turns;
    int64_t count, done, dropped;
    float *losses; /* per turn */
    float *const *velocities; /* per row, or null */
    const int64_t *starts, *links;
    const double *weights;
    double *reach;  /* per row: a bound on its entries, below 0 if unknown */
    float *scratch; /* HANSA_CUT entries per row, followed by a row's bits and one scale per row */
    double rate, seconds;
    const float *start; /* initial value of rows and public copies, or null if they are initialized */
    int64_t *begun;     /* per row: bits of what is initialized, its model and its public copy */
    const float *origin;  /* if not null, the call that ends the turns also computes `deltas` and `spread` */
    float *const *deltas; /* per row: receives x - origin, or null */
    double spread;        /* sum of the squared distances of the surviving rows to their mean */
} hansa_cohort;

#define HANSA_CUT 1024

/* The number of pairs allocated in a row's lanes: `many`, rounded up to the largest tile of any instruction set. */
#define HANSA_GRAM_ROOM(many) ((many) + 4)

/* A cohort whose clients are mostly idle: models are start + sum of weights[i] changes[places[i]] and are computed only
 * for steps. A group of turns is one with the row HANSA_GATHER and `batch` = the number of steps, followed by the
 * steps, each of which adds one change. The terms of turn t's model are starts[t] to starts[t + 1]. */
enum { HANSA_GATHER = -6 };

typedef struct {
    const float *start;
    float *models, *changes; /* models: one per step of a group */
    int64_t room, made;      /* the capacity and the number of changes */
    const hansa_turn *turns; /* row: index of the velocity */
    const int64_t *starts, *places;
    const float *weights;
    int64_t count, done, dropped;
    float *losses;
    float *const *velocities;
    double seconds;
} hansa_lazy_cohort;

typedef struct {
    double loss;
    int64_t correct;
} hansa_score;

enum { HANSA_OK = 0, HANSA_NO_MEMORY = 1, HANSA_BAD_ROW = 2, HANSA_BAD_LABEL = 3, HANSA_BAD_SIZE = 4, HANSA_BAD_SUM = 5 };
enum { HANSA_BAD_TOKEN = 6 };

/* The arguments of a server step; `kind` is one of the six. Corrections are factors: 1 / (1 - beta^t), or 1. */
enum { HANSA_MOMENTUM, HANSA_ADAGRAD, HANSA_ADAM, HANSA_YOGI, HANSA_AMSGRAD, HANSA_AMS };

typedef struct {
    int64_t kind, eps_inside;
    double beta1, beta2, eps, rate, correct1, correct2;
} hansa_rule;

typedef struct hansa_network hansa_network;

/* The kernels of one instruction set. */
typedef struct {
    const char *name;
    hansa_network *(*network_new)(const hansa_stage *, int64_t stages, int64_t batch);
    void (*network_free)(hansa_network *);
    int64_t (*train)(hansa_network *, float *y, const hansa_data *, const hansa_batches *, const hansa_update *,
                     float *losses, int64_t *done, double seconds);
    int64_t (*train_clients)(hansa_network *, const hansa_data *, const hansa_update *, hansa_client *, int64_t count,
                       int64_t *at, double seconds);
    int64_t (*run_cohort)(hansa_network *, const hansa_data *, const hansa_update *, hansa_cohort *);
    int64_t (*run_lazy_cohort)(hansa_network *, const hansa_data *, const hansa_update *, hansa_lazy_cohort *);
    void (*combine_changes)(const float *start, const float *changes, const int64_t *starts, const int64_t *places,
                    const float *weights, int64_t count, int64_t d, float *out);
    double (*squared_spread)(const float *x, const int64_t *chosen, int64_t count, int64_t d, int64_t stride,
                     const float *start, float *const *moved);
    void (*choose)(const char *keys, int64_t count, int64_t many, int64_t some, int64_t *out);
    void (*draw)(const uint64_t *keys, const int64_t *const *own, const int64_t *samples, const int64_t *lengths,
                 int64_t count, int64_t *order, int64_t *out);
    int64_t (*gradient)(hansa_network *, const float *y, const hansa_data *, const hansa_batches *, float *g,
                        float *loss);
    int64_t (*evaluate)(hansa_network *, const float *y, const hansa_data *, int64_t from, int64_t to, hansa_score *);
    int64_t (*logits)(hansa_network *, const float *y, const hansa_data *, const hansa_batches *, float *out);
    void (*server32)(const hansa_rule *, int64_t n, const float *delta, const float *m, const float *v,
                     const float *vhat, float *step, float *m_out, float *v_out, float *vhat_out, float *x);
    void (*server64)(const hansa_rule *, int64_t n, const double *delta, const double *m, const double *v,
                     const double *vhat, double *step, double *m_out, double *v_out, double *vhat_out, double *x);
    void (*mean32)(const float *const *rows, const double *weights, int64_t count, int64_t n, float *out);
    void (*mean64)(const double *const *rows, const double *weights, int64_t count, int64_t n, double *out);
    void (*mix32)(const float *x, const int64_t *starts, const int64_t *links, const double *weights, int64_t n,
                  int64_t d, float *out);
    void (*mix64)(const double *x, const int64_t *starts, const int64_t *links, const double *weights, int64_t n,
                  int64_t d, double *out);
    int64_t (*gram32)(const float *rows, int64_t count, const float *vectors, int64_t many, int64_t n, double *out);
    int64_t (*gram32_add)(const float *rows, int64_t row, int64_t count, const float *vectors, int64_t vector,
                          int64_t many, int64_t n, double *lanes);
    int64_t (*rows_add)(int64_t file, const int64_t *offsets, int64_t count, const float *vectors, int64_t vector,
                        int64_t many, int64_t n, double *lanes, uint32_t *crcs, int64_t *told); /* may be null */
    void (*gram32_sum)(double *lanes, int64_t count, int64_t many, double *out);
    void (*gram)(const float *rows, int64_t count, int64_t n, int64_t stride, double *out);
    double (*squares32)(const float *x, int64_t n, int64_t *finite);
    double (*squares64)(const double *x, int64_t n, int64_t *finite);
    void (*digest)(const uint32_t *words, int64_t count, const uint32_t *keys, uint64_t *out);
    void (*sign_pack)(const float *x, int64_t n, uint8_t *bits, double *lanes);
    void (*sign_add)(const uint8_t *const *bits, const float *scales, int64_t packets, int64_t n, int64_t fresh,
                     float *out);
    int64_t (*reaching)(const float *x, int64_t n, float threshold, int64_t room, int64_t *index, float *value);
    uint32_t (*crc32)(const uint8_t *data, int64_t size, uint32_t crc); /* may be null */
    float (*highest32)(const float *x, int64_t n);
    void (*half_pack)(const float *x, int64_t n, const float *scale, float most, int64_t brain, uint16_t *out);
    int64_t (*levels_pack)(const float *x, int64_t n, int64_t bucket, int64_t levels, int64_t width,
                           const uint64_t *key, float *norms, uint8_t *out);
    int64_t (*planes_pack)(const float *x, const int32_t *numbers, int64_t n, const float *scale, int64_t most,
                           uint8_t *out);
    int64_t (*half_check)(const uint8_t *codes, int64_t n, int64_t brain);
    void (*half_unpack)(const uint8_t *codes, int64_t n, const float *scale, int64_t brain, int64_t adds, float alpha,
                        float *out);
    int64_t (*levels_check)(const uint8_t *codes, int64_t n, int64_t levels, int64_t width);
    void (*levels_unpack)(const uint8_t *codes, int64_t n, int64_t bucket, int64_t levels, int64_t width,
                          const uint8_t *norms, int64_t adds, float alpha, float *out);
    int64_t (*planes_unpack)(const uint8_t *data, int64_t size, int64_t n, int32_t *out);
    void (*numbers_write)(const int32_t *numbers, int64_t n, const float *scale, int64_t adds, float alpha, float *out);
} hansa_kernels;

extern const hansa_kernels hansa_avx512, hansa_avx2, hansa_neon, hansa_base; /* those of this processor, and the last */

#endif
