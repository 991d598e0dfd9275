/* The arithmetic of PowerSGD between the products of matrices: the bits of
   poseidon/exchange/lossy/low_rank_matrix.py, each number read once.

   A matrix of n rows and m columns is b times q: b has n rows of r numbers, q has r rows of m. */

#include <stddef.h>

#include "levels.h"

/* The sum of numbers, which are overwritten: the upper half is added to the lower one until one
   number is left. */
INLINE double folded(double *x, size_t n) {
    while (n > 1) {
        size_t half = n / 2;
        for (size_t i = 0; i < half; i++) x[i] += x[n - half + i];
        n -= half;
    }
    return x[0];
}

INLINE double dot(const double *a, const double *b, double *scratch, size_t n) {
    for (size_t i = 0; i < n; i++) scratch[i] = a[i] * b[i];
    return folded(scratch, n);
}

INLINE void orthonormal(
    const float *p, float *out, double *columns, double *scratch, size_t r, size_t n,
    double dependent) {
    for (size_t k = 0; k < r; k++) {
        double *column = columns + k * n;
        for (size_t i = 0; i < n; i++) column[i] = p[k * n + i];
        double before = __builtin_sqrt(dot(column, column, scratch, n));
        for (int pass = 0; pass < 2; pass++)
            for (size_t e = 0; e < k; e++) {
                const double *earlier = columns + e * n;
                double along = dot(earlier, column, scratch, n);
                for (size_t i = 0; i < n; i++) column[i] -= along * earlier[i];
            }
        double left = __builtin_sqrt(dot(column, column, scratch, n));
        if (left == 0.0 || left <= dependent * before)
            for (size_t i = 0; i < n; i++) column[i] = 0.0;
        else
            for (size_t i = 0; i < n; i++) column[i] /= left;
        for (size_t i = 0; i < n; i++) out[i * r + k] = (float)column[i];
    }
}

INLINE void product_row(
    const float *restrict b, const float *restrict q, float *restrict left, float *restrict out,
    size_t m, size_t r) {
    for (size_t j = 0; j < m; j++) {
        float sum = b[0] * q[j];
        for (size_t k = 1; k < r; k++) sum += b[k] * q[k * m + j];
        left[j] -= sum;
        out[j] = sum;
    }
}

INLINE void product(
    const float *b, const float *q, float *left, float *out, size_t n, size_t m, size_t r) {
    for (size_t i = 0; i < n; i++, b += r, left += m, out += m)
        switch (r) {
        case 1: product_row(b, q, left, out, m, 1); break;
        case 2: product_row(b, q, left, out, m, 2); break;
        case 4: product_row(b, q, left, out, m, 4); break;
        default: product_row(b, q, left, out, m, r);
        }
}

#define LEVEL(name, target)                                                                       \
    target static void orthonormal_##name(                                                        \
        const float *p, float *out, double *columns, double *scratch, size_t r, size_t n,         \
        double dependent)                                                                         \
    { orthonormal(p, out, columns, scratch, r, n, dependent); }                                   \
    target static void product_##name(                                                            \
        const float *b, const float *q, float *left, float *out, size_t n, size_t m, size_t r)    \
    { product(b, q, left, out, n, m, r); }
LEVELS(LEVEL)

/* out (n x r) = orthonormal columns that span the r rows of p (r x n); scratch: (r + 1) n */
EXPORT void low_rank_orthonormal(
    int level, const float *p, float *out, double *scratch, size_t r, size_t n, double dependent) {
    (void)level;
    PICK(orthonormal)(p, out, scratch, scratch + r * n, r, n, dependent);
}

/* out (n x m) = b (n x r) times q (r x m); left -= out */
EXPORT void low_rank_product(
    int level, const float *b, const float *q, float *left, float *out, size_t n, size_t m,
    size_t r) {
    (void)level;
    PICK(product)(b, q, left, out, n, m, r);
}
