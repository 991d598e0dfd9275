/* What Python asks of the library itself. */

#include "levels.h"

/* The highest level of this processor: 0 is what every one has, 1 AVX2 with FMA, 2 AVX-512. */
EXPORT int codecs_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 2;
    return 1;
#else
    return 0;
#endif
}

#ifndef SOURCE
#define SOURCE ""
#endif
/* What this library was made of: see `digest` in __init__.py. */
EXPORT const char *const codecs_source = SOURCE;
