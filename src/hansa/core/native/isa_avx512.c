/* The kernels for AVX-512 (Intel Skylake-X and AMD Zen 4 onwards). */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,popcnt,f16c,pclmul"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,popcnt,f16c,pclmul,prefer-vector-width=512")
#endif
#define HANSA_LANES 16
#define HANSA_NAME "avx512"
#define HANSA_KERNELS hansa_avx512
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hansa_nothing_here;
#endif
