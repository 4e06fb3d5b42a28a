/* The kernels for AVX2 with FMA (Intel Haswell and AMD Zen onwards). */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,popcnt,f16c,pclmul"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,bmi,bmi2,popcnt,f16c,pclmul")
#endif
#define HANSA_LANES 8
#define HANSA_NAME "avx2"
#define HANSA_KERNELS hansa_avx2
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hansa_nothing_here;
#endif
