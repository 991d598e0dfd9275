/* What all files of the library share: see __init__.py for the laws. */

#ifndef LEVELS_H
#define LEVELS_H

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* LEVELS(define) expands `define(name, target)` for each set of instructions; PICK(call) is the
   function of the level that a call was given. */
#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma,bmi,bmi2")))
#define AVX512                                                                                    \
    __attribute__((                                                                               \
        target("avx512f,avx512bw,avx512dq,avx512vl,fma,bmi,bmi2,prefer-vector-width=512")))
#define LEVELS(define) define(plain, ) define(avx2, AVX2) define(avx512, AVX512)
#define PICK(call) (level == 2 ? call##_avx512 : level == 1 ? call##_avx2 : call##_plain)
#else
#define LEVELS(define) define(plain, )
#define PICK(call) call##_plain
#endif

#endif
