/* TopK of ps_server/codecs/topk.py. */

#include "segments.h"

enum { BINS = 256, SAMPLED = 32 };

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

/* The positions come first. */
INLINE size_t values_at(const struct part *part) { return up(2 * all_sent(part), 4) * 4; }

INLINE void choose(const struct part *part, struct segment s, const float *x, uint8_t *codes,
                   uint16_t *positions) {
    (void)part;
    largest(x, s.length, s.sent, positions);
    memcpy(codes + 2 * s.before, positions, 2 * s.sent);
}

INLINE void chosen(const struct part *part, struct segment s, const uint8_t *codes,
                   uint16_t *positions) {
    (void)part;
    memcpy(positions, codes + 2 * s.before, 2 * s.sent);
}

INLINE void pad(const struct part *part, uint8_t *codes) {
    size_t end = 2 * all_sent(part);
    memset(codes + end, 0, up(end, 4) * 4 - end);
}

CODEC(topk)
