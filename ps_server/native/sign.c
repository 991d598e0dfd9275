/* Sign of ps_server/codecs/sign.py. */

#define SHARED 256
#define BITS 1
#include "blocks.h"

INLINE void encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
    float sums[BLOCK];
    uint8_t below[BLOCK + 8];
    for (size_t i = 0; i < n; i++) sums[i] = float_of(magnitude(x[i]));
    for (size_t width = n; width > 1; width -= width / 2)
        for (size_t i = 0; i < width / 2; i++) sums[i] += sums[width - width / 2 + i];
    float mean = one_nan(sums[0] / (float)n);
    memcpy(scales, &mean, 4);
    memset(below + n, 0, 8);
    for (size_t i = 0; i < n; i++) below[i] = x[i] < 0.0f;
    for (size_t i = 0; i < up(n, 8); i++) codes[i] = packed(below + 8 * i);
}

static const uint32_t bit_of[32] = {
    1u << 0,  1u << 1,  1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
    1u << 8,  1u << 9,  1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
    1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
    1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31};

INLINE void decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
    uint32_t mean;
    memcpy(&mean, scales, 4);
    size_t whole = n / 32 * 32;
    for (size_t at = 0; at < whole; at += 32) {
        uint32_t word;
        memcpy(&word, codes + at / 8, 4);
        for (size_t i = 0; i < 32; i++)
            x[at + i] = float_of(word & bit_of[i] ? mean ^ 0x80000000u : mean);
    }
    for (size_t i = whole; i < n; i++)
        x[i] = float_of(mean ^ (uint32_t)(codes[i / 8] >> i % 8 & 1) << 31);
}

CODEC(sign)
