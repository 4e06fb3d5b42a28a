/* The exports of the library: the choice of instruction set, and each kernel by name. */
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "native.h"

#if defined(__x86_64__)
/* By the processor's own words: not all compilers' libraries can be asked by name. Registers wider than 128 bits also
 * need an operating system that saves them (XCR0). */
static unsigned saved_registers(void) {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has(const hansa_kernels *kernels) {
    const unsigned fma = 1u << 12, popcnt = 1u << 23, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29, pclmul = 1u << 1;
    const unsigned first = fma | popcnt | osxsave | avx | f16c | pclmul, avx2 = 1u << 5, bmi = 1u << 3, bmi2 = 1u << 8;
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* AVX-512: F, DQ, BW, VL */
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first || (saved_registers() & 0x06) != 0x06) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & (avx2 | bmi | bmi2)) != (avx2 | bmi | bmi2)) return 0;
#if defined(__APPLE__) /* saves the widest registers from their first use on, and sets their bits then */
    const unsigned saved = 0xe0;
#else
    const unsigned saved = saved_registers() & 0xe0;
#endif
    return kernels == &hansa_avx2 || ((b & wide) == wide && saved == 0xe0);
}
#elif defined(__aarch64__)
static int has(const hansa_kernels *kernels) {
#if defined(__linux__)
    const unsigned long crc32 = 1ul << 7; /* HWCAP_CRC32; vectors are in every 64-bit processor */
    return kernels == &hansa_neon && (getauxval(AT_HWCAP) & crc32) != 0;
#elif defined(__APPLE__)
    return kernels == &hansa_neon; /* all of Apple's have both */
#else
    return 0;
#endif
}
#else
static int has(const hansa_kernels *kernels) { return kernels == NULL; }
#endif

static const hansa_kernels *const all[] = {
#if defined(__x86_64__)
    &hansa_avx512, &hansa_avx2,
#elif defined(__aarch64__)
    &hansa_neon,
#endif
    &hansa_base,
};

HANSA_EXPORT int64_t hansa_abi(void) { return HANSA_ABI; }

/* The bytes of each structure that Python mirrors, in the order of abi.STRUCTURES; -1 after the last. */
HANSA_EXPORT int64_t hansa_size(int64_t which) {
    static const int64_t sizes[] = {
        sizeof(hansa_stage), sizeof(hansa_data), sizeof(hansa_batches), sizeof(hansa_update),
        sizeof(hansa_client), sizeof(hansa_turn), sizeof(hansa_cohort), sizeof(hansa_lazy_cohort),
        sizeof(hansa_score), sizeof(hansa_rule), sizeof(hansa_kernels),
    };
    return which >= 0 && which < (int64_t)(sizeof sizes / sizeof *sizes) ? sizes[which] : -1;
}

/* The kernels of the given name, or the best if it is empty; null if this machine cannot run them. */
HANSA_EXPORT const hansa_kernels *hansa_kernels_for(const char *name) {
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if ((!*name || !strcmp(name, all[i]->name)) && (all[i] == &hansa_base || has(all[i]))) return all[i];
    return NULL;
}
