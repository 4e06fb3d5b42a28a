/* The kernels for the compiler's default machine: SSE2, NEON, ... */
#define HANSA_LANES 4
#define HANSA_NAME "base"
#define HANSA_KERNELS hansa_base
#include "kernels.h"
