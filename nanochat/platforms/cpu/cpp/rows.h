// A few rows of fp32 numbers times a matrix in torch's layout, which is read from memory once.
#pragma once

#include "common.h"

namespace {
namespace rows {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
constexpr int64_t STEP = 32;  // inputs that are multiplied at a time, each vector of them into a sum of its own
constexpr int64_t SUMS = STEP / LANES;
constexpr int64_t OUTPUTS = 16;  // outputs whose weights stay in the cache while all rows are multiplied with them
constexpr int64_t TOGETHER = 2;  // rows that are multiplied with an output together

typedef float floats __attribute__((vector_size(4 * LANES)));

inline floats lanes(const float *x) {
    floats loaded;
    std::memcpy(&loaded, x, sizeof(floats));
    return loaded;
}

// Returns the sum of STEP numbers. It is not inline, so that its order is the same for any number of rows.
__attribute__((noinline)) float total(const float *numbers) {
    float sum = 0;
    for (int64_t lane = 0; lane < STEP; lane++) sum += numbers[lane];
    return sum;
}

// Multiplies ROWS rows of x with the weights of one output.
template <int ROWS>
void output(const float *x, const float *w, float *y, int64_t y_stride, int64_t inputs) {
    floats sums[ROWS][SUMS] = {};
    int64_t i = 0;
    for (; i + STEP <= inputs; i += STEP)
        for (int part = 0; part < SUMS; part++) {
            const floats weights = lanes(w + i + part * LANES);
            for (int row = 0; row < ROWS; row++)
                sums[row][part] += weights * lanes(x + row * inputs + i + part * LANES);
        }
    for (int row = 0; row < ROWS; row++) {
        float numbers[STEP];
        std::memcpy(numbers, sums[row], sizeof(numbers));
        float sum = total(numbers);
        for (int64_t rest = i; rest < inputs; rest++) sum += w[rest] * x[row * inputs + rest];
        y[row * y_stride] = sum;
    }
}

}  // namespace rows

// Multiplies `count` rows of x with a matrix of `outputs` rows. A row's outputs do not depend on the other rows.
void multiply(const float *x, const float *w, float *y, int64_t count, int64_t outputs, int64_t inputs) {
    for (int64_t begin = 0; begin < outputs; begin += rows::OUTPUTS) {
        const int64_t end = std::min(begin + rows::OUTPUTS, outputs);
        for (int64_t row = 0; row < count; row += rows::TOGETHER) {
            const int64_t left = count - row;
            auto some = left == 1 ? rows::output<1> : rows::output<2>;
            for (int64_t out = begin; out < end; out++)
                some(x + row * inputs, w + out * inputs, y + row * outputs + out, outputs, inputs);
        }
    }
}

}  // namespace
