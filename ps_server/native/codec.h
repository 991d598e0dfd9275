/* What the compiled codecs share: the same bits as ps_server/codecs, in one pass over the numbers.

   A codec is one file: its operations on a block or a segment (`blocks.h`, `segments.h`), and
   CODEC(name), with the name that it has in Python. A call works on a chunk. Callers check sizes
   and codes. A block stays in the first cache from its reading to its writing, a segment in the
   second.

   Bits: every operation on floats is one of IEEE 754, rounded once, for each element alone, in the
   caller's mode for denormal numbers; sums have the order that Python gives them. So they do
   not depend on the width of the vectors. Never compile it with -ffast-math or with contraction.
   The one freedom is the payload of a NaN. */

#ifndef CODEC_H
#define CODEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "levels.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __FLT_EVAL_METHOD__ != 0
#error "codes are little endian, and floats are computed as floats"
#endif

enum { BLOCK = 256, SEGMENT = 16384 };

/* A chunk: see `Part` in __init__.py. */
struct part {
    size_t total, sent, last;
    uint64_t table, segment, clock;
};

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
INLINE uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }
INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }
INLINE size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit; }

/* The 8 lowest bits of 8 bytes, the first one lowest. */
INLINE uint8_t packed(const uint8_t *flags) {
    uint64_t eight;
    memcpy(&eight, flags, 8);
    return (uint8_t)(eight * 0x0102040810204080u >> 56);
}

/* The four calls of a codec, once for each level: constants are known where loops are compiled. Its
   file has encode_part, add_part and average_part by then. */
#define LEVEL(name, target)                                                                       \
    target static void compress_##name(                                                           \
        float *left, const float *given, uint8_t *codes, const struct part *part)                 \
    { encode_part(0, left, given, codes, part); }                                                 \
    target static void follow_##name(                                                             \
        float *own, const float *value, uint8_t *codes, const struct part *part)                  \
    { encode_part(1, own, value, codes, part); }                                                  \
    target static void add_##name(float *out, const uint8_t *codes, const struct part *part)      \
    { add_part(out, codes, part); }                                                               \
    target static void average_##name(                                                            \
        float *out, const uint8_t *const *pushes, size_t workers, const struct part *part)        \
    { average_part(out, pushes, workers, part); }

#define PART                                                                                      \
    size_t total, size_t sent, size_t last, uint64_t table, uint64_t segment, uint64_t clock
#define PART_VALUE {total, sent, last, table, segment, clock}

/* compress: left += given; codes = left, encoded; left -= codes, decoded
   follow: codes = value - own, encoded; own += codes, decoded
   add: out += codes, decoded
   average: out = (0 + the codes of the first worker, decoded + ... of the last) / workers */
#define CODEC(name)                                                                               \
    LEVELS(LEVEL)                                                                                 \
    EXPORT void codec_##name##_compress(                                                          \
        int level, float *left, const float *given, uint8_t *codes, PART)                         \
    {                                                                                             \
        const struct part part = PART_VALUE;                                                      \
        (void)level;                                                                              \
        PICK(compress)(left, given, codes, &part);                                                \
    }                                                                                             \
    EXPORT void codec_##name##_follow(                                                            \
        int level, float *own, const float *value, uint8_t *codes, PART)                          \
    {                                                                                             \
        const struct part part = PART_VALUE;                                                      \
        (void)level;                                                                              \
        PICK(follow)(own, value, codes, &part);                                                   \
    }                                                                                             \
    EXPORT void codec_##name##_add(int level, float *out, const uint8_t *codes, PART)             \
    {                                                                                             \
        const struct part part = PART_VALUE;                                                      \
        (void)level;                                                                              \
        PICK(add)(out, codes, &part);                                                             \
    }                                                                                             \
    EXPORT void codec_##name##_average(                                                           \
        int level, float *out, const uint8_t *const *pushes, size_t workers, PART)                \
    {                                                                                             \
        const struct part part = PART_VALUE;                                                      \
        (void)level;                                                                              \
        PICK(average)(out, pushes, workers, &part);                                               \
    }

#endif
