/* Int8 of ps_server/codecs/int8.py. */

#define SHARED 256
#define BITS 8
#include "blocks.h"

INLINE void encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
    float scale = scale_of(x, n, 127.0f);
    memcpy(scales, &scale, 4);
    rounded(x, (int8_t *)codes, n, scale);
}

INLINE void decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
    float scale;
    memcpy(&scale, scales, 4);
    for (size_t i = 0; i < n; i++) x[i] = (float)(int8_t)codes[i] * scale;
}

CODEC(int8)
