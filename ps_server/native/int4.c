/* Int4 of ps_server/codecs/int4.py. */

#define SHARED 64
#define BITS 4
#include "blocks.h"

INLINE void encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
    int8_t whole[BLOCK + 2];
    for (size_t at = 0; at < n; at += SHARED) {
        size_t length = least(SHARED, n - at);
        float scale = scale_of(x + at, length, 7.0f);
        memcpy(scales + at / SHARED * 4, &scale, 4);
        rounded(x + at, whole + at, length, scale);
    }
    whole[n] = -8; /* the upper half of an odd last byte is 0 */
    for (size_t i = 0; i < up(n, 2); i++) {
        uint16_t pair;
        memcpy(&pair, whole + 2 * i, 2);
        pair = (pair & 0x0f0fu) ^ 0x0808u; /* each number + 8 */
        codes[i] = (uint8_t)(pair | pair >> 4);
    }
}

INLINE void decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
    uint8_t whole[BLOCK + 2];
    for (size_t i = 0; i < up(n, 2); i++) {
        uint16_t pair = (uint16_t)((codes[i] & 0x0fu) | (codes[i] & 0xf0u) << 4);
        memcpy(whole + 2 * i, &pair, 2);
    }
    for (size_t at = 0; at < n; at += SHARED) {
        size_t length = least(SHARED, n - at);
        float scale;
        memcpy(&scale, scales + at / SHARED * 4, 4);
        for (size_t i = at; i < at + length; i++) x[i] = (float)((int)whole[i] - 8) * scale;
    }
}

CODEC(int4)
