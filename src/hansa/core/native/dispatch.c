/* The exports of the library: the choice of instruction set, and each kernel by name. */
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "native.h"

#if defined(__x86_64__)
/* CPU features that not all compilers can query by name: carry-less products and 16-bit floats. */
static int has_more(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_PCLMUL) && (c & bit_F16C);
}
#endif

static int runs(const hansa_kernels *kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (kernels == &hansa_avx512)
        return avx2 && has_more() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (kernels == &hansa_avx2) return avx2 && has_more();
#endif
    return kernels == &hansa_base;
}

static const hansa_kernels *const all[] = {
#if defined(__x86_64__)
    &hansa_avx512, &hansa_avx2,
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
        if ((!*name || !strcmp(name, all[i]->name)) && runs(all[i])) return all[i];
    return NULL;
}
