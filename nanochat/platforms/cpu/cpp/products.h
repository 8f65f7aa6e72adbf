// Products of bf16 numbers with AMX or AVX512-BF16: a few rows times a matrix, and attention of many queries.
#pragma once

#include <immintrin.h>

#include "common.h"
#include "tiles.h"

namespace {

constexpr int64_t BLOCK = 64;  // outputs whose weights are stored together, in pairs of inputs
constexpr int64_t AHEAD = 4096;  // how many bytes ahead to prefetch
constexpr int64_t MOST_ROWS = 16;  // of x that one tile holds

// Reads 32 weights as bf16 numbers, which hold every 8-bit integer exactly. Integers are stored as the even inputs of 16
// outputs, then the odd ones, since their order is restored faster by a shift than by an instruction that narrows.
inline __m512bh weights32(const bf16 *w) { return (__m512bh)_mm512_loadu_si512(w); }

inline __m512bh weights32(const int8_t *w) {
    const auto wide = [](const int8_t *from) {
        return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    };
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(wide(w), 16), wide(w + 16));
}

// Prefetches what lies AHEAD of `count` weights. The processor's own prefetching stops at the end of each page.
template <class W> inline void fetch(const W *w, int64_t count) {
    const char *from = (const char *)w + AHEAD;
    for (int64_t byte = 0; byte < count * int64_t(sizeof(W)); byte += 64) _mm_prefetch(from + byte, _MM_HINT_T0);
}

// Multiplies ROWS rows of x with one block of a matrix, [inputs / 2][BLOCK][2] numbers. With FETCH, the block is
// prefetched from memory.
template <int ROWS, bool FETCH, class W>
void rows_by_block(const bf16 *x, int64_t x_stride, const W *w, float *y, int64_t y_stride, int64_t inputs) {
    __m512 sums[ROWS][4];
    for (auto &row : sums)
        for (auto &sum : row) sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2, w += 2 * BLOCK) {
        if (FETCH) fetch(w, 2 * BLOCK);
        __m512bh weights[4];
        for (int part = 0; part < 4; part++) weights[part] = weights32(w + 32 * part);
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            std::memcpy(&pair, x + row * x_stride + i, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int part = 0; part < 4; part++)
                sums[row][part] = _mm512_dpbf16_ps(sums[row][part], weights[part], both);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < 4; part++) _mm512_storeu_ps(y + row * y_stride + 16 * part, sums[row][part]);
}

// Returns weights as bf16 numbers: themselves, or the integers converted into `space`.
inline const bf16 *in_bf16(const bf16 *w, bf16 *, int64_t) { return w; }

inline const bf16 *in_bf16(const int8_t *w, bf16 *space, int64_t count) {
    for (int64_t i = 0; i < count; i += 32) _mm512_storeu_si512(space + i, (__m512i)weights32(w + i));
    return space;
}

#ifdef __AMX_BF16__
// Multiplies the rows of x for which the thread's Tiles are configured with one block of a matrix, like rows_by_block().
// `inputs` is a multiple of 32.
template <bool FETCH, class W>
void tile_by_block(const bf16 *x, const W *w, float *y, int64_t inputs) {
    constexpr int64_t STEP = 32 * BLOCK, RIGHT = 2 * BLOCK * sizeof(bf16), MADE = BLOCK * sizeof(float);
    alignas(64) bf16 space[std::is_same_v<W, bf16> ? 1 : STEP];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < inputs; i += 32, w += STEP) {
        if (FETCH) fetch(w, STEP);
        const bf16 *right = in_bf16(w, space, STEP);
        _tile_loadd(4, x + i, inputs * sizeof(bf16));
        _tile_loadd(6, right, RIGHT);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + 32, RIGHT);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, right + 64, RIGHT);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, right + 96, RIGHT);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, y, MADE);
    _tile_stored(1, y + 16, MADE);
    _tile_stored(2, y + 32, MADE);
    _tile_stored(3, y + 48, MADE);
}
#endif

// Multiplies up to MOST_ROWS rows of x with one block. The thread's Tiles are configured for as many rows.
template <bool FETCH, class W>
void few_by_block(const bf16 *x, const W *w, float *y, int64_t rows, int64_t inputs) {
#ifdef __AMX_BF16__
    if (has_tiles && inputs % 32 == 0) return tile_by_block<FETCH>(x, w, y, inputs);
#endif
    for (int64_t row = 0; row < rows; row += 4) {  // a second group of rows finds the block in the cache
        const int64_t left = rows - row;
        auto some = left == 1   ? rows_by_block<1, FETCH, W>
                    : left == 2 ? rows_by_block<2, FETCH, W>
                    : left == 3 ? rows_by_block<3, FETCH, W>
                                : rows_by_block<4, FETCH, W>;
        some(x + row * inputs, inputs, w, y + row * BLOCK, BLOCK, inputs);
    }
}

// Multiplies rows of x with a matrix that is stored in blocks, one after the other. With `scales`, each output has a
// factor of its own. oneDNN stores bf16 matrices so, too.
template <class W>
void multiply_blocks(const bf16 *x, const W *w, const float *scales, bf16 *y, int64_t threads, int64_t rows,
                     int64_t outputs, int64_t inputs) {
    if (rows == 0) return;  // tiles cannot be configured for no rows
    const int64_t together = std::min(rows, MOST_ROWS), size = BLOCK * inputs;
    parts((outputs + BLOCK - 1) / BLOCK, rows * outputs * inputs / 8, threads, [=](int64_t begin, int64_t end) {
        const Tiles tiles(together);
        alignas(64) float sums[MOST_ROWS * BLOCK];
        Lines<bf16> space(std::is_same_v<W, bf16> || rows == together ? 0 : size);
        for (int64_t block = begin; block < end; block++) {
            const W *weights = w + block * size;
            const bf16 *kept = space.empty() ? nullptr : in_bf16(weights, space.data(), size);
            const int64_t output = block * BLOCK, real = std::min(BLOCK, outputs - output);
            for (int64_t next = 0; next < rows; next += together) {
                const int64_t first = std::min(next, rows - together);  // the last group may repeat some rows
                const bf16 *some = x + first * inputs;
                if (kept)
                    few_by_block<false>(some, kept, sums, together, inputs);
                else if (next)
                    few_by_block<false>(some, weights, sums, together, inputs);
                else
                    few_by_block<true>(some, weights, sums, together, inputs);
                for (int64_t row = 0; row < together; row++) {
                    float *sum = sums + row * BLOCK;
                    if (scales)
                        for (int64_t i = 0; i < real; i++) sum[i] *= scales[output + i];
                    scaled(sum, 1.0f, y + (first + row) * outputs + output, real);
                }
            }
        }
    });
}

constexpr int64_t QUERIES = 6;  // queries multiplied together with a block of keys, as many as fit in the registers

// Calls rows_by_block() for up to QUERIES rows.
inline void some_rows(int64_t rows, const bf16 *x, int64_t x_stride, const bf16 *w, float *y, int64_t y_stride,
                      int64_t inputs) {
    using Rows = void (*)(const bf16 *, int64_t, const bf16 *, float *, int64_t, int64_t);
    static constexpr Rows counts[QUERIES] = {rows_by_block<1, false, bf16>, rows_by_block<2, false, bf16>,
                                             rows_by_block<3, false, bf16>, rows_by_block<4, false, bf16>,
                                             rows_by_block<5, false, bf16>, rows_by_block<6, false, bf16>};
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
