/* What a shard does with the gradients of an iteration, each number read once: the bits of torch's
   operations in ps_server/rules.py.

   Bits: torch multiplies and adds in one rounding where it uses AVX2 or later, and so does this
   code at these levels. Callers take a rule only where torch does. */

#include <stddef.h>

#include "levels.h"

/* a null half is `out` */
INLINE void mean(
    float *restrict out, float *restrict again, const float *restrict left,
    const float *restrict right, size_t n, float count) {
    for (size_t i = 0; i < n; i++) {
        out[i] = ((left ? left : out)[i] + (right ? right : out)[i]) / count;
        if (again) again[i] = out[i];
    }
}

INLINE void sgd(
    float *restrict value, float *restrict history, const float *restrict left,
    const float *restrict right, size_t n, int halves, int decays, float count, float decay,
    float momentum, float into, float along) {
    for (size_t i = 0; i < n; i++) {
        float g = halves ? (left[i] + right[i]) / count : left[i];
        g = decays ? __builtin_fmaf(value[i], decay, g) : g;
        float h = __builtin_fmaf(g, into, history[i] * momentum);
        history[i] = h;
        value[i] = __builtin_fmaf(h, along, value[i]);
    }
}

INLINE void adam(
    float *restrict value, float *restrict first, float *restrict second,
    const float *restrict left, const float *restrict right, size_t n, int halves, int decays,
    float count, float decay, float keep, float into, float keep2, float into2, float correction,
    float delta, float along) {
    for (size_t i = 0; i < n; i++) {
        float g = halves ? (left[i] + right[i]) / count : left[i];
        g = decays ? __builtin_fmaf(value[i], decay, g) : g;
        float m = __builtin_fmaf(into, g - first[i], first[i]);
        float v = __builtin_fmaf(into2 * g, g, second[i] * keep2);
        first[i] = m;
        second[i] = v;
        value[i] = value[i] * keep + m * along / (__builtin_sqrtf(v) / correction + delta);
    }
}

#define MEAN(again)                                                                               \
    (left == out ? mean(out, again, NULL, right, n, count)                                        \
     : right == out ? mean(out, again, left, NULL, n, count)                                      \
                    : mean(out, again, left, right, n, count))
#define SGD(halves, decays)                                                                       \
    sgd(value, history, left, right, n, halves, decays, count, decay, momentum, into, along)
#define ADAM(halves, decays)                                                                      \
    adam(value, first, second, left, right, n, halves, decays, count, decay, keep, into, keep2,   \
         into2, correction, delta, along)
#define LEVEL(name, target)                                                                       \
    target static void mean_##name(                                                               \
        float *out, float *again, const float *left, const float *right, size_t n, float count)   \
    {                                                                                             \
        if (again) MEAN(again);                                                                   \
        else MEAN(NULL);                                                                          \
    }                                                                                             \
    target static void sgd_##name(                                                                \
        float *value, float *history, const float *left, const float *right, size_t n,            \
        float count, float decay, float momentum, float into, float along)                        \
    {                                                                                             \
        if (right && decay != 0.0f) SGD(1, 1);                                                    \
        else if (right) SGD(1, 0);                                                                \
        else if (decay != 0.0f) SGD(0, 1);                                                        \
        else SGD(0, 0);                                                                           \
    }                                                                                             \
    target static void adam_##name(                                                               \
        float *value, float *first, float *second, const float *left, const float *right,         \
        size_t n, float count, float decay, float keep, float into, float keep2, float into2,     \
        float correction, float delta, float along)                                               \
    {                                                                                             \
        if (right && decay != 0.0f) ADAM(1, 1);                                                   \
        else if (right) ADAM(1, 0);                                                               \
        else if (decay != 0.0f) ADAM(0, 1);                                                       \
        else ADAM(0, 0);                                                                          \
    }
LEVELS(LEVEL)

/* out = (left + right) / count; out may be a half; `again`, if any, gets the same */
EXPORT void rules_mean(
    int level, float *out, float *again, const float *left, const float *right, size_t n,
    float count) {
    (void)level;
    PICK(mean)(out, again, left, right, n, count);
}

/* gradient = (left + right) / count, or left where right is null; g = gradient + decay value,
   history = momentum history + into g, value += along history */
EXPORT void rules_sgd(
    int level, float *value, float *history, const float *left, const float *right, size_t n,
    float count, float decay, float momentum, float into, float along) {
    (void)level;
    PICK(sgd)(value, history, left, right, n, count, decay, momentum, into, along);
}

/* g as in `rules_sgd`; first += into (g - first), second = keep2 second + into2 g^2,
   value = keep value + along first / (sqrt(second) / correction + delta) */
EXPORT void rules_adam(
    int level, float *value, float *first, float *second, const float *left, const float *right,
    size_t n, float count, float decay, float keep, float into, float keep2, float into2,
    float correction, float delta, float along) {
    (void)level;
    PICK(adam)(value, first, second, left, right, n, count, decay, keep, into, keep2, into2,
               correction, delta, along);
}
