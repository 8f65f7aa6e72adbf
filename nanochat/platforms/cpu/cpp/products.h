// Products of bf16 numbers with AVX512-BF16: a few rows times a matrix, and attention of many queries.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

constexpr int64_t BLOCK = 64;  // outputs whose weights are stored together, in pairs of inputs
constexpr int64_t AHEAD = 4096;  // how many numbers ahead to prefetch

// Multiplies ROWS rows of x with one block of a matrix, [inputs / 2][BLOCK][2] numbers. With FETCH, the block is
// prefetched from memory.
template <int ROWS, bool FETCH, class Y>
void few_rows(const bf16 *x, int64_t x_stride, const bf16 *w, Y *y, int64_t y_stride, int64_t inputs) {
    __m512 sums[ROWS][4];
    for (auto &row : sums)
        for (auto &sum : row) sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2, w += 2 * BLOCK) {
        // The processor's own prefetching stops at the end of each page.
        if (FETCH)
            for (int line = 0; line < 4; line++) _mm_prefetch((const char *)(w + AHEAD + 32 * line), _MM_HINT_T0);
        __m512bh weights[4];
        for (int part = 0; part < 4; part++) weights[part] = (__m512bh)_mm512_loadu_si512(w + 32 * part);
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            std::memcpy(&pair, x + row * x_stride + i, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int part = 0; part < 4; part++)
                sums[row][part] = _mm512_dpbf16_ps(sums[row][part], weights[part], both);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < 4; part++) store(y + row * y_stride + 16 * part, sums[row][part]);
}

// Multiplies x with a matrix in oneDNN's bf16 layout, which is one block of outputs after the other.
void multiply(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int64_t outputs, int64_t inputs) {
    for (int64_t output = 0; output < outputs; output += BLOCK, w += BLOCK * inputs)
        for (int64_t row = 0; row < rows; row += 4) {  // a second group of rows finds the block in the cache
            const int64_t left = rows - row;
            auto some = left == 1   ? few_rows<1, true, bf16>
                        : left == 2 ? few_rows<2, true, bf16>
                        : left == 3 ? few_rows<3, true, bf16>
                                    : few_rows<4, true, bf16>;
            some(x + row * inputs, inputs, w, y + row * outputs + output, outputs, inputs);
        }
}

constexpr int64_t QUERIES = 6;  // queries multiplied together with a block of keys, as many as fit in the registers

// Calls few_rows() for up to QUERIES rows.
inline void some_rows(int64_t rows, const bf16 *x, int64_t x_stride, const bf16 *w, float *y, int64_t y_stride,
                      int64_t inputs) {
    using Rows = void (*)(const bf16 *, int64_t, const bf16 *, float *, int64_t, int64_t);
    static constexpr Rows counts[QUERIES] = {few_rows<1, false, float>, few_rows<2, false, float>,
                                             few_rows<3, false, float>, few_rows<4, false, float>,
                                             few_rows<5, false, float>, few_rows<6, false, float>};
    counts[rows - 1](x, x_stride, w, y, y_stride, inputs);
}

// Converts a query's scores into unnormalized weights, and returns their sum. Of the positions [0, end), those from
// `from` to `to` get exp((score - largest score) scale), and the others get zero.
inline float shares(const float *scores, bf16 *y, int64_t from, int64_t to, int64_t end, float scale) {
    const float most = largest(scores + from, to - from);
    float total = 0;
    std::memset(y, 0, end * sizeof(bf16));
    for (int64_t i = from; i < to; i++) {
        const float share = exponential((scores[i] - most) * scale);
        total += share;
        narrow(share, y[i]);
    }
    return total;
}

// A thread's buffers for the queries of one head: keys and values in blocks, scores, weights and sums.
struct Blocks {
    std::vector<bf16> k, v, parts;
    std::vector<float> scores, sums;
};

// Computes attention for `count` queries per row. The first query of a row has position firsts[row] among the row's
// keys. Heads are adjacent in memory and have `size` numbers, a multiple of BLOCK.
void attend_many(const bf16 *q, const bf16 *k, const bf16 *v, const int64_t *firsts, bf16 *y, int64_t threads,
                 int64_t q_row, int64_t q_stride, int64_t k_row, int64_t k_stride, int64_t v_row, int64_t v_stride,
                 int64_t rows, int64_t count, int64_t heads, int64_t kv_heads, int64_t size, int64_t window,
                 float scale) {
    const int64_t group = heads / kv_heads;
    parts(rows * kv_heads, rows * count * count * heads, threads, [=](int64_t begin, int64_t end) {
        Blocks made;
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t row = pair / kv_heads, kv = pair % kv_heads, place = firsts[row], keys = place + count;
            const int64_t padded = (keys + BLOCK - 1) / BLOCK * BLOCK;
            const int64_t start = std::max<int64_t>(place - window, 0) / BLOCK * BLOCK;  // no query sees earlier keys
            made.k.assign(padded * size, bf16{0});
            made.v.assign(padded * size, bf16{0});
            made.parts.resize(QUERIES * padded);
            made.scores.resize(QUERIES * padded);
            made.sums.resize(QUERIES * size);
            for (int64_t t = start; t < keys; t++) {
                const bf16 *key = k + row * k_row + t * k_stride + kv * size;
                const bf16 *value = v + row * v_row + t * v_stride + kv * size;
                bf16 *to = &made.k[t / BLOCK * BLOCK * size + t % BLOCK * 2];
                for (int64_t i = 0; i < size; i += 2) std::memcpy(to + i * BLOCK, key + i, 4);
                for (int64_t block = 0; block < size; block += BLOCK) {
                    bf16 *into = &made.v[block * padded + t / 2 * 2 * BLOCK + t % 2];
                    for (int64_t i = 0; i < BLOCK; i++) into[2 * i] = value[block + i];
                }
            }
            for (int64_t head = kv * group; head < (kv + 1) * group; head++)
                for (int64_t first = 0; first < count; first += QUERIES) {
                    const int64_t some = std::min(QUERIES, count - first), last = place + first + some;
                    const int64_t low = std::max<int64_t>(place + first - window, 0) / BLOCK * BLOCK;
                    const int64_t high = (last + BLOCK - 1) / BLOCK * BLOCK, span = high - low;
                    const bf16 *queries = q + row * q_row + first * q_stride + head * size;
                    for (int64_t t = low; t < high; t += BLOCK)
                        some_rows(some, queries, q_stride, &made.k[t * size], &made.scores[t - low], span, size);
                    float totals[QUERIES];
                    for (int64_t i = 0; i < some; i++) {
                        const int64_t own = place + first + i, from = std::max<int64_t>(own - window, 0);
                        totals[i] = shares(&made.scores[i * span], &made.parts[i * span], from - low, own + 1 - low,
                                           span, scale);
                    }
                    for (int64_t block = 0; block < size; block += BLOCK)
                        some_rows(some, made.parts.data(), span, &made.v[block * padded + low * BLOCK],
                                  &made.sums[block], size, span);
                    for (int64_t i = 0; i < some; i++) {
                        bf16 *out = y + ((row * count + first + i) * heads + head) * size;
                        const float inverse = 1.0f / totals[i];
                        for (int64_t j = 0; j < size; j++) narrow(made.sums[i * size + j] * inverse, out[j]);
                    }
                }
        }
    });
}

}  // namespace
