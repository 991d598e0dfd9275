/* RandomK of ps_server/codecs/randomk.py. */

#include "segments.h"

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

INLINE size_t values_at(const struct part *part) { (void)part; return 0; }

INLINE void choose(const struct part *part, struct segment s, const float *x, uint8_t *codes,
                   uint16_t *positions) {
    (void)x, (void)codes;
    drawn(part, s, positions);
}

INLINE void chosen(const struct part *part, struct segment s, const uint8_t *codes,
                   uint16_t *positions) {
    (void)codes;
    drawn(part, s, positions);
}

INLINE void pad(const struct part *part, uint8_t *codes) { (void)part, (void)codes; }

CODEC(randomk)
