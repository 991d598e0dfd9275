/* The codecs of ps_server/protocol/codecs.py: the same bits, in one pass over the numbers.

   A call works on a chunk. Callers check sizes and codes. A block stays in the first cache from
   its reading to its writing, a segment in the second.

   Bits: every operation on floats is one of IEEE 754, rounded once, for each element alone, in the
   caller's mode for denormal numbers; sums have the order that codecs.py gives them. So they do
   not depend on the width of the vectors. Never compile it with -ffast-math or with contraction.
   The one freedom is the payload of a NaN. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "levels.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __FLT_EVAL_METHOD__ != 0
#error "codes are little endian, and floats are computed as floats"
#endif

enum { BLOCK = 256, SMALL_BLOCK = 64, SEGMENT = 16384 };
enum { BINS = 256, SAMPLED = 32 };
enum kind { INT8, INT4, SIGN, TOPK, RANDOMK };

static const float SMALLEST_SCALE = 0x1p-126f;
/* In [2^23, 2^24) floats are the whole numbers, so adding this rounds to the nearest, ties to
   even; the low bits then are the number. */
static const float ROUNDING = 0x1.8p23f;

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

INLINE float one_nan(float x) { return x != x ? float_of(0x7fc00000u) : x; }

/* ---- Blocks: INT8, INT4, SIGN ---- */

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

INLINE void int8_encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
    float scale = scale_of(x, n, 127.0f);
    memcpy(scales, &scale, 4);
    rounded(x, (int8_t *)codes, n, scale);
}

INLINE void int8_decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
    float scale;
    memcpy(&scale, scales, 4);
    for (size_t i = 0; i < n; i++) x[i] = (float)(int8_t)codes[i] * scale;
}

INLINE void int4_encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
    int8_t whole[BLOCK + 2];
    for (size_t at = 0; at < n; at += SMALL_BLOCK) {
        size_t length = least(SMALL_BLOCK, n - at);
        float scale = scale_of(x + at, length, 7.0f);
        memcpy(scales + at / SMALL_BLOCK * 4, &scale, 4);
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

INLINE void int4_decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
    uint8_t whole[BLOCK + 2];
    for (size_t i = 0; i < up(n, 2); i++) {
        uint16_t pair = (uint16_t)((codes[i] & 0x0fu) | (codes[i] & 0xf0u) << 4);
        memcpy(whole + 2 * i, &pair, 2);
    }
    for (size_t at = 0; at < n; at += SMALL_BLOCK) {
        size_t length = least(SMALL_BLOCK, n - at);
        float scale;
        memcpy(&scale, scales + at / SMALL_BLOCK * 4, 4);
        for (size_t i = at; i < at + length; i++) x[i] = (float)((int)whole[i] - 8) * scale;
    }
}

/* The 8 lowest bits of 8 bytes, the first one lowest. */
INLINE uint8_t packed(const uint8_t *flags) {
    uint64_t eight;
    memcpy(&eight, flags, 8);
    return (uint8_t)(eight * 0x0102040810204080u >> 56);
}

INLINE void sign_encode(const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
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

INLINE void sign_decode(float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
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

INLINE void encode(enum kind kind, const float *x, size_t n, uint8_t *scales, uint8_t *codes) {
    if (kind == INT8) int8_encode(x, n, scales, codes);
    if (kind == INT4) int4_encode(x, n, scales, codes);
    if (kind == SIGN) sign_encode(x, n, scales, codes);
}

INLINE void decode(
    enum kind kind, float *x, size_t n, const uint8_t *scales, const uint8_t *codes) {
    if (kind == INT8) int8_decode(x, n, scales, codes);
    if (kind == INT4) int4_decode(x, n, scales, codes);
    if (kind == SIGN) sign_decode(x, n, scales, codes);
}

/* Ask for a later block while this one is computed: the processor does so too late by itself. */
INLINE void ahead(const float *x, size_t n) {
    for (size_t i = 0; i < n; i += 16) __builtin_prefetch(x + 2 * BLOCK + i);
}

INLINE void compress_block(enum kind kind, float *left, const float *given, size_t n,
                           uint8_t *scales, uint8_t *codes) {
    float sent[BLOCK];
    ahead(left, n);
    ahead(given, n);
    for (size_t i = 0; i < n; i++) left[i] += given[i];
    encode(kind, left, n, scales, codes);
    decode(kind, sent, n, scales, codes);
    for (size_t i = 0; i < n; i++) left[i] -= sent[i];
}

INLINE void follow_block(enum kind kind, float *own, const float *value, size_t n,
                         uint8_t *scales, uint8_t *codes) {
    float change[BLOCK];
    ahead(own, n);
    ahead(value, n);
    for (size_t i = 0; i < n; i++) change[i] = value[i] - own[i];
    encode(kind, change, n, scales, codes);
    decode(kind, change, n, scales, codes);
    for (size_t i = 0; i < n; i++) own[i] += change[i];
}

INLINE void add_block(enum kind kind, float *out, size_t n, const uint8_t *scales,
                      const uint8_t *codes) {
    float more[BLOCK];
    ahead(out, n);
    decode(kind, more, n, scales, codes);
    for (size_t i = 0; i < n; i++) out[i] += more[i];
}

INLINE void average_block(enum kind kind, float *out, size_t n, const uint8_t *const *pushes,
                          size_t workers, size_t scales, size_t codes) {
    float sum[BLOCK], more[BLOCK];
    memset(sum, 0, sizeof sum);
    for (size_t worker = 0; worker < workers; worker++) {
        decode(kind, more, n, pushes[worker] + scales, pushes[worker] + codes);
        for (size_t i = 0; i < n; i++) sum[i] += more[i];
    }
    if (workers > 1)
        for (size_t i = 0; i < n; i++) sum[i] /= (float)workers;
    memcpy(out, sum, 4 * n);
}

/* Where the scales and the codes of the block at an element are in a chunk's bytes. */
INLINE size_t scales_at(enum kind kind, size_t at) {
    return kind == INT4 ? at / SMALL_BLOCK * 4 : at / BLOCK * 4;
}
INLINE size_t codes_at(enum kind kind, size_t total, size_t at) {
    if (kind == INT8) return 4 * up(total, BLOCK) + at;
    if (kind == INT4) return 4 * up(total, SMALL_BLOCK) + at / 2;
    return 4 * up(total, BLOCK) + at / 8;
}
INLINE size_t codes_end(enum kind kind, size_t total) {
    size_t each = kind == INT8 ? 1 : kind == INT4 ? 2 : 8;
    return codes_at(kind, total, 0) + up(total, each);
}

/* ---- Segments: TOPK, RANDOMK ---- */

/* The segment at an element: its length, its codes, and the codes before it. */
struct segment {
    size_t length, sent, before, number;
};
INLINE struct segment segment_at(const struct part *part, size_t at) {
    struct segment s;
    s.number = at / SEGMENT;
    s.length = least(SEGMENT, part->total - at);
    s.sent = s.length == SEGMENT ? part->sent : part->last;
    s.before = s.number * part->sent;
    return s;
}
/* Where the values of a chunk are in its bytes: TOPK has the positions first. */
INLINE size_t values_at(enum kind kind, const struct part *part) {
    if (kind == RANDOMK) return 0;
    size_t rest = part->total % SEGMENT;
    size_t codes = part->total / SEGMENT * part->sent + (rest ? part->last : 0);
    return up(2 * codes, 4) * 4;
}

static uint16_t chosen_of[256][8]; /* the numbers of the bits of a byte that are 1 */
static uint8_t count_of[256];
__attribute__((constructor)) static void fill_tables(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0; bit < 8; bit++)
            if (byte >> bit & 1) chosen_of[byte][count_of[byte]++] = (uint16_t)bit;
}

/* The number of the given rank among n, from 0 for the smallest; overwrites them. By digits of the
   range that is left, as few as it takes. */
INLINE uint32_t ranked(uint32_t *numbers, size_t n, size_t rank) {
    uint16_t bins[BINS];
    for (;;) {
        uint32_t low = numbers[0], high = numbers[0];
        for (size_t i = 0; i < n; i++) {
            low = numbers[i] < low ? numbers[i] : low;
            high = numbers[i] > high ? numbers[i] : high;
        }
        int shift = 0;
        while ((high - low) >> shift >= BINS) shift++;
        memset(bins, 0, sizeof bins);
        for (size_t i = 0; i < n; i++) bins[(numbers[i] - low) >> shift]++;
        uint32_t bin = 0;
        while (bins[bin] <= rank) rank -= bins[bin++];
        if (shift == 0) return low + bin;
        size_t kept = 0;
        for (size_t i = 0; i < n; i++) {
            uint32_t number = numbers[i];
            numbers[kept] = number;
            kept += (number - low) >> shift == bin;
        }
        n = kept;
    }
}

/* Mark magnitudes of at least a bound, which `wanted` of a sample reach; return their number. */
INLINE size_t mark(const float *x, size_t n, size_t wanted, uint8_t *flags) {
    uint32_t sample[SEGMENT / SAMPLED], bound = 1, found = 0;
    size_t size = n / SAMPLED;
    for (size_t i = 0; i < size; i++) sample[i] = magnitude(x[i * SAMPLED]);
    if (size > wanted) bound = ranked(sample, size, size - wanted);
    bound = bound > 0 ? bound : 1;
    for (size_t i = 0; i < n; i++) {
        flags[i] = magnitude(x[i]) >= bound;
        found += magnitude(x[i]) >= bound;
    }
    return found;
}

/* The positions of the largest magnitudes in order; of equal ones the lower positions. A sample
   decides which elements are looked at more closely, and so the time, and not what is found. */
INLINE void largest(const float *x, size_t n, size_t sent, uint16_t *positions) {
    uint8_t flags[SEGMENT + 8];
    uint32_t magnitudes[SEGMENT], ranks[SEGMENT];
    size_t wanted = sent / SAMPLED + sent / (4 * SAMPLED) + 4, found;
    while ((found = mark(x, n, wanted, flags)) < sent && wanted < n / SAMPLED) wanted *= 4;
    if (found < sent) { /* all that are not 0, and the first zeros */
        size_t zeros = sent - found, taken = 0;
        for (size_t i = 0; taken < sent; i++) {
            size_t zero = !flags[i] && zeros > 0;
            positions[taken] = (uint16_t)i;
            taken += flags[i] | zero;
            zeros -= zero;
        }
        return;
    }
    uint16_t candidates[SEGMENT + 8];
    memset(flags + n, 0, 8);
    size_t at = 0;
    for (size_t i = 0; i < n; i += 8) {
        uint8_t byte = packed(flags + i);
        for (size_t j = 0; j < 8; j++) candidates[at + j] = (uint16_t)(chosen_of[byte][j] + i);
        at += count_of[byte];
    }
    for (size_t i = 0; i < found; i++) ranks[i] = magnitudes[i] = magnitude(x[candidates[i]]);
    uint32_t smallest = ranked(ranks, found, found - sent), larger = 0, equal = 0;
    for (size_t i = 0; i < found; i++) {
        larger += magnitudes[i] > smallest;
        equal += magnitudes[i] == smallest;
    }
    size_t taken = 0, ties = sent - larger;
    if (ties < equal)
        for (size_t i = 0; i < found; i++) {
            if (magnitudes[i] != smallest) continue;
            if (ties > 0) ties--;
            else magnitudes[i] = 0;
        }
    for (size_t i = 0; i < found; i++) {
        positions[taken] = candidates[i];
        taken += magnitudes[i] >= smallest;
    }
}

/* splitmix64 (Steele et al., OOPSLA 2014) */
INLINE uint64_t mixed(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* A 64-bit number modulo one of 1 to 2^15, by multiplications (Lemire et al., 2019). */
struct modulus { uint64_t divisor, carry, inverse; };
INLINE struct modulus modulus_of(uint64_t divisor) {
    struct modulus m = {divisor, (1ull << 32) % divisor, UINT64_MAX / divisor + 1};
    return m;
}
INLINE uint64_t remainder_of(uint64_t number, struct modulus m) {
    uint64_t small = (number >> 32) * m.carry + (number & 0xffffffffu); /* below 2^48 */
    return (uint64_t)((__extension__ (unsigned __int128)(m.inverse * small) * m.divisor) >> 64);
}

/* One position from each of `sent` equal parts of a segment: part i ends at (i + 1) length / sent. */
INLINE void drawn(const struct part *part, struct segment s, uint16_t *positions) {
    uint64_t state = mixed(mixed(part->table) + part->clock);
    uint64_t counter = (part->segment + s.number) * SEGMENT;
    uint64_t shorter = s.length / s.sent, rest = s.length % s.sent, first = 0, over = 0;
    struct modulus moduli[2] = {modulus_of(shorter), modulus_of(shorter + 1)};
    for (size_t i = 0; i < s.sent; i++) {
        over += rest;
        size_t longer = over >= s.sent;
        over -= longer ? s.sent : 0;
        uint64_t number = mixed(state + counter + i);
        positions[i] = (uint16_t)(first + remainder_of(number, moduli[longer]));
        first += shorter + longer;
    }
}

INLINE void positions_of(enum kind kind, const struct part *part, struct segment s,
                         const uint8_t *codes, uint16_t *positions) {
    if (kind == RANDOMK) drawn(part, s, positions);
    else memcpy(positions, codes + 2 * s.before, 2 * s.sent);
}

/* Write the positions of what is sent of a segment; return where x at these belongs. */
INLINE uint8_t *choose(enum kind kind, const struct part *part, struct segment s, const float *x,
                       uint8_t *codes, uint16_t *positions) {
    if (kind == RANDOMK) drawn(part, s, positions);
    else {
        largest(x, s.length, s.sent, positions);
        memcpy(codes + 2 * s.before, positions, 2 * s.sent);
    }
    return codes + values_at(kind, part) + 4 * s.before;
}

INLINE void compress_segment(enum kind kind, const struct part *part, struct segment s,
                             float *left, const float *given, uint8_t *codes) {
    uint16_t positions[SEGMENT + 8];
    for (size_t i = 0; i < s.length; i++) left[i] += given[i];
    uint8_t *values = choose(kind, part, s, left, codes, positions);
    for (size_t i = 0; i < s.sent; i++) {
        float sent = left[positions[i]];
        memcpy(values + 4 * i, &sent, 4);
        left[positions[i]] = sent - sent;
    }
}

INLINE void follow_segment(enum kind kind, const struct part *part, struct segment s,
                           float *own, const float *value, uint8_t *codes) {
    uint16_t positions[SEGMENT + 8];
    float change[SEGMENT];
    for (size_t i = 0; i < s.length; i++) change[i] = value[i] - own[i];
    uint8_t *values = choose(kind, part, s, change, codes, positions);
    for (size_t i = 0; i < s.sent; i++) memcpy(values + 4 * i, change + positions[i], 4);
    for (size_t i = 0; i < s.sent; i++) own[positions[i]] += change[positions[i]];
}

INLINE void add_segment(enum kind kind, const struct part *part, struct segment s, float *out,
                        const uint8_t *codes) {
    uint16_t positions[SEGMENT];
    positions_of(kind, part, s, codes, positions);
    const uint8_t *values = codes + values_at(kind, part) + 4 * s.before;
    for (size_t i = 0; i < s.sent; i++) {
        float value;
        memcpy(&value, values + 4 * i, 4);
        out[positions[i]] += value;
    }
}

INLINE void average_segment(enum kind kind, const struct part *part, struct segment s, float *out,
                            const uint8_t *const *pushes, size_t workers) {
    memset(out, 0, 4 * s.length);
    for (size_t worker = 0; worker < workers; worker++)
        add_segment(kind, part, s, out, pushes[worker]);
    if (workers > 1)
        for (size_t i = 0; i < s.length; i++) out[i] /= (float)workers;
}

/* ---- Calls ---- */

INLINE int by_segments(enum kind kind) { return kind == TOPK || kind == RANDOMK; }

/* Codes end at a multiple of 4 bytes, with zeros (and the positions of TOPK). */
INLINE void pad(enum kind kind, const struct part *part, uint8_t *codes) {
    size_t end = 0;
    if (kind == TOPK) {
        size_t rest = part->total % SEGMENT;
        end = 2 * (part->total / SEGMENT * part->sent + (rest ? part->last : 0));
    } else if (kind != RANDOMK) end = codes_end(kind, part->total);
    memset(codes + end, 0, up(end, 4) * 4 - end);
}

INLINE void encode_part(enum kind kind, int follows, float *own, const float *given,
                        uint8_t *codes, const struct part *part) {
    size_t step = by_segments(kind) ? SEGMENT : BLOCK;
    pad(kind, part, codes);
    for (size_t i = 0; i < part->total; i += step) {
        if (by_segments(kind)) {
            struct segment s = segment_at(part, i);
            if (follows) follow_segment(kind, part, s, own + i, given + i, codes);
            else compress_segment(kind, part, s, own + i, given + i, codes);
            continue;
        }
        uint8_t *scales = codes + scales_at(kind, i);
        uint8_t *block = codes + codes_at(kind, part->total, i);
        size_t n = part->total - i;
        if (n >= BLOCK && follows) follow_block(kind, own + i, given + i, BLOCK, scales, block);
        else if (n >= BLOCK) compress_block(kind, own + i, given + i, BLOCK, scales, block);
        else if (follows) follow_block(kind, own + i, given + i, n, scales, block);
        else compress_block(kind, own + i, given + i, n, scales, block);
    }
}

INLINE void add_part(enum kind kind, float *out, const uint8_t *codes, const struct part *part) {
    size_t step = by_segments(kind) ? SEGMENT : BLOCK;
    for (size_t i = 0; i < part->total; i += step) {
        size_t n = part->total - i;
        if (by_segments(kind)) {
            add_segment(kind, part, segment_at(part, i), out + i, codes);
            continue;
        }
        const uint8_t *scales = codes + scales_at(kind, i);
        const uint8_t *block = codes + codes_at(kind, part->total, i);
        if (n >= BLOCK) add_block(kind, out + i, BLOCK, scales, block);
        else add_block(kind, out + i, n, scales, block);
    }
}

INLINE void average_part(enum kind kind, float *out, const uint8_t *const *pushes, size_t workers,
                         const struct part *part) {
    size_t step = by_segments(kind) ? SEGMENT : BLOCK;
    for (size_t i = 0; i < part->total; i += step) {
        size_t n = part->total - i;
        if (by_segments(kind)) {
            average_segment(kind, part, segment_at(part, i), out + i, pushes, workers);
            continue;
        }
        size_t scales = scales_at(kind, i), codes = codes_at(kind, part->total, i);
        if (n >= BLOCK) average_block(kind, out + i, BLOCK, pushes, workers, scales, codes);
        else average_block(kind, out + i, n, pushes, workers, scales, codes);
    }
}

/* Each call once for each kind and level: constants are known where loops are compiled. */
#define CASES(call)                                                                               \
    switch (kind) {                                                                               \
    case INT8: call(INT8); break;                                                                 \
    case INT4: call(INT4); break;                                                                 \
    case SIGN: call(SIGN); break;                                                                 \
    case TOPK: call(TOPK); break;                                                                 \
    default: call(RANDOMK);                                                                       \
    }
#define COMPRESS(k) encode_part(k, 0, own, given, codes, part)
#define FOLLOW(k) encode_part(k, 1, own, given, codes, part)
#define ADD(k) add_part(k, own, codes, part)
#define AVERAGE(k) average_part(k, own, pushes, workers, part)
#define LEVEL(name, target)                                                                       \
    target static void compress_##name(                                                           \
        enum kind kind, float *own, const float *given, uint8_t *codes, const struct part *part)  \
    { CASES(COMPRESS) }                                                                           \
    target static void follow_##name(                                                             \
        enum kind kind, float *own, const float *given, uint8_t *codes, const struct part *part)  \
    { CASES(FOLLOW) }                                                                             \
    target static void add_##name(                                                                \
        enum kind kind, float *own, const uint8_t *codes, const struct part *part)                \
    { CASES(ADD) }                                                                                \
    target static void average_##name(                                                            \
        enum kind kind, float *own, const uint8_t *const *pushes, size_t workers,                 \
        const struct part *part)                                                                  \
    { CASES(AVERAGE) }

LEVELS(LEVEL)

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

#define PART \
    size_t total, size_t sent, size_t last, uint64_t table, uint64_t segment, uint64_t clock
#define PART_VALUE {total, sent, last, table, segment, clock}

/* left += given; codes = left, encoded; left -= codes, decoded */
EXPORT void codecs_compress(
    int level, int kind, float *left, const float *given, uint8_t *codes, PART) {
    const struct part part = PART_VALUE;
    (void)level;
    PICK(compress)((enum kind)kind, left, given, codes, &part);
}

/* codes = value - own, encoded; own += codes, decoded */
EXPORT void codecs_follow(
    int level, int kind, float *own, const float *value, uint8_t *codes, PART) {
    const struct part part = PART_VALUE;
    (void)level;
    PICK(follow)((enum kind)kind, own, value, codes, &part);
}

/* out += codes, decoded */
EXPORT void codecs_add(int level, int kind, float *out, const uint8_t *codes, PART) {
    const struct part part = PART_VALUE;
    (void)level;
    PICK(add)((enum kind)kind, out, codes, &part);
}

/* out = (0 + the codes of the first worker, decoded + ... of the last) / workers */
EXPORT void codecs_average(
    int level, int kind, float *out, const uint8_t *const *pushes, size_t workers, PART) {
    const struct part part = PART_VALUE;
    (void)level;
    PICK(average)((enum kind)kind, out, pushes, workers, &part);
}

#ifndef SOURCE
#define SOURCE ""
#endif
/* What this library was made of: see `digest` in __init__.py. */
EXPORT const char *const codecs_source = SOURCE;
