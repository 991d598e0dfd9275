/* Codecs that send some elements of each segment of 16,384: their values, and before these what
   the receiver needs to find their positions. The file of a codec defines after including this:

   values_at  where the values are in a chunk's bytes
   choose     the positions of what is sent of a segment, and writes their codes
   chosen     the positions of what was sent, from the codes
   pad        the bytes that are no code */

#ifndef SEGMENTS_H
#define SEGMENTS_H

#include "codec.h"

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
/* The elements that are sent before a chunk's end. */
INLINE size_t all_sent(const struct part *part) {
    return part->total / SEGMENT * part->sent + (part->total % SEGMENT ? part->last : 0);
}

INLINE size_t values_at(const struct part *part);
INLINE void choose(const struct part *part, struct segment s, const float *x, uint8_t *codes,
                   uint16_t *positions);
INLINE void chosen(const struct part *part, struct segment s, const uint8_t *codes,
                   uint16_t *positions);
INLINE void pad(const struct part *part, uint8_t *codes);

INLINE void compress_segment(const struct part *part, struct segment s,
                             float *left, const float *given, uint8_t *codes) {
    uint16_t positions[SEGMENT + 8];
    for (size_t i = 0; i < s.length; i++) left[i] += given[i];
    choose(part, s, left, codes, positions);
    uint8_t *values = codes + values_at(part) + 4 * s.before;
    for (size_t i = 0; i < s.sent; i++) {
        float sent = left[positions[i]];
        memcpy(values + 4 * i, &sent, 4);
        left[positions[i]] = sent - sent;
    }
}

INLINE void follow_segment(const struct part *part, struct segment s,
                           float *own, const float *value, uint8_t *codes) {
    uint16_t positions[SEGMENT + 8];
    float change[SEGMENT];
    for (size_t i = 0; i < s.length; i++) change[i] = value[i] - own[i];
    choose(part, s, change, codes, positions);
    uint8_t *values = codes + values_at(part) + 4 * s.before;
    for (size_t i = 0; i < s.sent; i++) memcpy(values + 4 * i, change + positions[i], 4);
    for (size_t i = 0; i < s.sent; i++) own[positions[i]] += change[positions[i]];
}

INLINE void add_segment(const struct part *part, struct segment s, float *out,
                        const uint8_t *codes) {
    uint16_t positions[SEGMENT];
    chosen(part, s, codes, positions);
    const uint8_t *values = codes + values_at(part) + 4 * s.before;
    for (size_t i = 0; i < s.sent; i++) {
        float value;
        memcpy(&value, values + 4 * i, 4);
        out[positions[i]] += value;
    }
}

INLINE void average_segment(const struct part *part, struct segment s, float *out,
                            const uint8_t *const *pushes, size_t workers) {
    memset(out, 0, 4 * s.length);
    for (size_t worker = 0; worker < workers; worker++)
        add_segment(part, s, out, pushes[worker]);
    if (workers > 1)
        for (size_t i = 0; i < s.length; i++) out[i] /= (float)workers;
}

INLINE void encode_part(int follows, float *own, const float *given, uint8_t *codes,
                        const struct part *part) {
    pad(part, codes);
    for (size_t i = 0; i < part->total; i += SEGMENT) {
        struct segment s = segment_at(part, i);
        if (follows) follow_segment(part, s, own + i, given + i, codes);
        else compress_segment(part, s, own + i, given + i, codes);
    }
}

INLINE void add_part(float *out, const uint8_t *codes, const struct part *part) {
    for (size_t i = 0; i < part->total; i += SEGMENT)
        add_segment(part, segment_at(part, i), out + i, codes);
}

INLINE void average_part(float *out, const uint8_t *const *pushes, size_t workers,
                         const struct part *part) {
    for (size_t i = 0; i < part->total; i += SEGMENT)
        average_segment(part, segment_at(part, i), out + i, pushes, workers);
}

#endif
