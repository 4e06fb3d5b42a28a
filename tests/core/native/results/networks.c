/* The kernels over networks of random shapes: gradients, predictions, local training, gossip. */
#include "results.h"

enum { MOST_STAGES = 24, PLAIN = 60, NETWORKS = 100, ROWS = 23, BATCH = 7, STEPS = 3, CLIENTS = 4 };

typedef struct {
    hansa_stage stage[MOST_STAGES];
    int64_t stages, parameters, features, classes, keeps;
} net;

static int64_t parameters_at(net *made, int64_t count) {
    int64_t at = made->parameters;
    made->parameters += count;
    return at;
}

static hansa_stage *add_stage(net *made, hansa_stage stage) {
    stage.weight = stage.bias = stage.addend = -1;
    stage.source = made->stages - 1;
    made->stage[made->stages] = stage;
    return made->stage + made->stages++;
}

static void give_parameters(net *made, hansa_stage *s, int64_t each) {
    s->weight = parameters_at(made, s->out * each);
    if (below(4)) s->bias = parameters_at(made, s->out);
}

static hansa_stage *add_linear(net *made, int64_t channels, int64_t height, int64_t width, int64_t out) {
    hansa_stage linear = {.kind = HANSA_LINEAR, .channels = channels, .height = height, .width = width, .out = out};
    hansa_stage *s = add_stage(made, linear);
    give_parameters(made, s, channels * height * width);
    return s;
}

/* Linear layers of one width, activations, layer normalisations and sums with earlier stages, in any order. */
static void random_rows(net *made, int64_t channels, int64_t height, int64_t width) {
    int64_t features = 1 + below(41), first = made->stages;
    add_linear(made, channels, height, width, features);
    for (int64_t i = 0, count = 2 + below(7); i < count; i++) {
        hansa_stage *s, on = {.channels = features, .height = 1, .width = 1, .out = features};
        int64_t choice = below(8);
        if (choice < 2) {
            s = add_linear(made, features, 1, 1, features);
            s->relu = below(2);
        } else if (choice < 5) {
            on.kind = HANSA_ACTIVATION;
            on.activation = 1 + below(8);
            on.alpha = 0.3;
            s = add_stage(made, on);
        } else if (choice == 5) {
            on.kind = HANSA_NORM;
            on.eps = 0.01;
            s = add_stage(made, on);
            if (below(4)) give_parameters(made, s, 1);
        } else if (choice == 6) {
            on.kind = HANSA_ADD;
            s = add_stage(made, on);
            s->addend = first + below(made->stages - 1 - first);
        } else { /* a sum with a linear layer of an earlier stage */
            int64_t last = made->stages - 1, earlier = first + below(made->stages - first);
            add_linear(made, features, 1, 1, features)->source = earlier;
            on.kind = HANSA_ADD;
            s = add_stage(made, on);
            s->addend = last;
            i++;
        }
        if (!below(6)) s->drop = HANSA_DROP, made->keeps += s->out;
    }
    made->classes = 2 + below(11);
    add_linear(made, features, 1, 1, made->classes);
    if (below(2)) return;
    hansa_stage on = {.kind = HANSA_ACTIVATION, .channels = made->classes, .height = 1, .width = 1,
                      .out = made->classes, .activation = HANSA_SIGMOID};
    add_stage(made, on);
}

/* What follows a stage on images: an activation, a pool, dropout. */
static void random_tail(net *made, hansa_stage *s, int64_t *height, int64_t *width, int last) {
    s->relu = below(2);
    if (!s->relu && below(2)) s->activation = 1 + below(8), s->alpha = 0.3;
    if (last && below(2)) {
        s->pool = below(2) ? HANSA_MEAN : HANSA_MAX;
        s->pool_h = s->pool_w = 2;
        s->step_h = s->step_w = 1 + below(2);
        if (s->relu && s->pool == HANSA_MEAN) s->relu = 1 + below(2);
        s->after_pool = s->activation && below(2);
        *height = (*height - 2) / s->step_h + 1;
        *width = (*width - 2) / s->step_w + 1;
    }
    s->drop = below(5) ? 0 : below(2) ? HANSA_DROP_CHANNELS : HANSA_DROP;
    if (s->drop) made->keeps += s->out * (s->drop == HANSA_DROP_CHANNELS ? 1 : *height * *width);
}

static hansa_stage *add_convolution(net *made, int64_t channels, int64_t height, int64_t width, int64_t out) {
    int64_t kernel = 1 + 2 * below(3);
    hansa_stage conv = {.kind = HANSA_CONV, .channels = channels, .height = height, .width = width, .out = out,
                        .kernel = kernel, .stride = 1, .padding = kernel / 2, .planar = below(2)};
    hansa_stage *s = add_stage(made, conv);
    give_parameters(made, s, kernel * kernel * channels);
    return s;
}

/* A convolution, then convolutions, group normalisations and sums of one shape, each of any earlier image; stages that
 * nothing takes have no gradient. */
static void random_images(net *made, int64_t channels, int64_t height, int64_t width) {
    int64_t features = 1 + below(20), count = 2 + below(5);
    hansa_stage *s = add_convolution(made, channels, height, width, features);
    random_tail(made, s, &height, &width, 0);
    for (int64_t i = 0; i < count; i++) {
        hansa_stage on = {.kind = HANSA_IMAGE_ADD, .channels = features, .height = height, .width = width,
                          .out = features, .kernel = 1, .stride = 1, .groups = 1};
        int64_t choice = below(3), earlier = below(made->stages);
        if (choice == 0) {
            s = add_convolution(made, features, height, width, features);
            if (below(3) == 0) s->source = earlier;
        } else if (choice == 1) {
            on.kind = HANSA_GROUP_NORM;
            on.groups = features % 2 ? 1 + below(2) * (features - 1) : 2;
            on.eps = 0.01;
            s = add_stage(made, on);
            if (below(4)) give_parameters(made, s, 1);
        } else {
            s = add_stage(made, on);
            s->addend = earlier;
        }
        random_tail(made, s, &height, &width, i + 1 == count);
    }
    random_rows(made, features, height, width);
}

static void random_embedding(net *made) {
    hansa_stage embed = {.kind = HANSA_EMBED, .channels = 1, .height = 1, .width = 1 + below(9), .out = 1 + below(41),
                         .pool = below(2) ? HANSA_MEAN : HANSA_SUM, .words = 1 + below(30)};
    hansa_stage *s = add_stage(made, embed);
    s->weight = parameters_at(made, s->words * s->out);
    s->skip = below(s->words + 1) - 1;
    made->features = s->width;
    random_rows(made, s->out, 1, 1);
}

/* One or two convolutions, or none, or an embedding; then one or two linear layers, or, from PLAIN on, other stages on rows. */
static net random_net(int64_t number) {
    net made = {0};
    int64_t channels = number % 3 == 0 ? 3 : 1 + below(4), height = 7 + below(7), width = 7 + below(7);
    int64_t convolutions = number % 4 ? 1 + below(2) : 0;
    made.features = channels * height * width;
    if (number >= PLAIN && number % 8 == 0) {
        random_embedding(&made);
        return made;
    }
    if (number >= PLAIN && number % 3 == 0) {
        random_images(&made, channels, height, width);
        return made;
    }
    for (int64_t i = 0; i < convolutions; i++) {
        hansa_stage *s = made.stage + made.stages++;
        int64_t kernel = 1 + 2 * below(3), most = height < width ? height : width;
        if (kernel > most) kernel = 1;
        *s = (hansa_stage){.kind = HANSA_CONV, .channels = channels, .height = height, .width = width,
                           .out = 1 + below(i ? 19 : 37), .kernel = kernel, .stride = number % 5 ? 1 : 1 + below(3),
                           .padding = below(kernel / 2 + 1), .planar = below(2), .weight = -1, .bias = -1,
                           .source = i - 1, .addend = -1};
        s->weight = parameters_at(&made, s->out * kernel * kernel * channels);
        if (below(4)) s->bias = parameters_at(&made, s->out);
        height = (height + 2 * s->padding - kernel) / s->stride + 1;
        width = (width + 2 * s->padding - kernel) / s->stride + 1;
        s->relu = below(3) > 0;
        int64_t pool = below(4);
        if (pool && height >= 3 && width >= 3) {
            s->pool = pool == 3 ? HANSA_MEAN : HANSA_MAX;
            s->pool_h = s->pool_w = s->step_h = s->step_w = 2;
            if (pool == 2) s->pool_h = 3, s->step_w = 1;
            if (pool == 3 && s->relu) s->relu = 1 + below(2);
            height = (height - s->pool_h) / s->step_h + 1;
            width = (width - s->pool_w) / s->step_w + 1;
        }
        if (number >= PLAIN && below(2)) {
            s->relu = 0;
            s->activation = 1 + below(8);
            s->alpha = 0.3;
            s->after_pool = s->pool && below(2);
        }
        s->drop = below(3) ? 0 : below(2) ? HANSA_DROP_CHANNELS : i + 1 < convolutions ? HANSA_DROP : HANSA_DROP_FLAT;
        if (s->drop) made.keeps += s->out * (s->drop == HANSA_DROP_CHANNELS ? 1 : height * width);
        channels = s->out;
    }
    if (number >= PLAIN) {
        random_rows(&made, channels, height, width);
        return made;
    }
    for (int64_t i = 0, linear = 1 + below(2); i < linear; i++) {
        int64_t out = i + 1 < linear ? 1 + below(41) : 2 + below(11);
        hansa_stage *s = add_linear(&made, channels, height, width, out);
        s->relu = i + 1 < linear;
        if (i + 1 < linear && below(2)) s->drop = HANSA_DROP, made.keeps += s->out;
        channels = made.classes = s->out;
        height = width = 1;
    }
    return made;
}

static float *random_model(const net *made) {
    float *y = floats(made->parameters, 1);
    for (int64_t i = 0; i < made->stages; i++) {
        const hansa_stage *s = made->stage + i;
        int64_t fan = s->channels * (s->kind == HANSA_CONV ? s->kernel * s->kernel : s->height * s->width);
        if (s->kind != HANSA_CONV && s->kind != HANSA_LINEAR) continue;
        for (int64_t j = 0; j < s->out * fan; j++) y[s->weight + j] *= sqrtf(3.0f / (float)fan);
    }
    return y;
}

/* Small whole numbers, so that sums are exact and pools have many equal maxima, of which the first counts. */
static int with_ties(int64_t number) { return number % 4 == 1 && number < PLAIN; }

static float *model_of(const net *made, int64_t number) {
    float *y = random_model(made);
    for (int64_t i = 0; with_ties(number) && i < made->stages; i++) {
        const hansa_stage *s = made->stage + i;
        int conv = s->kind == HANSA_CONV;
        int64_t fan = s->channels * (conv ? s->kernel * s->kernel : s->height * s->width);
        for (int64_t j = 0; j < s->out * fan; j++) y[s->weight + j] = (float)(below(3) - 1) * (conv ? 1 : 0x1p-7f);
        for (int64_t j = 0; s->bias >= 0 && j < s->out; j++) y[s->bias + j] = 0;
    }
    return y;
}

static hansa_data random_data(const net *made, int64_t number) {
    hansa_data data = {.labels = numbers(ROWS, made->classes), .rows = ROWS, .planar = below(2)};
    if (made->stage->kind == HANSA_EMBED) {
        data.values = numbers(ROWS * made->features, made->stage->words);
    } else if (number % 3) {
        float *values = floats(ROWS * made->features, 1);
        for (int64_t i = 0; with_ties(number) && i < ROWS * made->features; i++) values[i] = (float)below(3);
        data.values = values;
    } else {
        uint8_t *bytes = room(ROWS * made->features);
        for (int64_t i = 0; i < ROWS * made->features; i++) bytes[i] = (uint8_t)below(256);
        data.values = bytes;
        float *table = floats(256 * made->stage->channels, 1);
        for (int64_t i = 0; with_ties(number) && i < 256 * made->stage->channels; i++) table[i] = (float)below(3);
        data.table = table;
    }
    return data;
}

static void refuse(int64_t code) {
    if (code) exit(7);
}

static void train(const hansa_kernels *k, hansa_network *network, const net *made, const hansa_data *data, int64_t number) {
    float *y = model_of(made, number), losses[STEPS];
    int64_t sizes[STEPS] = {BATCH, 1 + below(BATCH), BATCH}, done = 0;
    float *keep = floats(STEPS * BATCH * made->keeps, 1);
    for (int64_t i = 0; i < STEPS * BATCH * made->keeps; i++) keep[i] = below(3) ? 1.5f : 0;
    hansa_batches batches = {numbers(STEPS * BATCH, ROWS), sizes, STEPS, BATCH, made->keeps ? keep : NULL};
    hansa_update update = {.lr = 0.05, .max_grad_norm = number % 2 ? 0.5 : (double)INFINITY, .weight_decay = 0.01};
    if (number % 2) update.velocity = floats(made->parameters, 0), update.momentum = 0.9;
    if (number % 3 == 0) update.anchor = floats(made->parameters, 1), update.prox_weight = 0.1;
    if (number % 3 == 1) update.shift = floats(made->parameters, 0.1f);
    refuse(k->train(network, y, data, &batches, &update, losses, &done, 1e9));
    give_floats("train losses", TRAINED, losses, STEPS);
    give_floats("train", TRAINED, y, made->parameters);
}

static void clients(const hansa_kernels *k, hansa_network *network, const net *made, const hansa_data *data) {
    hansa_update update = {.lr = 0.05, .max_grad_norm = (double)INFINITY};
    hansa_client all[2] = {{0}};
    float *x = random_model(made);
    int64_t at = 0;
    for (int64_t c = 0; c < 2; c++)
        all[c] = (hansa_client){.x = x, .y = floats(made->parameters, 0), .delta = floats(made->parameters, 0),
                                .own = numbers(9 + c, ROWS), .samples = 9 + c, .steps = 3, .batch = 4, .key = {5, 6},
                                .losses = floats(3, 0), .keep_model = c};
    refuse(k->train_clients(network, data, &update, all, 2, &at, 1e9));
    for (int64_t c = 0; c < 2; c++) {
        give_floats("train_clients", TRAINED, all[c].delta, made->parameters);
        give_floats("train_clients losses", TRAINED, all[c].losses, 3);
    }
    give_floats("train_clients model", TRAINED, all[1].y, made->parameters);
}

/* Steps of all rows and an operation on all of them, on a complete graph, a ring or a star. */
static void cohort(const hansa_kernels *k, hansa_network *network, const net *made, const hansa_data *data, int64_t operation) {
    enum { COUNT = CLIENTS + 1 };
    int64_t d = made->parameters, starts[CLIENTS + 1] = {0}, *links = numbers(CLIENTS * CLIENTS, 1), made_links = 0;
    int64_t graph = below(3), *stepped = numbers(CLIENTS, 1), *begun = numbers(CLIENTS, 1);
    double *weights = doubles(CLIENTS * CLIENTS, 0), *reach = doubles(CLIENTS, 0);
    for (int64_t row = 0; row < CLIENTS; row++) {
        for (int64_t other = 0; other < CLIENTS; other++) {
            int near = other == row || (other + 1) % CLIENTS == row || (row + 1) % CLIENTS == other;
            int linked = other == row || !other || !row;
            if (graph && !(graph == 1 ? near : linked)) continue;
            links[made_links] = other;
            weights[made_links++] = graph == 1 ? 1.0 / 3 : 1.0 / CLIENTS;
        }
        starts[row + 1] = made_links;
        reach[row] = -1;
    }
    hansa_turn turns[COUNT];
    for (int64_t t = 0; t < CLIENTS; t++) turns[t] = (hansa_turn){t, BATCH, numbers(BATCH, ROWS)};
    turns[CLIENTS] = (hansa_turn){operation, 0, NULL};
    hansa_update update = {.lr = 0.05, .max_grad_norm = (double)INFINITY};
    int64_t bits = (d + 511) / 512 * 64;
    hansa_cohort c = {.x = floats(CLIENTS * d, 0), .stepped = stepped, .rows = CLIENTS, .turns = turns, .count = COUNT,
                      .dropped = -1, .losses = floats(COUNT, 0), .starts = starts, .links = links, .weights = weights,
                      .reach = reach, .scratch = floats(CLIENTS * HANSA_CUT + CLIENTS + CLIENTS * bits / 4, 0),
                      .rate = 0.5, .seconds = 1e9, .start = random_model(made), .begun = begun};
    if (operation == HANSA_SETTLE) c.later = floats(CLIENTS * d, 0);
    if (operation == HANSA_PULL || operation == HANSA_SIGNS) c.public_copies = floats(CLIENTS * d, 0);
    float *deltas[CLIENTS] = {floats(d, 0)}; /* of the first row */
    if (operation != HANSA_PULL) {
        c.origin = c.start;
        c.deltas = deltas;
    }
    refuse(k->run_cohort(network, data, &update, &c));
    if (c.done != COUNT || c.dropped != -1) exit(7);
    give_floats("run_cohort losses", TRAINED, c.losses, CLIENTS);
    /* the sign of a change near 0 depends on rounding, and each flips a whole scale: compared by its sums */
    if (operation == HANSA_SIGNS) {
        double sums[CLIENTS] = {0};
        for (int64_t i = 0; i < CLIENTS * d; i++) sums[i / d] += (double)c.x[i] * (double)c.x[i];
        give_doubles("run_cohort signs", TRAINED, sums, CLIENTS);
    } else {
        give_floats("run_cohort", TRAINED, c.x, CLIENTS * d);
        if (c.origin) give_floats("run_cohort deltas", TRAINED, deltas[0], d);
        if (c.origin) give_doubles("run_cohort spread", TRAINED, &c.spread, 1);
    }
}

static void lazy_cohort(const hansa_kernels *k, hansa_network *network, const net *made, const hansa_data *data) {
    enum { COUNT = 6 };
    int64_t d = made->parameters, *places = numbers(8, 2), starts[COUNT + 1] = {0, 0, 0, 0, 0, 3, 5};
    float *models = floats(2 * d, 0), *changes = floats(6 * d, 0), *weights = floats(8, 0.5f);
    hansa_turn turns[COUNT] = {{HANSA_GATHER, 2, NULL}, {0, BATCH, numbers(BATCH, ROWS)}, {1, 3, numbers(3, ROWS)},
                               {HANSA_GATHER, 2, NULL}, {2, BATCH, numbers(BATCH, ROWS)}, {0, BATCH, numbers(BATCH, ROWS)}};
    hansa_update update = {.lr = 0.05, .max_grad_norm = (double)INFINITY};
    hansa_lazy_cohort lazy = {.start = random_model(made), .models = models, .changes = changes, .room = 6,
                              .turns = turns, .starts = starts, .places = places, .weights = weights, .count = COUNT,
                              .dropped = -1, .losses = floats(COUNT, 0), .seconds = 1e9};
    refuse(k->run_lazy_cohort(network, data, &update, &lazy));
    if (lazy.made != 4 || lazy.dropped != -1) exit(7);
    give_floats("run_lazy_cohort", TRAINED, changes, 4 * d);
}

void network_results(const hansa_kernels *k) {
    for (int64_t number = 0; number < NETWORKS; number++, free_all()) {
        seed(1000 + (uint64_t)number);
        net made = random_net(number);
        hansa_network *network = k->network_new(made.stage, made.stages, BATCH);
        hansa_data data = random_data(&made, number);
        hansa_batches batches = {numbers(2 * BATCH, ROWS), NULL, 2, BATCH, NULL};
        float *y = model_of(&made, number), *g = floats(made.parameters, 0), *out = floats(2 * BATCH * made.classes, 0), loss;
        hansa_score score;
        if (!network) exit(4);
        refuse(k->logits(network, y, &data, &batches, out));
        give_floats("logits", CLOSE, out, 2 * BATCH * made.classes);
        batches.steps = 1;
        refuse(k->gradient(network, y, &data, &batches, g, &loss));
        give_floats("gradient loss", CLOSE, &loss, 1);
        give_floats("gradient", TRAINED, g, made.parameters);
        refuse(k->evaluate(network, y, &data, 2, ROWS, &score));
        give_doubles("evaluate", CLOSE, (double[]){score.loss, (double)score.correct}, 2);
        train(k, network, &made, &data, number);
        if (!made.keeps) {
            clients(k, network, &made, &data);
            for (int64_t operation = HANSA_SIGNS; operation <= HANSA_MIX; operation++)
                cohort(k, network, &made, &data, operation);
            lazy_cohort(k, network, &made, &data);
        }
        batches.index = (const int64_t[]){ROWS};
        batches.batch = 1;
        if (k->gradient(network, y, &data, &batches, g, &loss) != HANSA_BAD_ROW) exit(7);
        if (made.stage->kind == HANSA_EMBED) {
            batches.index = (const int64_t[]){ROWS - 1};
            ((int64_t *)data.values)[ROWS * made.features - 1] = made.stage->words;
            if (k->gradient(network, y, &data, &batches, g, &loss) != HANSA_BAD_TOKEN) exit(7);
            if (k->evaluate(network, y, &data, 0, ROWS, &score) != HANSA_BAD_TOKEN) exit(7);
        }
        k->network_free(network);
    }
}
