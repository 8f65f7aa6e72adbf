// Causal attention for training, forward and backward, by AVX512-BF16.
//
// A block of 64 queries meets 64 keys at a time. Scores are computed transposed, keys by queries: then the largest score
// and the sum of a query are found number by number in vectors, and the weights serve as the left factor of every
// product that follows, in rows or in pairs of rows, without being transposed.
#pragma once

#include <immintrin.h>

#include "attention_fp32.h"
#include "common.h"

namespace {

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

// tile() for any number of rows. range(i) says which pairs rows i to i + 5 need: the rest of their a is zero.
template <bool ADD, int PAIR, class Needed>
void product(int64_t rows, const bf16 *a, int64_t row, const bf16 *b, float *c, int64_t c_row, Needed range) {
    using Tile = void (*)(const bf16 *, int64_t, const bf16 *, float *, int64_t, int64_t);
    static constexpr Tile tiles[] = {tile<1, ADD, PAIR>, tile<2, ADD, PAIR>, tile<3, ADD, PAIR>,
                                     tile<4, ADD, PAIR>, tile<5, ADD, PAIR>, tile<6, ADD, PAIR>};
    for (int64_t i = 0; i < rows; i += 6) {
        const Range pairs = range(i);
        tiles[std::min<int64_t>(rows - i, 6) - 1](a + i * row + pairs.from * PAIR, row, b + pairs.from * BETWEEN,
                                                  c + i * c_row, c_row, pairs.to - pairs.from);
    }
}

// Two rows of 16 numbers, side by side: first[0], second[0], first[1], ...
inline __m512i interleaved(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
}

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

// Transposes 16 rows of 16 numbers of 32 bits.
inline void transpose(__m512i rows[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            t[i + 8 * j] = _mm512_shuffle_i32x4(rows[i + 8 * j], rows[i + 8 * j + 4], 0x88);
            t[i + 8 * j + 4] = _mm512_shuffle_i32x4(rows[i + 8 * j], rows[i + 8 * j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Interleaves pairs of channels of 64 tokens: [D / 2][64][2]; zeros after the last token.
void pack_channels(const bf16 *x, int64_t token, int64_t count, int64_t size, bf16 *to) {
    for (int64_t first = 0; first < SIDE; first += 16)
        for (int64_t channel = 0; channel < size; channel += 32) {
            __m512i rows[16];
            for (int64_t i = 0; i < 16; i++)
                rows[i] = first + i < count ? _mm512_loadu_si512(x + (first + i) * token + channel)
                                            : _mm512_setzero_si512();
            transpose(rows);
            for (int64_t i = 0; i < 16; i++) _mm512_storeu_si512(to + (channel + 2 * i) * SIDE + 2 * first, rows[i]);
        }
}

// The queries of a block that are seen, as bits.
inline uint64_t bits(Range seen) {
    const int64_t count = seen.to - seen.from;
    if (count == 0) return 0;
    return (count == 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1) << seen.from;
}

// Turns scores [keys][64] of the queries from `first` on into weights, interleaved [keys / 2][64][2]: each exponential
// relative to its query's largest. Gives the sums, and in `logs` the logarithm of each query's sum, base 2.
void weigh(const float *scores, bf16 *weights, int64_t low, int64_t keys, int64_t first, int64_t count,
           const Shape &shape, float *sums, float *logs) {
    const __m512 factor = _mm512_set1_ps(shape.scale * LOG2E);
    const auto scaled = [=](int64_t t, int part) { return _mm512_loadu_ps(scores + t * SIDE + 16 * part) * factor; };
    __m512 most[4], total[4];
    for (int part = 0; part < 4; part++) most[part] = _mm512_set1_ps(-INFINITY), total[part] = _mm512_setzero_ps();
    for (int64_t t = 0; t < keys; t++) {
        const uint64_t seen = bits(shape.seen_by(low + t, first, count));
        for (int part = 0; part < 4; part++)
            most[part] = _mm512_mask_max_ps(most[part], __mmask16(seen >> (16 * part)), scaled(t, part), most[part]);
    }
    for (int64_t t = 0; t < keys; t += 2) {
        const uint64_t one = bits(shape.seen_by(low + t, first, count));
        const uint64_t two = t + 1 < keys ? bits(shape.seen_by(low + t + 1, first, count)) : 0;
        for (int part = 0; part < 4; part++) {
            const __mmask16 masks[2] = {__mmask16(one >> (16 * part)), __mmask16(two >> (16 * part))};
            __m512i both = _mm512_setzero_si512();
            if (masks[0] | masks[1]) {
                const __m512 a = _mm512_maskz_mov_ps(masks[0], power_of_two(scaled(t, part) - most[part]));
                const __m512 b = _mm512_maskz_mov_ps(masks[1], power_of_two(scaled(t + 1, part) - most[part]));
                total[part] += a + b;
                both = interleaved((__m512i)_mm512_cvtne2ps_pbh(b, a));
            }
            _mm512_storeu_si512(weights + t * SIDE + 32 * part, both);
        }
    }
    for (int part = 0; part < 4; part++) {
        _mm512_storeu_ps(sums + 16 * part, total[part]);
        _mm512_storeu_ps(logs + 16 * part, most[part]);
    }
    for (int64_t i = 0; i < count; i++) logs[i] += std::log2(sums[i]);
}

// y, and `logs` (B, H, T): base 2, of the sums of the exponentials of each query.
void attention(const Heads<bf16> &q, const Heads<bf16> &k, const Heads<bf16> &v, const Heads<bf16> &y, float *logs, const Shape &shape,
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
                const auto channels = [=](int64_t) { return Range{0, D / 2}; };
                product<false, 2>(keys, k.at(b, low, kv, D), k.token, queries.data(), scores.data(), SIDE, channels);
                weigh(scores.data(), weights.data(), low, keys, first, count, shape, sums, own);
                std::memcpy(logs + pair * T + first, own, count * sizeof(float));
                // Queries see no later keys.
                const auto earlier = [=](int64_t i) { return Range{0, std::min(first - low + i + 7, keys + 1) / 2}; };
                for (int64_t part = 0; part < D; part += SIDE) {
                    product<false, BETWEEN>(count, weights.data(), 2, &values[part * padded + low * SIDE], out.data(),
                                            SIDE, earlier);
                    for (int64_t i = 0; i < count; i++) {
                        bf16 *to = y.at(b, first + i, head, D) + part;
                        const __m512 inverse = _mm512_set1_ps(1.0f / sums[i]);
                        for (int64_t j = 0; j < SIDE; j += 16)
                            store(to + j, _mm512_loadu_ps(&out[i * SIDE + j]) * inverse);
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
        for (int64_t t = 0; t < keys; t += 2) {
            const uint64_t one = bits(shape.seen_by(low + t, first, count));
            const uint64_t two = t + 1 < keys ? bits(shape.seen_by(low + t + 1, first, count)) : 0;
            for (int part = 0; part < 4; part++) {
                const int64_t at = t * SIDE + 16 * part;
                const __m512 log = _mm512_loadu_ps(logs + 16 * part), mean = _mm512_loadu_ps(along + 16 * part);
                __m512 weight[2], slope[2];
                for (int i = 0; i < 2; i++) {
                    const __mmask16 seen = __mmask16((i ? two : one) >> (16 * part));
                    const __m512 score = _mm512_loadu_ps(scores + at + i * SIDE);
                    weight[i] = _mm512_maskz_mov_ps(seen, power_of_two(_mm512_fmsub_ps(score, factor, log)));
                    const __m512 change = (_mm512_loadu_ps(by_weight + at + i * SIDE) - mean) * scale;
                    slope[i] = _mm512_maskz_mul_ps(seen, weight[i], change);
                }
                const __m512i made = (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]);
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(slope[1], slope[0]);
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
        for (int64_t j = 0; j < SIDE; j += 16) store(to + i * token + j, _mm512_loadu_ps(sums + i * stride + j));
}

// The gradients of q, k and v from that of y. The weights are computed again.
void attention_back(const Heads<bf16> &q, const Heads<bf16> &k, const Heads<bf16> &v, const Heads<bf16> &y, const Heads<bf16> &g, const float *logs,
                    const Heads<bf16> &dq, const Heads<bf16> &dk, const Heads<bf16> &dv, const Shape &shape, int64_t threads) {
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
                        const auto channels = [=](int64_t) { return Range{0, D / 2}; };
                        const auto later = [=](int64_t i) { return Range{low == first ? i / 2 : 0, PAIRS}; };
                        const auto earlier = [=](int64_t i) {
                            return Range{0, std::min(low == first ? i + 7 : SIDE, keys + 1) / 2};
                        };
                        product<false, 2>(keys, k.at(b, low, kv, D), k.token, queries.data(), made.scores, SIDE,
                                          channels);
                        product<false, 2>(keys, v.at(b, low, kv, D), v.token, grads.data(), made.by_weight, SIDE,
                                          channels);
                        made.fill(low, keys, first, count, shape, log, along);
                        for (int64_t part = 0; part < D; part += SIDE) {
                            product<true, 2>(keys, made.weights, SIDE, &grad_pairs[part * SIDE], &v_sums[low * D + part],
                                             D, later);
                            product<true, 2>(keys, made.slopes, SIDE, &query_pairs[part * SIDE], &k_sums[low * D + part],
                                             D, later);
                            product<true, BETWEEN>(count, made.pairs, 2, &keys_packed[part * padded + low * SIDE],
                                                   &q_sums[part], D, earlier);
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
