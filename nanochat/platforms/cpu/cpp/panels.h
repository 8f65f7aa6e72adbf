// Products of fp32 rows with a matrix that is stored in panels, as fp32, bf16 or 8-bit numbers.
#pragma once

#include "common.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef float Eight __attribute__((vector_size(32)));

inline Eight eight(const float *x) {
    Eight y;
    std::memcpy(&y, x, sizeof(y));
    return y;
}

inline Eight eight(const bf16 *x) {
    typedef uint16_t Halves __attribute__((vector_size(16)));
    typedef uint32_t Words __attribute__((vector_size(32)));
    Halves halves;
    std::memcpy(&halves, x, sizeof(halves));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Eight y;
    std::memcpy(&y, &words, sizeof(y));
    return y;
}

inline Eight eight(const int8_t *x) {
#ifdef __AVX2__  // compilers translate the loop below to one number at a time
    return (Eight)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
    Eight y;
    for (int i = 0; i < 8; i++) y[i] = float(x[i]);
    return y;
#endif
}

constexpr int64_t PANEL = 16;         // outputs whose weights are stored together, input after input
constexpr int64_t TOGETHER = 6;       // rows of x multiplied together, as many as fit in the registers of AVX2
constexpr int64_t FEW = 3;            // rows of x that are multiplied with two panels together, or alone with four
constexpr int64_t CACHED_ROWS = 96;   // rows of x that stay in the cache while all panels pass
constexpr int64_t AHEAD_BYTES = 1024; // how far ahead to prefetch with few rows, which wait for memory

// Multiplies ROWS rows of x with COUNT adjacent panels, [inputs][PANEL] numbers each. Each sum is added up in the order
// of the inputs, so that a row's results do not depend on the rows beside it.
template <int ROWS, int COUNT, class W>
void multiply_panels(const float *x, const W *w, float *y, int64_t y_stride, int64_t inputs) {
    constexpr int PARTS = 2 * COUNT;
    Eight sums[ROWS][PARTS] = {};
    for (int64_t i = 0; i < inputs; i++, w += PANEL) {
        Eight weights[PARTS];
        for (int part = 0; part < PARTS; part++) {
            const W *from = w + part / 2 * PANEL * inputs + part % 2 * 8;
            if (ROWS < TOGETHER && part % 2 == 0) __builtin_prefetch((const char *)from + AHEAD_BYTES);
            weights[part] = eight(from);
        }
        for (int row = 0; row < ROWS; row++) {
            const float one = x[row * inputs + i];
            for (int part = 0; part < PARTS; part++) sums[row][part] += one * weights[part];
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < PARTS; part++) std::memcpy(y + row * y_stride + 8 * part, &sums[row][part], 32);
}

// Returns how many panels are multiplied together with `rows` rows, if that many are `left`. Several sums that do not
// wait for each other hide the time of an addition, and several streams from memory hide its latency.
inline int64_t panels_together(int64_t rows, int64_t left) {
    const int64_t count = rows == 1 ? 4 : rows <= FEW ? 2 : 1;
    return count <= left ? count : 1;
}

// Calls multiply_panels() for up to TOGETHER rows and as many panels as panels_together() returns.
template <class W>
void some_panels(int64_t rows, int64_t count, const float *x, const W *w, float *y, int64_t y_stride, int64_t inputs) {
    using Product = void (*)(const float *, const W *, float *, int64_t, int64_t);
    static constexpr Product one[TOGETHER] = {multiply_panels<1, 1, W>, multiply_panels<2, 1, W>,
                                              multiply_panels<3, 1, W>, multiply_panels<4, 1, W>,
                                              multiply_panels<5, 1, W>, multiply_panels<6, 1, W>};
    static constexpr Product two[FEW] = {multiply_panels<1, 2, W>, multiply_panels<2, 2, W>, multiply_panels<3, 2, W>};
    const Product product = count == 4 ? multiply_panels<1, 4, W> : count == 2 ? two[rows - 1] : one[rows - 1];
    product(x, w, y, y_stride, inputs);
}

// Multiplies x (rows, inputs) with the panels that hold the outputs from `first` to `last`; y has `outputs` columns.
template <class W>
void multiply_some(const float *x, const W *w, float *y, int64_t rows, int64_t first, int64_t last, int64_t outputs,
                   int64_t inputs) {
    const bool widens = sizeof(W) < sizeof(float) && rows > CACHED_ROWS / 2;  // storing what is widened pays off
    std::vector<float> wide(widens ? PANEL * inputs : 0);
    for (int64_t start = 0; start < rows; start += CACHED_ROWS) {
        const int64_t end = std::min(rows, start + CACHED_ROWS);
        for (int64_t output = first; output < last;) {
            const W *panel = w + output * inputs;
            const int64_t count = panels_together(rows, (last - output) / PANEL);
            for (int64_t i = 0; i < int64_t(wide.size()); i += 8) {
                const Eight numbers = eight(panel + i);
                std::memcpy(&wide[i], &numbers, sizeof(numbers));
            }
            float edge[TOGETHER * PANEL];  // the last panel may have outputs that y lacks
            const int64_t real = std::min(count * PANEL, outputs - output);
            for (int64_t row = start; row < end;) {
                const int64_t left = end - row;
                const int64_t some = left == TOGETHER + 1 || left == TOGETHER + 2 ? 4 : std::min(left, TOGETHER);
                float *to = y + row * outputs + output;
                const bool fits = real == count * PANEL;
                float *sums = fits ? to : edge;
                const int64_t stride = fits ? outputs : count * PANEL;
                if (widens)
                    some_panels(some, count, x + row * inputs, (const float *)wide.data(), sums, stride, inputs);
                else
                    some_panels(some, count, x + row * inputs, panel, sums, stride, inputs);
                if (!fits)
                    for (int64_t i = 0; i < some; i++) std::memcpy(to + i * outputs, edge + i * stride, 4 * real);
                row += some;
            }
            output += count * PANEL;
        }
    }
}

// Multiplies x (rows, inputs) with all panels. With `scales`, each output has a factor of its own.
template <class W>
void panels(const float *x, const W *w, const float *scales, float *y, int64_t threads, int64_t rows, int64_t outputs,
            int64_t inputs) {
    const int64_t pairs = (outputs + 2 * PANEL - 1) / (2 * PANEL);
    const int64_t stored = (outputs + PANEL - 1) / PANEL * PANEL;
    parts(pairs, rows * outputs * inputs / 8, threads, [=](int64_t begin, int64_t end) {
        const int64_t first = 2 * PANEL * begin, last = std::min(2 * PANEL * end, stored);
        multiply_some(x, w, y, rows, first, last, outputs, inputs);
        if (scales)
            for (int64_t row = 0; row < rows; row++)
                for (int64_t i = first; i < std::min(last, outputs); i++) y[row * outputs + i] *= scales[i];
    });
}

}  // namespace
