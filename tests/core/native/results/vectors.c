/* The kernels over vectors: servers, means, inner products, compressors, checksums and draws. */
#include "results.h"

#define EACH_LENGTH(n)                                                                                              \
    for (size_t at = 0; at < sizeof LENGTHS / sizeof *LENGTHS; at++)                                                \
        for (int64_t n = LENGTHS[at][0]; n <= LENGTHS[at][1]; n++, free_all())

/* Every remainder of every vector width and tile, around the cuts of 1024 and 2048, and a longer one. */
static const int64_t LENGTHS[][2] = {{1, 70}, {127, 130}, {1021, 1028}, {2047, 2050}, {5003, 5003}};

static void servers(const hansa_kernels *k) {
    EACH_LENGTH(n) {
        seed(100 + (uint64_t)n);
        for (int64_t kind = 0; kind < 12; kind++) {
            hansa_rule rule = {kind / 2, kind % 2, 0.9, 0.99, 1e-3, 0.5, 1.25, 1.5};
            float *delta = floats(n, 1), *m = floats(n, 1), *v = floats(n, 1), *vhat = floats(n, 1), *x = floats(n, 1);
            double *delta64 = doubles(n, 1), *m64 = doubles(n, 1), *v64 = doubles(n, 1), *vhat64 = doubles(n, 1);
            double *step64 = doubles(n, 1), *x64 = doubles(n, 1);
            float *step = floats(n, 1), *m_out = floats(n, 1), *v_out = floats(n, 1), *vhat_out = floats(n, 1);
            for (int64_t i = 0; i < n; i++) {
                v[i] = fabsf(v[i]), vhat[i] = fabsf(vhat[i]), v64[i] = fabs(v64[i]), vhat64[i] = fabs(vhat64[i]);
                if (below(16) == 0) delta[i] = 0;
            }
            int more = rule.kind != HANSA_MOMENTUM, most = rule.kind >= HANSA_AMSGRAD;
            k->server32(&rule, n, delta, m, more ? v : NULL, most ? vhat : NULL, step, m_out, more ? v_out : NULL,
                        most ? vhat_out : NULL, kind % 3 ? x : NULL);
            give_floats("server32 step", CLOSE, step, n);
            give_floats("server32 m", CLOSE, m_out, n);
            if (more) give_floats("server32 v", CLOSE, v_out, n);
            if (most) give_floats("server32 vhat", CLOSE, vhat_out, n);
            give_floats("server32 x", CLOSE, x, n);
            k->server64(&rule, n, delta64, m64, more ? v64 : NULL, most ? vhat64 : NULL, step64, m64,
                        more ? v64 : NULL, most ? vhat64 : NULL, x64);
            give_doubles("server64 step", CLOSE, step64, n);
            give_doubles("server64 x", CLOSE, x64, n);
        }
    }
}

static void means(const hansa_kernels *k) {
    EACH_LENGTH(n) {
        seed(200 + (uint64_t)n);
        for (int64_t count = 1; count <= 9; count += n > 70 ? 4 : 1) {
            const float *rows[9];
            const double *rows64[9];
            double *weights = doubles(count, 1), *out64 = doubles(n, 1);
            float *out = floats(n, 1);
            for (int64_t r = 0; r < count; r++) rows[r] = floats(n, 1), rows64[r] = doubles(n, 1);
            k->mean32(rows, weights, count, n, out);
            give_floats("mean32", CLOSE, out, n);
            k->mean64(rows64, weights, count, n, out64);
            give_doubles("mean64", CLOSE, out64, n);
        }
        enum { ROWS = 5 };
        int64_t *starts = numbers(ROWS + 1, 1), *links = numbers(ROWS * 6, ROWS);
        double *weights = doubles(ROWS * 6, 1), *x64 = doubles(ROWS * n, 1), *out64 = doubles(ROWS * n, 1);
        float *x = floats(ROWS * n, 1), *out = floats(ROWS * n, 1);
        for (int64_t r = 0; r < ROWS; r++) starts[r + 1] = starts[r] + 1 + below(6);
        k->mix32(x, starts, links, weights, ROWS, n, out);
        give_floats("mix32", CLOSE, out, ROWS * n);
        k->mix64(x64, starts, links, weights, ROWS, n, out64);
        give_doubles("mix64", CLOSE, out64, ROWS * n);
    }
}

static uint32_t crc_by_bits(const uint8_t *data, int64_t size, uint32_t crc) {
    for (crc = ~crc; size > 0; data++, size--) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static void products(const hansa_kernels *k) {
    EACH_LENGTH(n) {
        seed(300 + (uint64_t)n);
        for (int64_t count = 1; count <= 7; count += n > 70 ? 3 : 1) {
            int64_t many = 1 + below(7), wide = count * HANSA_GRAM_ROOM(many) * 8, part = n / 16 * 8;
            float *rows = floats(count * n, 1), *vectors = floats(many * n, 1);
            double *out = doubles(count * many, 1), *lanes = doubles(wide, 0);
            if (k->gram32(rows, count, vectors, many, n, out)) exit(5);
            give_doubles("gram32", EXACT, out, count * many);
            if (k->gram32_add(rows, n, count, vectors, n, many, part, lanes)) exit(5);
            if (k->gram32_add(rows + part, n, count, vectors + part, n, many, n - part, lanes)) exit(5);
            k->gram32_sum(lanes, count, many, out);
            give_doubles("gram32_add", EXACT, out, count * many);
            double *pairs = doubles(count * count, 1);
            k->gram(rows, count, n, n, pairs);
            give_doubles("gram", CLOSE, pairs, count * count);

            FILE *file = tmpfile();
            int64_t *offsets = numbers(count, 1), told[2] = {-1, -1};
            uint32_t *crcs = room(4 * count);
            double *again = doubles(wide, 0);
            if (!file) exit(4);
            memset(crcs, 0, 4 * (size_t)count);
            for (int64_t r = 0; r < count; r++) offsets[r] = 12 + 4 * r * n;
            fwrite("twelve bytes", 1, 12, file);
            fwrite(rows, 4, (size_t)(count * n), file);
            fflush(file);
            if (k->rows_add) {
                if (k->rows_add(fileno(file), offsets, count, vectors, n, many, n, again, crcs, told)) exit(5);
                k->gram32_sum(again, count, many, out);
                give_bytes("rows_add checksums", crcs, 4 * count);
                int64_t short_file = k->rows_add(fileno(file), offsets, count, vectors, n, many, n + 1, again, crcs, told);
                if (short_file != HANSA_BAD_ROW || told[0] != count - 1 || told[1] != 4 * n) exit(6);
            } else {
                for (int64_t r = 0; r < count; r++) crcs[r] = crc_by_bits((const uint8_t *)(rows + r * n), 4 * n, 0);
                give_bytes("rows_add checksums", crcs, 4 * count);
            }
            give_doubles("rows_add", EXACT, out, count * many);
            fclose(file);
        }
        double *x64 = doubles(n, 1), sums[2];
        float *x = floats(n, 1);
        int64_t finite[2] = {-1, -1};
        sums[0] = k->squares32(x, n, finite);
        sums[1] = k->squares64(x64, n, finite + 1);
        give_doubles("squares32", EXACT, sums, 1);
        give_doubles("squares64", CLOSE, sums + 1, 1);
        x[below(n)] = (float)NAN, x64[below(n)] = (double)-INFINITY;
        k->squares32(x, n, finite);
        k->squares64(x64, n, finite + 1);
        give_bytes("squares finite", finite, sizeof finite);
        float top = k->highest32(x, n);
        give_bytes("highest32 of NaN", (uint8_t[]){top != top}, 1);
    }
}

static void spreads(const hansa_kernels *k) {
    EACH_LENGTH(n) {
        seed(400 + (uint64_t)n);
        for (int64_t count = 1; count <= 19; count += 6) {
            int64_t stride = n + below(9), all = count + 3, *chosen = numbers(count, all);
            float *x = floats(all * stride, 1), *start = floats(stride, 1), *moved[19];
            for (int64_t r = 0; r < count; r++) moved[r] = below(3) ? floats(stride, 1) : NULL;
            double spread = k->squared_spread(x, chosen, count, n, stride, start, moved);
            give_doubles("squared_spread", CLOSE, &spread, 1);
            for (int64_t r = 0; r < count; r++)
                if (moved[r]) give_floats("squared_spread moved", EXACT, moved[r], stride);
        }
        int64_t starts[4] = {0, 2, 2, 7}, *places = numbers(7, 5);
        float *start = floats(n, 1), *changes = floats(5 * n, 1), *weights = floats(7, 1), *out = floats(3 * n, 1);
        k->combine_changes(start, changes, starts, places, weights, 3, n, out);
        give_floats("combine_changes", CLOSE, out, 3 * n);
    }
}

/* Values that compressors meet: many zeros of both signs, a wide range of sizes, tiny ones. */
static float *wire_values(int64_t n) {
    float *x = floats(n, 1);
    for (int64_t i = 0; i < n; i++) {
        int64_t kind = below(16);
        if (kind == 0) x[i] = 0;
        if (kind == 1) x[i] = -0.0f;
        if (kind == 2) x[i] *= 0x1p-130f;
        if (kind >= 12) x[i] = ldexpf(x[i], -(int)below(30));
    }
    return x;
}

static void wires(const hansa_kernels *k, int64_t n) {
    seed(500 + (uint64_t)n);
    float *x = wire_values(n), threshold = ldexpf(1, -(int)below(20)), *value = floats(n, 0), top = k->highest32(x, n);
    uint8_t *bits = room((n + 7) / 8);
    double *lanes = doubles(HANSA_SUM_LANES, 0);
    k->sign_pack(x, n, bits, lanes);
    give_bytes("sign_pack", bits, (n + 7) / 8);
    give_doubles("sign_pack sums", EXACT, lanes, HANSA_SUM_LANES);
    give_floats("highest32", EXACT, &top, 1);
    for (int64_t packets = 1; packets <= 3; packets++) {
        const uint8_t *all[3];
        float *scales = floats(packets, 1), *out = floats(n, 1);
        for (int64_t p = 0; p < packets; p++) {
            uint8_t *more = room((n + 7) / 8);
            for (int64_t i = 0; i < (n + 7) / 8; i++) more[i] = (uint8_t)below(256);
            all[p] = more;
        }
        k->sign_add(all, scales, packets, n, packets % 2, out);
        give_bytes("sign_add", out, 4 * n);
    }
    for (int64_t have = 0; have < 2; have++) {
        int64_t fits = have ? n : n / 3, *index = numbers(fits, 1);
        int64_t found = k->reaching(x, n, threshold, fits, index, value);
        give_bytes("reaching", &found, sizeof found);
        found = found < fits ? found : fits;
        give_bytes("reaching index", index, 8 * found);
        give_bytes("reaching value", value, 4 * found);
    }
    for (int64_t brain = 0; brain < 2; brain++) {
        float scale[2] = {0.75f, 1.25f};
        uint16_t *out = room(2 * n);
        k->half_pack(x, n, scale, 0.99f, brain, out);
        give_bytes(brain ? "half_pack bfloat16" : "half_pack float16", out, 2 * n);
        const uint8_t *codes = (const uint8_t *)out;
        for (int64_t adds = 0; adds < 2; adds++) {
            float *back = floats(n, 1);
            k->half_unpack(codes, n, scale, brain, adds, -0.3f, back);
            give_bytes("half_unpack", back, 4 * n);
        }
        int64_t fine[2] = {k->half_check(codes, n, brain), 0};
        out[below(n)] = brain ? 0xbf80 : 0xbc00; /* -1 */
        fine[1] = k->half_check(codes, n, brain);
        if (fine[0] != 1 || fine[1] != 0) exit(6);
    }
    for (int64_t width = 2; width <= 8; width++) {
        uint64_t key[2] = {(uint64_t)n, (uint64_t)width};
        int64_t bucket = width % 2 ? n : 8 * (1 + below(20)), levels = (1 << (width - 1)) - 1;
        int64_t size = (n * width + 7) / 8;
        float *norms = floats((n + bucket - 1) / bucket, 0);
        uint8_t *out = room(size + 8 + (n + bucket - 1) / bucket);
        if (k->levels_pack(x, n, bucket, levels, width, width % 3 ? key : NULL, norms, out) != 1) exit(5);
        give_bytes("levels_pack", out, size);
        give_bytes("levels_pack norms", norms, 4 * ((n + bucket - 1) / bucket));
        uint8_t *codes = memcpy(room(size), out, (size_t)size);
        for (int64_t adds = 0; adds < 2; adds++) {
            float *back = floats(n, 1);
            k->levels_unpack(codes, n, bucket, levels, width, (const uint8_t *)norms, adds, -0.3f, back);
            give_bytes("levels_unpack", back, 4 * n);
        }
        if (k->levels_check(codes, n, levels, width) != 1) exit(6);
        codes[0] = 0xff; /* above 2 levels */
        if (k->levels_check(codes, n, levels, width) != 0) exit(6);
    }
    for (int64_t most = 1; most < 1 << 23; most = most * 9 + 2) {
        float scale[2] = {(float)most, 0.7f};
        int32_t *given = room(4 * n);
        uint8_t *out = room(16 * n + 4096);
        for (int64_t i = 0; i < n; i++) given[i] = (int32_t)(x[i] * (float)most);
        int64_t size = k->planes_pack(x, NULL, n, scale, most, out);
        give_bytes("planes_pack", out, size);
        size = k->planes_pack(NULL, given, n, NULL, most, out);
        give_bytes("planes_pack numbers", out, size);
        uint8_t *code = memcpy(room(size), out, (size_t)size);
        int32_t *back = room(4 * n);
        if (k->planes_unpack(code, size, n, back) || memcmp(back, given, 4 * (size_t)n)) exit(6);
        if (!k->planes_unpack(code, size - 1, n, back)) exit(6); /* its last byte is missing */
        for (int64_t adds = 0; adds < 2; adds++) {
            float *written = floats(n, 1);
            k->numbers_write(given, n, scale, adds, -0.3f, written);
            give_bytes("numbers_write", written, 4 * n);
        }
    }
}

static void words(const hansa_kernels *k, int64_t n) {
    seed(600 + (uint64_t)n);
    uint32_t *many = room(4 * n), *keys = room(4 * 4100);
    uint64_t *out = room(16 * ((n + 4095) / 4096));
    for (int64_t i = 0; i < n; i++) many[i] = (uint32_t)below((int64_t)1 << 32);
    for (int64_t i = 0; i < 4100; i++) keys[i] = (uint32_t)below((int64_t)1 << 32);
    k->digest(many, n, keys, out);
    give_bytes("digest", out, 16 * ((n + 4095) / 4096));
    for (int64_t from = 0; from < 8; from++) { /* 64 bytes or more, a multiple of 16, from any place */
        int64_t size = (4 * n - from) / 16 * 16;
        const uint8_t *data = (const uint8_t *)many + from;
        if (size < 64) break;
        uint32_t crc = k->crc32 ? k->crc32(data, size, 7) : crc_by_bits(data, size, 7);
        give_bytes("crc32", &crc, sizeof crc);
    }
}

static void draws(const hansa_kernels *k) {
    for (int64_t most = 1; most <= 300; most += 1 + most / 4, free_all()) {
        seed(700 + (uint64_t)most);
        uint64_t keys[4] = {3, (uint64_t)most, 4, (uint64_t)most};
        char bytes[32];
        int64_t samples[2] = {most, (most + 1) / 2}, lengths[2] = {1 + below(3 * most), 1 + below(most)}, some = 1 + below(most);
        int64_t *own[2] = {numbers(most, 1000), NULL}, *order = numbers(most, 1), length = lengths[0] + lengths[1];
        int64_t *out = numbers(length, 1), *chosen = numbers(2 * some, 1);
        memcpy(bytes, keys, sizeof bytes);
        k->draw(keys, most % 2 ? (const int64_t *const *)own : NULL, samples, lengths, 2, order, out);
        give_bytes("draw", out, 8 * length);
        k->choose(bytes, 2, most, some, chosen);
        give_bytes("choose", chosen, 16 * some);
    }
}

void vector_results(const hansa_kernels *k) {
    servers(k);
    means(k);
    products(k);
    spreads(k);
    EACH_LENGTH(n) wires(k, n);
    wires(k, 70001); /* more than one block of the sums and of the planes */
    free_all();
    EACH_LENGTH(n) words(k, n);
    words(k, 9001);
    free_all();
    draws(k);
}
