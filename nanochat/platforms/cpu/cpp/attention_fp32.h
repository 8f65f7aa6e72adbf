// Causal attention for training in fp32, forward and backward, and what attention.h shares with it.
//
// As in attention.h, a block of 64 queries meets its keys in scores that are laid out keys by queries. Vectors are the
// compiler's own type, of as many numbers as the processor's registers hold, so that one source serves all of them.
#pragma once

#include "common.h"

namespace {

constexpr int64_t SIDE = 64;  // queries of a block, and keys of a block
constexpr float LOG2E = 1.44269504f;

struct Range {
    int64_t from, to;
    bool holds(int64_t all) const { return from == 0 && to == all; }
};

// Where the heads of a tensor (B, T, H, D) lie: `row` numbers apart for B, `token` for T; the heads are side by side.
template <class T> struct Heads {
    T *x;
    int64_t row, token;
    T *at(int64_t b, int64_t t, int64_t head, int64_t size) const { return x + b * row + t * token + head * size; }
};

struct Shape {
    int64_t rows, tokens, heads, kv_heads, size, window;
    float scale;
    int64_t padded() const { return (tokens + SIDE - 1) / SIDE * SIDE; }
    int64_t work() const { return rows * heads * tokens * std::min(tokens, window); }

    // Of the queries from `first` on, of which `count` exist, those that see key `key`: itself and `window` before.
    Range seen_by(int64_t key, int64_t first, int64_t count) const {
        const int64_t from = std::max<int64_t>(key - first, 0), to = std::min(key - first + window + 1, count);
        return {from, std::max(from, to)};
    }
};

#if defined(__AVX512F__)
constexpr int LANES = 16, TALL = 12;  // numbers of a vector, and rows of two vectors that the registers hold
#elif defined(__AVX2__)
constexpr int LANES = 8, TALL = 6;
#else
constexpr int LANES = 4, TALL = 6;
#endif
constexpr int64_t WIDE = 2 * LANES;  // columns of a product that are computed together
constexpr int VECTORS = SIDE / LANES;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

inline Lanes lanes(const float *x) {
    Lanes y;
    std::memcpy(&y, x, sizeof(y));
    return y;
}

inline void put(float *y, Lanes x) { std::memcpy(y, &x, sizeof(x)); }

// x where a column is seen, else `other`; `column` is the first lane's.
inline Lanes where(Range seen, int column, Lanes x, float other) {
    Whole place;
    for (int i = 0; i < LANES; i++) place[i] = column + i;
    return (place >= int(seen.from)) & (place < int(seen.to)) ? x : Lanes{} + other;
}

inline Lanes larger(Lanes x, Lanes y) { return x > y ? x : y; }

// 2^x to within 3e-7 of its value, for x below a half; 2^-126 for smaller x.
inline Lanes power_of_two_below(Lanes x) {
    x = x < -126.0f ? Lanes{} - 126.0f : x;  // which keeps what is no number
    const Whole whole = __builtin_convertvector(x - 0.5f, Whole);  // to the nearest, since it cuts towards zero
    const Lanes r = x - __builtin_convertvector(whole, Lanes);
    Lanes y = Lanes{} + 1.5353362e-4f;
    for (float c : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f}) y = y * r + c;
    return y * (Lanes)((whole + 127) << 23);
}

// ROWS rows of c, WIDE columns each, become or gain a times b. Number p of row i of a lies at a + i * row + p * step.
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

// c (rows, columns) becomes or gains a times b. needed(i) says which rows of b rows i to i + TALL - 1 of a need: the
// rest of these rows of a is zero.
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

// `count` tokens of a head, one after the other.
void gather(const float *x, int64_t token, int64_t count, int64_t size, float *to) {
    for (int64_t t = 0; t < count; t++) std::memcpy(to + t * size, x + t * token, size * sizeof(float));
}

// The reverse of gather().
void spread(const float *x, int64_t count, int64_t size, float *to, int64_t token) {
    for (int64_t t = 0; t < count; t++) std::memcpy(to + t * token, x + t * size, size * sizeof(float));
}

// What gather() gives, channel by channel: (size, 64), with zeros after the last token.
void gather_channels(const float *x, int64_t token, int64_t count, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i++)
        for (int64_t t = 0; t < SIDE; t++) to[i * SIDE + t] = t < count ? x[t * token + i] : 0;
}

// Turns scores (keys, 64) of the queries from `first` on into weights: each exponential relative to its query's largest.
// Gives the sums, and in `logs` the logarithm of each query's sum, base 2.
void weigh(float *scores, int64_t low, int64_t keys, int64_t first, int64_t count, const Shape &shape, float *sums,
           float *logs) {
    const float factor = shape.scale * LOG2E;
    Lanes most[VECTORS], total[VECTORS];
    for (int part = 0; part < VECTORS; part++) most[part] = Lanes{} - INFINITY, total[part] = Lanes{};
    for (int64_t t = 0; t < keys; t++) {
        const Range seen = shape.seen_by(low + t, first, count);
        for (int part = 0; part < VECTORS; part++) {
            const Lanes score = lanes(scores + t * SIDE + part * LANES) * factor;
            most[part] = larger(most[part], seen.holds(SIDE) ? score : where(seen, part * LANES, score, -INFINITY));
        }
    }
    for (int64_t t = 0; t < keys; t++) {
        const Range seen = shape.seen_by(low + t, first, count);
        for (int part = 0; part < VECTORS; part++) {
            float *at = scores + t * SIDE + part * LANES;
            Lanes weight = power_of_two_below(lanes(at) * factor - most[part]);
            if (!seen.holds(SIDE)) weight = where(seen, part * LANES, weight, 0);
            total[part] += weight;
            put(at, weight);
        }
    }
    for (int part = 0; part < VECTORS; part++) {
        put(sums + part * LANES, total[part]);
        put(logs + part * LANES, most[part]);
    }
    for (int64_t i = 0; i < count; i++) logs[i] += std::log2(sums[i]);
}

// y, and `logs` (B, H, T): base 2, of the sums of the exponentials of each query.
void attention(const Heads<float> &q, const Heads<float> &k, const Heads<float> &v, const Heads<float> &y, float *logs,
               const Shape &shape, int64_t threads) {
    parts(shape.rows * shape.heads, shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, group = shape.heads / shape.kv_heads;
        std::vector<float> values(T * D), queries(SIDE * D), weights(shape.padded() * SIDE), out(SIDE * D);
        float sums[SIDE], own[SIDE];
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.heads, head = pair % shape.heads, kv = head / group;
            gather(v.at(b, 0, kv, D), v.token, T, D, values.data());
            for (int64_t first = 0; first < T; first += SIDE) {
                const int64_t count = std::min(SIDE, T - first);
                const int64_t low = std::max<int64_t>(first - shape.window, 0), keys = first + count - low;
                gather_channels(q.at(b, first, head, D), q.token, count, D, queries.data());
                product<false>(keys, SIDE, k.at(b, low, kv, D), k.token, 1, queries.data(), SIDE, weights.data(), SIDE,
                               [=](int64_t) { return Range{0, D}; });
                weigh(weights.data(), low, keys, first, count, shape, sums, own);
                std::memcpy(logs + pair * T + first, own, count * sizeof(float));
                product<false>(count, D, weights.data(), 1, SIDE, &values[low * D], D, out.data(), D, [=](int64_t i) {
                    return Range{0, std::min(first - low + i + TALL, keys)};  // queries see no later keys
                });
                for (int64_t i = 0; i < count; i++)
                    scaled(&out[i * D], 1.0f / sums[i], y.at(b, first + i, head, D), D);
            }
        }
    });
}

// What a block of queries and a block of keys make of their scores and of the gradients of the weights, (keys, 64) each:
// weights, and gradients of scores.
void slopes(float *scores, float *by_weight, int64_t low, int64_t keys, int64_t first, int64_t count,
            const Shape &shape, const float *logs, const float *along) {
    for (int64_t t = 0; t < keys; t++) {
        const Range seen = shape.seen_by(low + t, first, count);
        for (int part = 0; part < VECTORS; part++) {
            const int64_t at = t * SIDE + part * LANES;
            Lanes weight = power_of_two_below(lanes(scores + at) * (shape.scale * LOG2E) - lanes(logs + part * LANES));
            if (!seen.holds(SIDE)) weight = where(seen, part * LANES, weight, 0);
            put(scores + at, weight);
            put(by_weight + at, weight * (lanes(by_weight + at) - lanes(along + part * LANES)) * shape.scale);
        }
    }
}

// The gradients of q, k and v from that of y. The weights are computed again.
void attention_back(const Heads<float> &q, const Heads<float> &k, const Heads<float> &v, const Heads<float> &y,
                    const Heads<float> &g, const float *logs, const Heads<float> &dq, const Heads<float> &dk,
                    const Heads<float> &dv, const Shape &shape, int64_t threads) {
    parts(shape.rows * shape.kv_heads, 3 * shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, group = shape.heads / shape.kv_heads;
        std::vector<float> all_keys(T * D), by_key(T * D), by_value(T * D), queries(SIDE * D), grads(SIDE * D),
            query_channels(SIDE * D), grad_channels(SIDE * D), by_query(SIDE * D), scores(SIDE * SIDE),
            by_weight(SIDE * SIDE);
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.kv_heads, kv = pair % shape.kv_heads;
            gather(k.at(b, 0, kv, D), k.token, T, D, all_keys.data());
            std::fill(by_key.begin(), by_key.end(), 0.0f);
            std::fill(by_value.begin(), by_value.end(), 0.0f);
            for (int64_t head = kv * group; head < (kv + 1) * group; head++)
                for (int64_t first = 0; first < T; first += SIDE) {
                    const int64_t count = std::min(SIDE, T - first);
                    const float *own = q.at(b, first, head, D), *grad = g.at(b, first, head, D);
                    gather(own, q.token, count, D, queries.data());
                    gather(grad, g.token, count, D, grads.data());
                    gather_channels(own, q.token, count, D, query_channels.data());
                    gather_channels(grad, g.token, count, D, grad_channels.data());
                    float along[SIDE] = {}, log[SIDE] = {};
                    std::memcpy(log, logs + (b * shape.heads + head) * T + first, count * sizeof(float));
                    for (int64_t i = 0; i < count; i++) {
                        const float *out = y.at(b, first + i, head, D), *by_out = &grads[i * D];
                        for (int64_t j = 0; j < D; j++) along[i] += out[j] * by_out[j];
                    }
                    std::fill(by_query.begin(), by_query.end(), 0.0f);
                    const int64_t start = std::max<int64_t>(first - shape.window, 0) / SIDE * SIDE;
                    for (int64_t low = start; low < first + count; low += SIDE) {
                        const int64_t keys = std::min(SIDE, T - low);
                        const bool diagonal = low == first;
                        const auto channels = [=](int64_t) { return Range{0, D}; };
                        const auto later = [=](int64_t i) { return Range{diagonal ? i : 0, count}; };
                        const auto earlier = [=](int64_t i) {
                            return Range{0, diagonal ? std::min(i + TALL, keys) : keys};
                        };
                        product<false>(keys, SIDE, k.at(b, low, kv, D), k.token, 1, query_channels.data(), SIDE,
                                       scores.data(), SIDE, channels);
                        product<false>(keys, SIDE, v.at(b, low, kv, D), v.token, 1, grad_channels.data(), SIDE,
                                       by_weight.data(), SIDE, channels);
                        slopes(scores.data(), by_weight.data(), low, keys, first, count, shape, log, along);
                        product<true>(keys, D, scores.data(), SIDE, 1, grads.data(), D, &by_value[low * D], D, later);
                        product<true>(keys, D, by_weight.data(), SIDE, 1, queries.data(), D, &by_key[low * D], D,
                                      later);
                        product<true>(count, D, by_weight.data(), 1, SIDE, &all_keys[low * D], D, by_query.data(), D,
                                      earlier);
                    }
                    spread(by_query.data(), count, D, dq.at(b, first, head, D), dq.token);
                }
            spread(by_key.data(), T, D, dk.at(b, 0, kv, D), dk.token);
            spread(by_value.data(), T, D, dv.at(b, 0, kv, D), dv.token);
        }
    });
}

}  // namespace
