/* What a shard does with the gradients of an iteration, each number read once: the bits of torch's
   operations in ps_server/rules.py.

   Bits: torch multiplies and adds in one rounding where it uses AVX2 or later, and so does this
   code at these levels. Callers take `rules_sgd` only where torch does. */

#include <stddef.h>

#include "levels.h"

INLINE void mean(float *restrict left, const float *restrict right, size_t n, float count) {
    for (size_t i = 0; i < n; i++) left[i] = (left[i] + right[i]) / count;
}

INLINE void sgd(
    float *restrict value, float *restrict history, const float *restrict gradient, size_t n,
    int decays, float decay, float momentum, float into, float along) {
    for (size_t i = 0; i < n; i++) {
        float g = decays ? __builtin_fmaf(value[i], decay, gradient[i]) : gradient[i];
        float h = __builtin_fmaf(g, into, history[i] * momentum);
        history[i] = h;
        value[i] = __builtin_fmaf(h, along, value[i]);
    }
}

#define LEVEL(name, target)                                                                       \
    target static void mean_##name(float *left, const float *right, size_t n, float count)        \
    { mean(left, right, n, count); }                                                              \
    target static void sgd_##name(                                                                \
        float *value, float *history, const float *gradient, size_t n, float decay,               \
        float momentum, float into, float along)                                                  \
    {                                                                                             \
        if (decay != 0.0f) sgd(value, history, gradient, n, 1, decay, momentum, into, along);     \
        else sgd(value, history, gradient, n, 0, decay, momentum, into, along);                   \
    }
LEVELS(LEVEL)

/* left = (left + right) / count */
EXPORT void rules_mean(int level, float *left, const float *right, size_t n, float count) {
    (void)level;
    PICK(mean)(left, right, n, count);
}

/* g = gradient + decay value, history = momentum history + into g, value += along history */
EXPORT void rules_sgd(
    int level, float *value, float *history, const float *gradient, size_t n, float decay,
    float momentum, float into, float along) {
    (void)level;
    PICK(sgd)(value, history, gradient, n, decay, momentum, into, along);
}
