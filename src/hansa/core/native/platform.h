/* What operating systems call differently: aligned memory and a clock. */
#ifndef HANSA_PLATFORM_H
#define HANSA_PLATFORM_H

#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#include <stdint.h>
/* declared here, because windows.h defines macros of our names */
__declspec(dllimport) int __stdcall QueryPerformanceCounter(int64_t *ticks);
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(int64_t *rate);
#else
#include <time.h>
#endif

/* Memory at a multiple of 64 bytes, or null. */
static inline void *take_aligned(size_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc(bytes, 64);
#else
    void *block = NULL;
    return posix_memalign(&block, 64, bytes) ? NULL : block;
#endif
}

static inline void free_aligned(void *block) {
#if defined(_WIN32)
    _aligned_free(block);
#else
    free(block);
#endif
}

/* Seconds from an arbitrary start, never set back. */
static inline double now(void) {
#if defined(_WIN32)
    int64_t ticks, rate;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&rate);
    return (double)ticks / (double)rate;
#else
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
#endif
}

#endif
