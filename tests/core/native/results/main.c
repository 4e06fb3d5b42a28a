/* results SET FILE: the results of an instruction set ("" is the best). Ends with 3 if this machine cannot run it. */
#include "results.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

extern const hansa_kernels *hansa_kernels_for(const char *name);

static FILE *out;
static uint64_t state;

void seed(uint64_t value) { state = value; }

static uint64_t next(void) { /* splitmix64 (Steele et al. 2014) */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t below(int64_t limit) { return (int64_t)(next() >> 11) % limit; }
float uniform(void) { return (float)((int64_t)(next() >> 40) - (1 << 23)) * 0x1p-23f; }

typedef struct block {
    void *start;
    size_t bytes;
    struct block *before;
} block;

static block *blocks;

void *room(int64_t bytes) {
    const size_t page = 65536, inside = ((size_t)bytes + page - 1) / page * page + (bytes ? 0 : page);
    block *made = malloc(sizeof *made);
    if (!made) exit(4);
#if defined(_WIN32)
    DWORD old;
    char *start = VirtualAlloc(NULL, inside + page, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (!start || !VirtualProtect(start + inside, page, PAGE_NOACCESS, &old)) exit(4);
#else
    char *start = mmap(NULL, inside + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + inside, page, PROT_NONE)) exit(4);
#endif
    *made = (block){start, inside + page, blocks};
    blocks = made;
    return start + inside - bytes;
}

void free_all(void) {
    while (blocks) {
        block *last = blocks;
        blocks = last->before;
#if defined(_WIN32)
        VirtualFree(last->start, 0, MEM_RELEASE);
#else
        munmap(last->start, last->bytes);
#endif
        free(last);
    }
}

float *floats(int64_t n, float scale) {
    float *values = room(4 * n);
    for (int64_t i = 0; i < n; i++) values[i] = scale * uniform();
    return values;
}

double *doubles(int64_t n, double scale) {
    double *values = room(8 * n);
    for (int64_t i = 0; i < n; i++) values[i] = scale * (double)uniform();
    return values;
}

int64_t *numbers(int64_t n, int64_t limit) {
    int64_t *values = room(8 * n);
    for (int64_t i = 0; i < n; i++) values[i] = below(limit);
    return values;
}

static void give(const char *name, char type, int how, const void *values, int64_t n, size_t size) {
    fprintf(out, "%s|%c|%d|%lld\n", name, type, how, (long long)n);
    fwrite(values, size, (size_t)n, out);
}

void give_floats(const char *name, int how, const float *values, int64_t n) { give(name, 'f', how, values, n, 4); }
void give_doubles(const char *name, int how, const double *values, int64_t n) { give(name, 'd', how, values, n, 8); }
void give_bytes(const char *name, const void *values, int64_t bytes) { give(name, 'B', EXACT, values, bytes, 1); }

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: results SET FILE\n");
        return 2;
    }
    const hansa_kernels *kernels = hansa_kernels_for(words[1]);
    if (!kernels) return 3;
    out = fopen(words[2], "wb");
    if (!out) return 4;
    vector_results(kernels);
    network_results(kernels);
    printf("%s\n", kernels->name);
    return fclose(out) ? 4 : 0;
}
