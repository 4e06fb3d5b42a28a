/* The kernels for the compiler's default machine: SSE2, Arm's vectors, or any other. */
#define HANSA_LANES 4
#define HANSA_NAME "base"
#define HANSA_KERNELS hansa_base
#include "kernels.h"
