// Products in 8-bit integers for training: bf16 activations times fp32 matrices, and the gradients of these matrices.
// With AVX512-VNNI they are twice as fast as bf16 products. On other processors, plain C++ gives the same numbers.
//
// Numbers that are rounded together share a factor that makes the largest of them 127: each row of activations, each
// output of a matrix and, in gradients, each channel of TOKENS tokens. Sums of integers are exact, so a row of a
// product depends only on its own row of activations. If a number is not finite, all results that depend on it are NaN.
#pragma once

#include <type_traits>

#include "common.h"

namespace {
namespace int8 {

constexpr int64_t OUTPUTS = 32;  // channels that are stored together, in groups of four numbers of each channel
#ifdef __AVX512F__
constexpr int64_t TOGETHER = 12;  // rows that are multiplied with them together, as many as fit in the registers
#else
constexpr int64_t TOGETHER = 4;
#endif
constexpr int64_t LANES = 16;

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

template <class V> inline V vector_at(const void *x) {
    V loaded;
    std::memcpy(&loaded, x, sizeof(V));
    return loaded;
}

inline floats lanes(const float *x) { return vector_at<floats>(x); }
inline floats lanes(const bf16 *x) { return (floats)(__builtin_convertvector(vector_at<shorts>(x), ints) << 16); }

inline ints magnitudes(floats x) { return (ints)x & 0x7fffffff; }  // ordered by magnitude, with NaN above all others
inline ints larger(ints a, ints b) { return a > b ? a : b; }

// Rounds numbers below 2^22 to the nearest integers, ties to even, by adding 1.5 * 2^23.
inline ints nearest(floats x) { return (ints)(x + 12582912.0f) - 0x4b400000; }

// The factor `up` scales the largest magnitude to 127, and `down` reverses it. Both are 0 if all numbers are zero. If a
// number is not finite, `up` is 0 and `down` is NaN.
struct Factor {
    float up, down;

    explicit Factor(int32_t most) {
        const float size = vector_at<float>(&most);
        up = most < 0x7f800000 && size > 0 ? 127.0f / size : 0.0f;
        down = most >= 0x7f800000 ? NAN : up > 0 ? 1.0f / up : 0.0f;
    }
};

// Returns x times `up` as integers, with zeros for factors of 0 even if x is not finite.
inline ints integers(floats x, floats up) { return up > 0.0f ? nearest(x * up) : ints{}; }

// Converts a row to integers, and returns the factor that restores its scale.
inline float row_of(const bf16 *x, int8_t *y, int64_t count, int32_t &total) {
    ints most{}, sums{};
    for (int64_t i = 0; i < count; i += LANES) most = larger(most, magnitudes(lanes(x + i)));
    int32_t one = 0;
    for (int i = 0; i < LANES; i++) one = std::max(one, most[i]);
    const Factor factor(one);
    for (int64_t i = 0; i < count; i += LANES) {
        const ints numbers = integers(lanes(x + i), factor.up - floats{});
        sums += numbers;
        const bytes narrow = __builtin_convertvector(numbers, bytes);
        std::memcpy(y + i, &narrow, sizeof(narrow));
    }
    total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    return factor.down;
}

// Converts LANES columns to integers in the layout [rows / 4][LANES][4], with `step` numbers between groups of four
// rows, `lift` (0 or 128) added, and zeros after the last row up to `padded` rows. Also writes the factor of each
// column and the sum of its integers.
template <class T>
void columns_of(const T *x, int64_t stride, int64_t rows, int64_t padded, uint8_t *y, int64_t step, int32_t lift,
                float *factors, int32_t *totals) {
    ints most{}, sums{};
    for (int64_t row = 0; row < rows; row++) most = larger(most, magnitudes(lanes(x + row * stride)));
    floats up;
    for (int i = 0; i < LANES; i++) {
        const Factor factor(most[i]);
        up[i] = factor.up, factors[i] = factor.down;
    }
    for (int64_t row = 0; row < padded; row += 4, y += step) {
        ints fours{};
        for (int64_t one = 0; one < 4; one++) {
            const ints numbers = row + one < rows ? integers(lanes(x + (row + one) * stride), up) : ints{};
            sums += numbers;
            fours |= ((numbers + lift) & 0xff) << (8 * one);
        }
        std::memcpy(y, &fours, sizeof(fours));
    }
    if (totals) std::memcpy(totals, &sums, sizeof(sums));
}

// Packs a matrix for product() as [outputs / OUTPUTS][inputs / 4][OUTPUTS][4] integers, each with 128 added. w has the
// shape (outputs, inputs), or (inputs, outputs) with `back`.
void pack(const float *w, uint8_t *packed, float *factors, int64_t outputs, int64_t inputs, bool back,
               int64_t threads) {
    parts(outputs / LANES, 8 * outputs * inputs, threads, [=](int64_t first, int64_t last) {
        std::vector<float> turned(back ? 0 : LANES * inputs);
        for (int64_t at = first * LANES; at < last * LANES; at += LANES) {
            for (int64_t i = 0; !back && i < inputs; i++)
                for (int64_t j = 0; j < LANES; j++) turned[i * LANES + j] = w[(at + j) * inputs + i];
            uint8_t *to = packed + at / OUTPUTS * OUTPUTS * inputs + at % OUTPUTS * 4;
            columns_of(back ? w + at : turned.data(), back ? outputs : LANES, inputs, inputs, to, 4 * OUTPUTS, 128,
                         factors + at, nullptr);
        }
    });
}

// Returns sums plus the products of the four unsigned bytes in each element of w and the four signed bytes in `four`.
inline ints dot(ints sums, ints w, int32_t four) {
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; i++) sums += (w >> (8 * i) & 0xff) * int32_t(int8_t(four >> (8 * i)));
    return sums;
#endif
}

// Computes exact products of COUNT rows with OUTPUTS channels. Calls finish(row, half, sums) with 16 channels at a
// time, where each sum runs over i < 4 * steps of w[i / 4][channel][i % 4] times
// x[row * x_row + i / 4 * x_step + i % 4].
template <int COUNT, class Finish>
inline void exact_sums(const int8_t *x, int64_t x_row, int64_t x_step, const uint8_t *w, int64_t steps, Finish finish) {
    ints sums[COUNT][2] = {};  // stays in registers if every loop over it is unrolled
    for (int64_t step = 0; step < steps; step++, x += x_step, w += 4 * OUTPUTS) {
        const ints low = vector_at<ints>(w), high = vector_at<ints>(w + 4 * LANES);
#pragma GCC unroll 12
        for (int row = 0; row < COUNT; row++) {
            const int32_t four = vector_at<int32_t>(x + row * x_row);
            sums[row][0] = dot(sums[row][0], low, four);
            sums[row][1] = dot(sums[row][1], high, four);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < COUNT; row++) finish(row, 0, sums[row][0]), finish(row, 1, sums[row][1]);
}

// Calls work(count, first) for groups of rows. `count` is a compile-time constant.
template <class Work> inline void in_groups(int64_t rows, Work work) {
    int64_t row = 0;
    for (; row + TOGETHER <= rows; row += TOGETHER) work(std::integral_constant<int, TOGETHER>(), row);
    for (; row + 4 <= rows; row += 4) work(std::integral_constant<int, 4>(), row);
    for (; row < rows; row++) work(std::integral_constant<int, 1>(), row);
}

inline void write(bf16 *y, floats x) {
#ifdef __AVX512BF16__
    store(y, (__m512)x);
#else
    for (int i = 0; i < LANES; i++) narrow(x[i], y[i]);
#endif
}

// Sets y (rows, outputs) to x (rows, inputs) times a packed matrix, or to the squared ReLU of that.
template <bool SQUARED>
void product(const bf16 *x, const uint8_t *packed, const float *factors, bf16 *y, int64_t rows, int64_t outputs,
                  int64_t inputs, int64_t threads) {
    constexpr int64_t SOME = 8 * TOGETHER;  // rows whose integers stay in the cache for all blocks of outputs
    parts((rows + SOME - 1) / SOME, rows * outputs * inputs / 64, threads, [=](int64_t first, int64_t last) {
        std::vector<int8_t> numbers(SOME * inputs);
        float of_rows[SOME];
        int32_t totals[SOME];
        for (int64_t from = first * SOME; from < std::min(last * SOME, rows); from += SOME) {
            const int64_t some = std::min(SOME, rows - from);
            for (int64_t i = 0; i < some; i++)
                of_rows[i] = row_of(x + (from + i) * inputs, &numbers[i * inputs], inputs, totals[i]);
            for (int64_t j = 0; j < outputs; j += OUTPUTS)
                in_groups(some, [&](auto count, int64_t i) {
                    auto finish = [&](int row, int half, ints sums) {
                        const int64_t at = j + half * LANES;
                        floats value = __builtin_convertvector(sums - 128 * totals[i + row], floats);
                        value = value * of_rows[i + row] * lanes(factors + at);
                        if (SQUARED) value = value < 0.0f ? floats{} : value * value;  // NaN stays NaN
                        write(y + (from + i + row) * outputs + at, value);
                    };
                    const int8_t *own = &numbers[i * inputs];
                    exact_sums<count.value>(own, inputs, 4, packed + j * inputs, inputs / 4, finish);
                });
        }
    });
}

constexpr int64_t TOKENS = 256;  // tokens whose numbers in a channel share a factor

// Activations as integers, in the layout [blocks of TOKENS][channels / width][TOKENS / 4][width][4]. The last group of
// channels may be narrower than `width`.
struct Channels {
    int64_t tokens, channels, width;
    int32_t lift;  // added to every integer
    int64_t blocks = (tokens + TOKENS - 1) / TOKENS;
    std::vector<uint8_t> numbers = std::vector<uint8_t>(blocks * channels * TOKENS);
    std::vector<float> factors = std::vector<float>(blocks * channels);
    std::vector<int32_t> totals = std::vector<int32_t>(blocks * channels);

    // Returns the group of channels that begins with `channel`.
    uint8_t *group(int64_t block, int64_t channel) { return &numbers[(block * channels + channel) * TOKENS]; }

    void make(const bf16 *x, int64_t block) {
        const int64_t begin = block * TOKENS, count = std::min(TOKENS, tokens - begin);
        for (int64_t at = 0; at < channels; at += LANES) {
            const int64_t first = at / width * width, step = 4 * std::min(width, channels - first);
            const int64_t own = block * channels + at;
            columns_of(x + begin * channels + at, channels, count, TOKENS, group(block, first) + 4 * (at - first),
                         step, lift, &factors[own], &totals[own]);
        }
    }
};

// Sets dw (outputs, inputs) to g (tokens, outputs) transposed times x (tokens, inputs).
void gradient(const bf16 *g, const bf16 *x, float *dw, int64_t tokens, int64_t outputs, int64_t inputs,
                   int64_t threads) {
    constexpr int64_t SOME = 4 * TOGETHER;  // outputs whose integers stay in the cache for all inputs
    Channels left{tokens, outputs, SOME, 0}, right{tokens, inputs, OUTPUTS, 128};
    parts(left.blocks, 4 * tokens * (outputs + inputs), threads, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; block++) left.make(g, block), right.make(x, block);
    });
    parts((outputs + SOME - 1) / SOME, tokens * outputs * inputs / 64, threads, [&](int64_t first, int64_t last) {
        for (int64_t from = first * SOME; from < std::min(last * SOME, outputs); from += SOME)
            for (int64_t block = 0; block < left.blocks; block++)
                for (int64_t j = 0; j < inputs; j += OUTPUTS) {
                    const int64_t some = std::min(SOME, outputs - from), base = block * outputs + from;
                    in_groups(some, [&](auto count, int64_t i) {
                        auto finish = [&](int row, int half, ints sums) {
                            const int64_t at = j + half * LANES;
                            float *to = dw + (from + i + row) * inputs + at;
                            floats value =
                                __builtin_convertvector(sums - 128 * left.totals[base + i + row], floats);
                            value = value * left.factors[base + i + row] * lanes(&right.factors[block * inputs + at]);
                            if (block) value += lanes(to);
                            std::memcpy(to, &value, sizeof(value));
                        };
                        const int8_t *own = (const int8_t *)left.group(block, from) + 4 * i;
                        exact_sums<count.value>(own, 4, 4 * some, right.group(block, j), TOKENS / 4, finish);
                    });
                }
    });
}

}  // namespace int8
}  // namespace
