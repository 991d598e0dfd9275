/* Codecs that treat each block of 256 elements by itself: first the scales of all blocks, then the
   codes of all elements. The file of a codec defines, before it includes this:

   SHARED  elements that share a scale, 256 or fewer
   BITS    of an element's code

   and after it `encode` and `decode` of at most a block. */

#ifndef SHARED
#error "define SHARED and BITS first"
#endif

#include "codec.h"

static const float SMALLEST_SCALE = 0x1p-126f;
/* In [2^23, 2^24) floats are the whole numbers, so adding this rounds to the nearest, ties to
   even; the low bits then are the number. */
static const float ROUNDING = 0x1.8p23f;

INLINE float one_nan(float x) { return x != x ? float_of(0x7fc00000u) : x; }

INLINE void encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes);
INLINE void decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes);

INLINE float scale_of(const float *x, size_t n, float levels) {
    uint32_t most = 0; /* magnitudes have the order of their bits, NaN above all */
    for (size_t i = 0; i < n; i++) most = magnitude(x[i]) > most ? magnitude(x[i]) : most;
    float scale = one_nan(float_of(most) / levels);
    return scale < SMALLEST_SCALE ? 0.0f : scale;
}

/* Whole numbers of at most the levels of `scale`; all 0 where it is 0 or not finite. */
INLINE void rounded(const float *x, int8_t *whole, size_t n, float scale) {
    if (!(scale > 0.0f && scale <= 3.402823466e38f)) {
        memset(whole, 0, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        whole[i] = (int8_t)(int32_t)(bits_of(x[i] / scale + ROUNDING) - bits_of(ROUNDING));
}

/* Ask for a later block while this one is computed: the processor does so too late by itself. */
INLINE void ahead(const float *x, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + 2 * BLOCK + i);
}

INLINE void compress_block(float *left, const float *given, size_t n,
                           uint8_t *scales, uint8_t *codes) {
    float sent[BLOCK];
    ahead(left, n);
    ahead(given, n);
    for (size_t i = 0; i < n; i++) left[i] += given[i];
    encode(left, n, scales, codes);
    decode(sent, n, scales, codes);
    for (size_t i = 0; i < n; i++) left[i] -= sent[i];
}

INLINE void follow_block(float *own, const float *value, size_t n,
                         uint8_t *scales, uint8_t *codes) {
    float change[BLOCK];
    ahead(own, n);
    ahead(value, n);
    for (size_t i = 0; i < n; i++) change[i] = value[i] - own[i];
    encode(change, n, scales, codes);
    decode(change, n, scales, codes);
    for (size_t i = 0; i < n; i++) own[i] += change[i];
}

INLINE void add_block(float *out, size_t n, const uint8_t *scales,
                      const uint8_t *codes) {
    float more[BLOCK];
    ahead(out, n);
    decode(more, n, scales, codes);
    for (size_t i = 0; i < n; i++) out[i] += more[i];
}

INLINE void average_block(float *out, size_t n, const uint8_t *const *pushes,
                          size_t workers, size_t scales, size_t codes) {
    float sum[BLOCK], more[BLOCK];
    memset(sum, 0, sizeof sum);
    for (size_t worker = 0; worker < workers; worker++) {
        decode(more, n, pushes[worker] + scales, pushes[worker] + codes);
        for (size_t i = 0; i < n; i++) sum[i] += more[i];
    }
    if (workers > 1)
        for (size_t i = 0; i < n; i++) sum[i] /= (float)workers;
    memcpy(out, sum, 4 * n);
}

/* Where the scales and the codes of the block at an element are in a chunk's bytes. */
INLINE size_t scales_at(size_t at) { return at / SHARED * 4; }
INLINE size_t codes_at(size_t total, size_t at) { return 4 * up(total, SHARED) + at * BITS / 8; }

INLINE void encode_part(int follows, float *own, const float *given, uint8_t *codes,
                        const struct part *part) {
    size_t end = codes_at(part->total, 0) + up(part->total * BITS, 8);
    memset(codes + end, 0, up(end, 4) * 4 - end);
    for (size_t i = 0; i < part->total; i += BLOCK) {
        uint8_t *scales = codes + scales_at(i), *block = codes + codes_at(part->total, i);
        size_t n = part->total - i;
        if (n >= BLOCK && follows) follow_block(own + i, given + i, BLOCK, scales, block);
        else if (n >= BLOCK) compress_block(own + i, given + i, BLOCK, scales, block);
        else if (follows) follow_block(own + i, given + i, n, scales, block);
        else compress_block(own + i, given + i, n, scales, block);
    }
}

INLINE void add_part(float *out, const uint8_t *codes, const struct part *part) {
    for (size_t i = 0; i < part->total; i += BLOCK) {
        const uint8_t *scales = codes + scales_at(i), *block = codes + codes_at(part->total, i);
        size_t n = part->total - i;
        if (n >= BLOCK) add_block(out + i, BLOCK, scales, block);
        else add_block(out + i, n, scales, block);
    }
}

INLINE void average_part(float *out, const uint8_t *const *pushes, size_t workers,
                         const struct part *part) {
    for (size_t i = 0; i < part->total; i += BLOCK) {
        size_t n = part->total - i, scales = scales_at(i), codes = codes_at(part->total, i);
        if (n >= BLOCK) average_block(out + i, BLOCK, pushes, workers, scales, codes);
        else average_block(out + i, n, pushes, workers, scales, codes);
    }
}
