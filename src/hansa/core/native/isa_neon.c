/* The kernels for 64-bit Arm: vectors, which all of these processors have, and the instructions for checksums. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("crc"))), apply_to = function)
#else
#pragma GCC target("+crc")
#endif
#define HANSA_NEON
#define HANSA_LANES 4
#define HANSA_NAME "neon"
#define HANSA_KERNELS hansa_neon
#include "kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int hansa_nothing_here;
#endif
