/* What the kernels of one instruction set compute for fixed inputs, written to a file: machines.py compares the files of
 * other sets and other machines. Every buffer ends at a page that cannot be touched, so that a kernel that reads or
 * writes beyond it crashes, and so that buffers start at all alignments of a number. */
#ifndef HANSA_RESULTS_H
#define HANSA_RESULTS_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

enum { EXACT, CLOSE, TRAINED }; /* the same bits; the same but for rounding; the same but for rounding that grew */

/* Random numbers, the same on every machine. */
void seed(uint64_t value);
int64_t below(int64_t limit);
float uniform(void); /* from -1 to 1 */

/* Buffers; free_all ends the life of all. */
void *room(int64_t bytes);
void free_all(void);
float *floats(int64_t n, float scale);
double *doubles(int64_t n, double scale);
int64_t *numbers(int64_t n, int64_t limit);

/* The results of one case. */
void give_floats(const char *name, int how, const float *values, int64_t n);
void give_doubles(const char *name, int how, const double *values, int64_t n);
void give_bytes(const char *name, const void *values, int64_t bytes);

void vector_results(const hansa_kernels *kernels);
void network_results(const hansa_kernels *kernels);

#endif
