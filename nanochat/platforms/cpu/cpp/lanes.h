// Vectors of fp32 numbers, heads of tokens, and the products of blocks of matrices that attention in fp32 consists of.
//
// Vectors are the compiler's own type and have the size of the processor's registers, so one source serves all
// processors.
#pragma once

#include "common.h"

namespace {

constexpr int64_t SIDE = 64;  // queries in a block, and keys in a block
constexpr float LOG2E = 1.44269504f;

struct Range {
    int64_t from, to;
    bool holds(int64_t all) const { return from == 0 && to == all; }
};

// A tensor (B, T, H, D) whose rows are `row` numbers apart and whose tokens are `token` numbers apart. The heads of a
// token are adjacent.
template <class T> struct Heads {
    T *x;
    int64_t row, token;
    T *at(int64_t b, int64_t t, int64_t head, int64_t size) const { return x + b * row + t * token + head * size; }
};

// Copies `count` tokens of a head, so that they are contiguous.
void gather(const float *x, int64_t token, int64_t count, int64_t size, float *to) {
    for (int64_t t = 0; t < count; t++) std::memcpy(to + t * size, x + t * token, size * sizeof(float));
}

#if defined(__AVX512F__)
constexpr int LANES = 16, TALL = 12;  // numbers in a vector, and rows of two vectors that fit in the registers
#elif defined(__AVX2__)
constexpr int LANES = 8, TALL = 6;
#else
constexpr int LANES = 4, TALL = 6;
#endif
constexpr int64_t WIDE = 2 * LANES;  // columns of a product computed together
constexpr int VECTORS = SIDE / LANES;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

inline Lanes lanes(const float *x) {
    Lanes y;
    std::memcpy(&y, x, sizeof(y));
    return y;
}

inline void put(float *y, Lanes x) { std::memcpy(y, &x, sizeof(x)); }

// Returns x in lanes whose column is seen, and `other` in the rest. `column` is the column of the first lane.
inline Lanes where(Range seen, int column, Lanes x, float other) {
    Whole place;
    for (int i = 0; i < LANES; i++) place[i] = column + i;
    return (place >= int(seen.from)) & (place < int(seen.to)) ? x : Lanes{} + other;
}

inline Lanes larger(Lanes x, Lanes y) { return x > y ? x : y; }

// Returns 2^x for x below 0.5, with a relative error below 3e-7. Below -126 it returns 2^-126.
inline Lanes power_of_two_below(Lanes x) {
    x = x < -126.0f ? Lanes{} - 126.0f : x;  // keeps NaN
    const Whole whole = __builtin_convertvector(x - 0.5f, Whole);  // to nearest, as the conversion truncates
    const Lanes r = x - __builtin_convertvector(whole, Lanes);
    Lanes y = Lanes{} + 1.5353362e-4f;
    for (float c : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) y = y * r + c;
    return y * (Lanes)((whole + 127) << 23);
}

// Sets ROWS rows and WIDE columns of c to a times b, or adds the product to them. Number p of row i of a is at
// a + i * row + p * step.
template <int ROWS, bool ADD>
void few_rows(const float *a, int64_t row, int64_t step, const float *b, int64_t b_row, float *c, int64_t c_row,
              int64_t count) {
    Lanes sums[ROWS][2];
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < 2; part++) sums[i][part] = ADD ? lanes(c + i * c_row + part * LANES) : Lanes{};
    for (int64_t p = 0; p < count; p++, a += step, b += b_row) {
        const Lanes one = lanes(b), two = lanes(b + LANES);
        for (int i = 0; i < ROWS; i++) {
            sums[i][0] += a[i * row] * one;
            sums[i][1] += a[i * row] * two;
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < 2; part++) put(c + i * c_row + part * LANES, sums[i][part]);
}

template <bool ADD, int ROWS = TALL>
void at_most(int64_t rows, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row, float *c,
             int64_t c_row, int64_t count) {
    if constexpr (ROWS > 0) {
        if (rows >= ROWS)
            few_rows<ROWS, ADD>(a, row, step, b, b_row, c, c_row, count);
        else
            at_most<ADD, ROWS - 1>(rows, a, row, step, b, b_row, c, c_row, count);
    }
}

// Sets c (rows, columns) to a times b, or adds the product to c. needed(i) returns the range of rows of b that rows i
// to i + TALL - 1 of a need, because these rows of a are zero elsewhere.
template <bool ADD, class Needed>
void product(int64_t rows, int64_t columns, const float *a, int64_t row, int64_t step, const float *b, int64_t b_row,
             float *c, int64_t c_row, Needed needed) {
    for (int64_t column = 0; column < columns; column += WIDE)
        for (int64_t i = 0; i < rows; i += TALL) {
            const Range some = needed(i);
            at_most<ADD>(rows - i, a + i * row + some.from * step, row, step, b + some.from * b_row + column, b_row,
                         c + i * c_row + column, c_row, some.to - some.from);
        }
}

}  // namespace
