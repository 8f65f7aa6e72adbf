// Causal attention for training in bf16, forward and backward, with AMX or AVX512-BF16.
//
// Queries and keys are processed in blocks of 64. Scores are computed transposed, keys by queries, for two reasons:
// vector operations find the largest score and the sum of each query, and the weights are a factor of every later
// product, in rows or in pairs of rows, without being transposed. The results, channels by queries, are transposed
// once, at the end. Tokens after the last are zeros, so that all blocks are complete.
#pragma once

#include <immintrin.h>

#include "attention_fp32.h"
#include "common.h"
#include "tiles.h"

namespace {

// Interleaves two rows of 16 numbers: first[0], second[0], first[1], ...
inline __m512i interleaved(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
}

// Interleaves pairs of tokens of a head as [D / 64][padded / 2][64][2], with zeros after the last token.
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

// Transposes 16 rows of 16 32-bit numbers.
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

// Copies the tokens of a head as [padded][D], with zeros after the last token.
void gather(const bf16 *x, int64_t token, int64_t count, int64_t padded, int64_t size, bf16 *to) {
    for (int64_t t = 0; t < count; t++) std::memcpy(to + t * size, x + t * token, size * sizeof(bf16));
    std::memset(to + count * size, 0, (padded - count) * size * sizeof(bf16));
}

// Interleaves pairs of channels of 64 tokens as [D / 2][64][2], with zeros after the last token.
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

// Transposes the result of pack_tokens() to [D][padded], with `row` numbers from one channel to the next.
void turn_tokens(const bf16 *packed, int64_t padded, int64_t size, bf16 *to, int64_t row) {
    for (int64_t channel = 0; channel < size; channel += 16)
        for (int64_t t = 0; t < padded; t += 32) {
            const bf16 *from = packed + (channel / SIDE * padded + t) * SIDE + channel % SIDE * 2;
            __m512i rows[16];
            for (int64_t i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(from + i * BETWEEN);
            transpose(rows);
            for (int64_t i = 0; i < 16; i++) _mm512_storeu_si512(to + (channel + i) * row + t, rows[i]);
        }
}

// Writes the sums [D][64] of a block of queries to a head, and multiplies each query by its factor.
void give_turned(const float *sums, const float *factors, int64_t count, int64_t size, bf16 *to, int64_t token) {
    for (int64_t first = 0; first < count; first += 16)
        for (int64_t channel = 0; channel < size; channel += 16) {
            __m512i rows[16];
            for (int64_t i = 0; i < 16; i++)
                rows[i] = (__m512i)(_mm512_loadu_ps(sums + (channel + i) * SIDE + first) *
                                    _mm512_loadu_ps(factors + first));
            transpose(rows);
            for (int64_t i = 0; i < std::min<int64_t>(16, count - first); i++)
                store(to + (first + i) * token + channel, (__m512)rows[i]);
        }
}

// Returns a range of queries in a block as a bit mask.
inline uint64_t bits(Range seen) {
    const int64_t count = seen.to - seen.from;
    if (count == 0) return 0;
    return (count == 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1) << seen.from;
}

// Converts scores [keys][64] of the queries from `first` on into unnormalized weights, exp(scale (score - largest score
// of the query)), interleaved as [keys / 2][64][2]. The number of keys is even. Also writes the sum of each query's
// weights, and to `logs` the base-2 log-sum-exp of its scaled scores.
void weigh(const float *scores, bf16 *weights, int64_t low, int64_t keys, int64_t first, int64_t count,
           const Documents &documents, float scale, float *sums, float *logs) {
    const __m512 factor = _mm512_set1_ps(scale * LOG2E);
    const auto scaled = [=](int64_t t, int part) { return _mm512_loadu_ps(scores + t * SIDE + 16 * part) * factor; };
    __m512 most[4], total[4];
    for (int part = 0; part < 4; part++) most[part] = _mm512_set1_ps(-INFINITY), total[part] = _mm512_setzero_ps();
    for (int64_t t = 0; t < keys; t++) {
        const uint64_t seen = bits(documents.seen_by(low + t, first, count));
        for (int part = 0; part < 4; part++)
            most[part] = _mm512_mask_max_ps(most[part], __mmask16(seen >> (16 * part)), scaled(t, part), most[part]);
    }
    for (int64_t t = 0; t < keys; t += 2) {
        const uint64_t one = bits(documents.seen_by(low + t, first, count));
        const uint64_t two = bits(documents.seen_by(low + t + 1, first, count));
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

// Computes y, and in `logs` (B, H, T) the base-2 log-sum-exp of each query's scaled scores.
void attention(const Heads<bf16> &q, const Heads<bf16> &k, const Heads<bf16> &v, const Heads<bf16> &y, float *logs,
               const Shape &shape, int64_t threads) {
    parts(shape.rows * shape.heads, shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, padded = shape.padded(), group = shape.heads / shape.kv_heads;
        const int64_t row = padded + 32;  // a power of two would put all rows in the same lines of the cache
        Lines<bf16> keys(padded * D), values(row * D), queries(SIDE * D), weights(padded * SIDE);
        Lines<float> scores(padded * SIDE), out(D * SIDE);
        float sums[SIDE], own[SIDE];
        const Tiles tiles;
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.heads, head = pair % shape.heads, kv = head / group;
            const Documents documents(shape, b);
            if (pair == begin || head % group == 0) {  // the heads of a group share keys and values
                pack_tokens(v.at(b, 0, kv, D), v.token, T, padded, D, keys.data());
                turn_tokens(keys.data(), padded, D, values.data(), row);
                gather(k.at(b, 0, kv, D), k.token, T, padded, D, keys.data());
            }
            for (int64_t first = 0; first < T; first += SIDE) {
                const int64_t count = std::min(SIDE, T - first);
                const int64_t low = documents.earliest(first) / 32 * 32, seen = first + SIDE - low;
                pack_channels(q.at(b, first, head, D), q.token, count, D, queries.data());
                product<false>(seen, D, &keys[low * D], D, queries.data(), scores.data(), SIDE);
                weigh(scores.data(), weights.data(), low, seen, first, count, documents, shape.scale, sums, own);
                std::memcpy(logs + pair * T + first, own, count * sizeof(float));
                product<false>(D, seen, &values[low], row, weights.data(), out.data(), SIDE, RIGHT);
                for (float &sum : sums) sum = 1.0f / sum;
                give_turned(out.data(), sums, count, D, y.at(b, first, head, D), y.token);
            }
        }
    });
}

// Holds the scores and the gradients of the weights for a block of queries and a block of keys, [keys][64] each. fill()
// computes from them the weights and the gradients of the scores, [keys][64], and the latter also interleaved.
struct Slopes {
    float scores[SIDE * SIDE], by_weight[SIDE * SIDE];
    bf16 weights[SIDE * SIDE], slopes[SIDE * SIDE], pairs[SIDE * SIDE];

    void fill(int64_t low, int64_t first, int64_t count, const Documents &documents, float by, const float *logs,
              const float *along) {
        const __m512 factor = _mm512_set1_ps(by * LOG2E), scale = _mm512_set1_ps(by);
        for (int64_t t = 0; t < SIDE; t += 2) {
            const uint64_t one = bits(documents.seen_by(low + t, first, count));
            const uint64_t two = bits(documents.seen_by(low + t + 1, first, count));
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

// Computes the gradients of q, k and v from the gradient of y. The weights are recomputed.
void attention_back(const Heads<bf16> &q, const Heads<bf16> &k, const Heads<bf16> &v, const Heads<bf16> &y,
                    const Heads<bf16> &g, const float *logs, const Heads<bf16> &dq, const Heads<bf16> &dk,
                    const Heads<bf16> &dv, const Shape &shape, int64_t threads) {
    parts(shape.rows * shape.kv_heads, 3 * shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, padded = shape.padded(), group = shape.heads / shape.kv_heads;
        const int64_t row = padded + 32;  // a power of two would put all rows in the same lines of the cache
        Lines<bf16> keys(padded * D), values(padded * D), turned(row * D), queries(SIDE * D), grads(SIDE * D),
            query_pairs(SIDE * D), grad_pairs(SIDE * D);
        Lines<float> k_sums(padded * D), v_sums(padded * D), q_sums(D * SIDE), ones(SIDE, 1.0f);
        Lines<Slopes> held(1);
        Slopes &made = held[0];
        const Tiles tiles;
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.kv_heads, kv = pair % shape.kv_heads;
            const Documents documents(shape, b);
            pack_tokens(k.at(b, 0, kv, D), k.token, T, padded, D, keys.data());
            turn_tokens(keys.data(), padded, D, turned.data(), row);
            gather(k.at(b, 0, kv, D), k.token, T, padded, D, keys.data());
            gather(v.at(b, 0, kv, D), v.token, T, padded, D, values.data());
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
                    const int64_t start = documents.earliest(first) / SIDE * SIDE;
                    for (int64_t low = start; low <= first; low += SIDE) {
                        const bool own_keys = low == first;  // a query does not see the keys after its own
                        product<false>(SIDE, D, &keys[low * D], D, queries.data(), made.scores, SIDE);
                        product<false>(SIDE, D, &values[low * D], D, grads.data(), made.by_weight, SIDE);
                        made.fill(low, first, count, documents, shape.scale, log, along);
                        for (int64_t part = 0; part < D; part += SIDE) {
                            product<true>(SIDE, SIDE, made.weights, SIDE, &grad_pairs[part * SIDE],
                                          &v_sums[low * D + part], D, own_keys ? LEFT : NONE);
                            product<true>(SIDE, SIDE, made.slopes, SIDE, &query_pairs[part * SIDE],
                                          &k_sums[low * D + part], D, own_keys ? LEFT : NONE);
                        }
                        product<true>(D, SIDE, &turned[low], row, made.pairs, q_sums.data(), SIDE,
                                      own_keys ? RIGHT : NONE);
                    }
                    give_turned(q_sums.data(), ones.data(), count, D, dq.at(b, first, head, D), dq.token);
                }
            for (int64_t t = 0; t < T; t++) {
                scaled(&k_sums[t * D], 1.0f, dk.at(b, t, kv, D), D);
                scaled(&v_sums[t * D], 1.0f, dv.at(b, t, kv, D), D);
            }
        }
    });
}

}  // namespace
