// Causal attention for training, forward and backward, by AVX512-BF16.
//
// A block of 64 queries meets 64 keys at a time. Scores are computed transposed, keys by queries: then the largest score
// and the sum of a query are found number by number in vectors, and the weights serve as the left factor of every
// product that follows, in rows or in pairs of rows, without being transposed.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

constexpr int64_t SIDE = 64;          // queries of a block, keys of a block, and columns of a product
constexpr int64_t PAIRS = SIDE / 2;   // of rows in a block
constexpr int64_t BETWEEN = 2 * SIDE; // numbers from one pair of rows to the next where two rows are interleaved

inline __m512bh pairs_of(const bf16 *x) { return (__m512bh)_mm512_loadu_si512(x); }

// ROWS rows of c, 64 columns each, become or gain a times b. Two neighbouring numbers of row i of a lie at
// a + i * row + p * PAIR for p < pairs; b is interleaved, [pairs][64][2].
template <int ROWS, bool ADD, int PAIR>
inline void tile(const bf16 *a, int64_t row, const bf16 *b, float *c, int64_t c_row, int64_t pairs) {
    __m512 sums[ROWS][4];
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < 4; part++)
            sums[i][part] = ADD ? _mm512_loadu_ps(c + i * c_row + 16 * part) : _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++, a += PAIR, b += BETWEEN) {
        const __m512bh right[4] = {pairs_of(b), pairs_of(b + 32), pairs_of(b + 64), pairs_of(b + 96)};
        for (int i = 0; i < ROWS; i++) {
            int32_t pair;
            std::memcpy(&pair, a + i * row, 4);
            const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
            for (int part = 0; part < 4; part++) sums[i][part] = _mm512_dpbf16_ps(sums[i][part], right[part], left);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < 4; part++) _mm512_storeu_ps(c + i * c_row + 16 * part, sums[i][part]);
}

// tile() for any number of rows.
template <bool ADD, int PAIR>
void product(int64_t rows, const bf16 *a, int64_t row, const bf16 *b, float *c, int64_t c_row, int64_t pairs) {
    using Tile = void (*)(const bf16 *, int64_t, const bf16 *, float *, int64_t, int64_t);
    static constexpr Tile rest[] = {tile<1, ADD, PAIR>, tile<2, ADD, PAIR>, tile<3, ADD, PAIR>, tile<4, ADD, PAIR>,
                                    tile<5, ADD, PAIR>};
    int64_t i = 0;
    for (; i + 6 <= rows; i += 6) tile<6, ADD, PAIR>(a + i * row, row, b, c + i * c_row, c_row, pairs);
    if (i < rows) rest[rows - i - 1](a + i * row, row, b, c + i * c_row, c_row, pairs);
}

// 2^x to within 3e-7 of its value.
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5353362e-4f);
    for (float c : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, whole);
}

// Two rows of 16 numbers, side by side: first[0], second[0], first[1], ...
inline __m512i interleaved(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
}

// Where the heads of a tensor (B, T, H, D) lie: `row` numbers apart for B, `token` for T; the heads are side by side.
struct Heads {
    bf16 *x;
    int64_t row, token;
    bf16 *at(int64_t b, int64_t t, int64_t head, int64_t size) const { return x + b * row + t * token + head * size; }
};

// Interleaves pairs of tokens of a head: [D / 64][blocks of 64 tokens / 2][64][2]; zeros after the last token.
void pack_tokens(const bf16 *x, int64_t token, int64_t count, int64_t padded, int64_t size, bf16 *to) {
    for (int64_t part = 0; part < size; part += SIDE, to += padded * SIDE)
        for (int64_t t = 0; t < padded; t += 2)
            for (int64_t i = 0; i < SIDE; i += 16) {
                __m256i first = _mm256_setzero_si256(), second = first;
                if (t < count) first = _mm256_loadu_si256((const __m256i *)(x + t * token + part + i));
                if (t + 1 < count) second = _mm256_loadu_si256((const __m256i *)(x + (t + 1) * token + part + i));
                const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
                _mm512_storeu_si512(to + t * SIDE + 2 * i, interleaved(both));
            }
}

// Interleaves pairs of channels of 64 tokens: [D / 2][64][2]; zeros after the last token.
void pack_channels(const bf16 *x, int64_t token, int64_t count, int64_t size, bf16 *to) {
    const __m512i places = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(int32_t(token * 2)));
    for (int64_t first = 0; first < SIDE; first += 16) {
        const int64_t some = std::min<int64_t>(std::max<int64_t>(count - first, 0), 16);
        const __mmask16 there = __mmask16((1u << some) - 1);
        for (int64_t i = 0; i < size; i += 2) {
            const __m512i column = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, places,
                                                               x + first * token + i, 1);
            _mm512_storeu_si512(to + i * SIDE + 2 * first, column);
        }
    }
}

// Of the 64 queries from `first` on, of which `count` exist, those that see key `key`: itself and `window` before.
inline uint64_t seen_by(int64_t key, int64_t first, int64_t count, int64_t window) {
    const int64_t from = std::max<int64_t>(key - first, 0), to = std::min(key - first + window + 1, count);
    if (from >= to) return 0;
    return (to - from == 64 ? ~uint64_t(0) : (uint64_t(1) << (to - from)) - 1) << from;
}

struct Shape {
    int64_t rows, tokens, heads, kv_heads, size, window;
    float scale;
    int64_t padded() const { return (tokens + SIDE - 1) / SIDE * SIDE; }
    int64_t work() const { return rows * heads * tokens * std::min(tokens, window); }
};

constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;

// Turns scores [keys][64] of the queries from `first` on into weights, interleaved [keys / 2][64][2]: each exponential
// relative to its query's largest. Gives the sums, and in `logs` the logarithm of each query's sum, base 2.
void weigh(const float *scores, bf16 *weights, int64_t low, int64_t keys, int64_t first, int64_t count,
           const Shape &shape, float *sums, float *logs) {
    const __m512 factor = _mm512_set1_ps(shape.scale * LOG2E);
    for (int64_t part = 0; part < 4; part++) {
        const auto visible = [=](int64_t t) {
            return t < keys ? __mmask16(seen_by(low + t, first, count, shape.window) >> (16 * part)) : __mmask16(0);
        };
        const auto scaled = [=](int64_t t) { return _mm512_loadu_ps(scores + t * SIDE + 16 * part) * factor; };
        __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int64_t t = 0; t < keys; t++) {
            const __m512 score = scaled(t);
            most = _mm512_mask_max_ps(most, visible(t), score, most);
        }
        for (int64_t t = 0; t < keys; t += 2) {
            __m512 pair[2];
            for (int64_t i = 0; i < 2; i++) {
                const __mmask16 seen = visible(t + i);
                pair[i] = seen ? _mm512_maskz_mov_ps(seen, power_of_two(scaled(t + i) - most)) : _mm512_setzero_ps();
                total += pair[i];
            }
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(pair[1], pair[0]);
            _mm512_storeu_si512(weights + t * SIDE + 32 * part, interleaved(both));
        }
        _mm512_storeu_ps(sums + 16 * part, total);
        _mm512_storeu_ps(logs + 16 * part, most);
    }
    for (int64_t i = 0; i < count; i++) logs[i] += std::log2(sums[i]);
}

// y, and `logs` (B, H, T): base 2, of the sums of the exponentials of each query.
void attention(const Heads &q, const Heads &k, const Heads &v, const Heads &y, float *logs, const Shape &shape,
               int64_t threads) {
    parts(shape.rows * shape.heads, shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, padded = shape.padded(), group = shape.heads / shape.kv_heads;
        std::vector<bf16> values(padded * D), queries(SIDE * D), weights(padded * SIDE);
        std::vector<float> scores(padded * SIDE), out(SIDE * SIDE);
        float sums[SIDE], own[SIDE];
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.heads, head = pair % shape.heads, kv = head / group;
            pack_tokens(v.at(b, 0, kv, D), v.token, T, padded, D, values.data());
            for (int64_t first = 0; first < T; first += SIDE) {
                const int64_t count = std::min(SIDE, T - first), high = first + count;
                const int64_t low = std::max<int64_t>(first - shape.window, 0) / 2 * 2, keys = high - low;
                pack_channels(q.at(b, first, head, D), q.token, count, D, queries.data());
                product<false, 2>(keys, k.at(b, low, kv, D), k.token, queries.data(), scores.data(), SIDE, D / 2);
                weigh(scores.data(), weights.data(), low, keys, first, count, shape, sums, own);
                std::memcpy(logs + pair * T + first, own, count * sizeof(float));
                for (int64_t part = 0; part < D; part += SIDE) {
                    product<false, BETWEEN>(count, weights.data(), 2, &values[part * padded + low * SIDE], out.data(),
                                            SIDE, (keys + 1) / 2);
                    for (int64_t i = 0; i < count; i++) {
                        bf16 *to = y.at(b, first + i, head, D) + part;
                        const float inverse = 1.0f / sums[i];
                        for (int64_t j = 0; j < SIDE; j++) narrow(out[i * SIDE + j] * inverse, to[j]);
                    }
                }
            }
        }
    });
}

// What a block of queries and a block of keys make of their scores and of the gradients of the weights, [keys][64] each:
// weights and gradients of scores, [keys][64], and the latter interleaved too.
struct Slopes {
    float scores[SIDE * SIDE], by_weight[SIDE * SIDE];
    bf16 weights[SIDE * SIDE], slopes[SIDE * SIDE], pairs[SIDE * SIDE];

    void fill(int64_t low, int64_t keys, int64_t first, int64_t count, const Shape &shape, const float *logs,
              const float *along) {
        const __m512 factor = _mm512_set1_ps(shape.scale * LOG2E), scale = _mm512_set1_ps(shape.scale);
        for (int64_t part = 0; part < 4; part++) {
            const __m512 log = _mm512_loadu_ps(logs + 16 * part), mean = _mm512_loadu_ps(along + 16 * part);
            for (int64_t t = 0; t < keys; t += 2) {
                __m512 weight[2], slope[2];
                for (int64_t i = 0; i < 2; i++) {
                    const int64_t at = (t + i) * SIDE + 16 * part;
                    const uint64_t all = t + i < keys ? seen_by(low + t + i, first, count, shape.window) : 0;
                    const __mmask16 seen = __mmask16(all >> (16 * part));
                    weight[i] = slope[i] = _mm512_setzero_ps();
                    if (!seen) continue;
                    const __m512 power = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores + at), factor, log));
                    weight[i] = _mm512_maskz_mov_ps(seen, power);
                    const __m512 change = (_mm512_loadu_ps(by_weight + at) - mean) * scale;
                    slope[i] = _mm512_maskz_mul_ps(seen, weight[i], change);
                }
                const __m512i made = (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]);
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(slope[1], slope[0]);
                const int64_t at = t * SIDE + 16 * part;
                _mm256_storeu_si256((__m256i *)(weights + at), _mm512_castsi512_si256(made));
                _mm256_storeu_si256((__m256i *)(weights + at + SIDE), _mm512_extracti64x4_epi64(made, 1));
                _mm256_storeu_si256((__m256i *)(slopes + at), _mm512_castsi512_si256(both));
                _mm256_storeu_si256((__m256i *)(slopes + at + SIDE), _mm512_extracti64x4_epi64(both, 1));
                _mm512_storeu_si512(pairs + t * SIDE + 32 * part, interleaved(both));
            }
        }
    }
};

// fp32 sums [count][64], as columns `part` of a head.
inline void give(const float *sums, int64_t stride, int64_t count, bf16 *to, int64_t token) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < SIDE; j++) narrow(sums[i * stride + j], to[i * token + j]);
}

// The gradients of q, k and v from that of y. The weights are computed again.
void attention_back(const Heads &q, const Heads &k, const Heads &v, const Heads &y, const Heads &g, const float *logs,
                    const Heads &dq, const Heads &dk, const Heads &dv, const Shape &shape, int64_t threads) {
    parts(shape.rows * shape.kv_heads, 3 * shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, padded = shape.padded(), group = shape.heads / shape.kv_heads;
        std::vector<bf16> keys_packed(padded * D), queries(SIDE * D), grads(SIDE * D), query_pairs(SIDE * D),
            grad_pairs(SIDE * D);
        std::vector<float> k_sums(T * D), v_sums(T * D), q_sums(SIDE * D);
        std::vector<Slopes> held(1);
        Slopes &made = held[0];
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.kv_heads, kv = pair % shape.kv_heads;
            pack_tokens(k.at(b, 0, kv, D), k.token, T, padded, D, keys_packed.data());
            std::fill(k_sums.begin(), k_sums.end(), 0.0f);
            std::fill(v_sums.begin(), v_sums.end(), 0.0f);
            for (int64_t head = kv * group; head < (kv + 1) * group; head++)
                for (int64_t first = 0; first < T; first += SIDE) {
                    const int64_t count = std::min(SIDE, T - first);
                    const bf16 *own = q.at(b, first, head, D), *grad = g.at(b, first, head, D);
                    pack_channels(own, q.token, count, D, queries.data());
                    pack_channels(grad, g.token, count, D, grads.data());
                    pack_tokens(own, q.token, count, SIDE, D, query_pairs.data());
                    pack_tokens(grad, g.token, count, SIDE, D, grad_pairs.data());
                    float along[SIDE] = {}, log[SIDE] = {};
                    std::memcpy(log, logs + (b * shape.heads + head) * T + first, count * sizeof(float));
                    for (int64_t i = 0; i < count; i++) {
                        const bf16 *out = y.at(b, first + i, head, D), *by_out = grad + i * g.token;
                        for (int64_t j = 0; j < D; j++) along[i] += wide(out[j]) * wide(by_out[j]);
                    }
                    std::fill(q_sums.begin(), q_sums.end(), 0.0f);
                    const int64_t start = std::max<int64_t>(first - shape.window, 0) / SIDE * SIDE;
                    for (int64_t low = start; low < first + count; low += SIDE) {
                        const int64_t keys = std::min(SIDE, T - low);
                        product<false, 2>(keys, k.at(b, low, kv, D), k.token, queries.data(), made.scores, SIDE, D / 2);
                        product<false, 2>(keys, v.at(b, low, kv, D), v.token, grads.data(), made.by_weight, SIDE, D / 2);
                        made.fill(low, keys, first, count, shape, log, along);
                        for (int64_t part = 0; part < D; part += SIDE) {
                            product<true, 2>(keys, made.weights, SIDE, &grad_pairs[part * SIDE], &v_sums[low * D + part],
                                             D, PAIRS);
                            product<true, 2>(keys, made.slopes, SIDE, &query_pairs[part * SIDE], &k_sums[low * D + part],
                                             D, PAIRS);
                            product<true, BETWEEN>(count, made.pairs, 2, &keys_packed[part * padded + low * SIDE],
                                                   &q_sums[part], D, (keys + 1) / 2);
                        }
                    }
                    for (int64_t part = 0; part < D; part += SIDE)
                        give(&q_sums[part], D, count, dq.at(b, first, head, D) + part, dq.token);
                }
            for (int64_t part = 0; part < D; part += SIDE) {
                give(&k_sums[part], D, T, dk.at(b, 0, kv, D) + part, dk.token);
                give(&v_sums[part], D, T, dv.at(b, 0, kv, D) + part, dv.token);
            }
        }
    });
}

}  // namespace
