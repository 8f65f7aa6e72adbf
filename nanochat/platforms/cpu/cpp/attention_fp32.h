// Causal attention for training in fp32, forward and backward, and code that attention.h uses too.
//
// As in attention.h, the scores of a block of 64 queries are stored keys by queries.
#pragma once

#include "common.h"
#include "lanes.h"

namespace {

struct Shape {
    int64_t rows, tokens, heads, kv_heads, size, window;
    float scale;
    const int64_t *positions;  // (rows, tokens) the position of each token in its document; null: rows are documents
    int64_t padded() const { return (tokens + SIDE - 1) / SIDE * SIDE; }
    int64_t work() const { return rows * heads * tokens * std::min(tokens, window); }

    // Returns which of the `count` queries from `first` on see key `key`. A query sees its own key and `window` before
    // it.
    Range seen_by(int64_t key, int64_t first, int64_t count) const {
        const int64_t from = std::max<int64_t>(key - first, 0), to = std::min(key - first + window + 1, count);
        return {from, std::max(from, to)};
    }
};

// The documents of a row of tokens: a query sees no keys of other documents.
class Documents {
    const Shape &shape;
    std::vector<int64_t> ends;  // for each token, also those after the last, the first token after its document

  public:
    Documents(const Shape &shape, int64_t row) : shape(shape), ends(shape.padded(), shape.tokens) {
        if (!shape.positions) return;
        const int64_t *own = shape.positions + row * shape.tokens;
        for (int64_t t = shape.tokens - 2; t >= 0; t--) ends[t] = own[t + 1] == 0 ? t + 1 : ends[t + 1];
    }

    // Returns the first key that the queries from `first` on see.
    int64_t earliest(int64_t first) const {
        const int64_t begin = std::upper_bound(ends.begin(), ends.end(), first) - ends.begin();
        return std::max(begin, first - shape.window);
    }

    Range seen_by(int64_t key, int64_t first, int64_t count) const {
        const Range seen = shape.seen_by(key, first, count);
        return {seen.from, std::max(seen.from, std::min(seen.to, ends[key] - first))};
    }
};

// Copies contiguous tokens back to a head, as the reverse of gather().
void spread(const float *x, int64_t count, int64_t size, float *to, int64_t token) {
    for (int64_t t = 0; t < count; t++) std::memcpy(to + t * token, x + t * size, size * sizeof(float));
}

// Copies tokens of a head channel by channel: (size, 64), with zeros after the last token.
void gather_channels(const float *x, int64_t token, int64_t count, int64_t size, float *to) {
    for (int64_t i = 0; i < size; i++)
        for (int64_t t = 0; t < SIDE; t++) to[i * SIDE + t] = t < count ? x[t * token + i] : 0;
}

// Converts scores (keys, 64) of the queries from `first` on into unnormalized weights, exp(scale (score - largest score
// of the query)). Also writes the sum of each query's weights, and to `logs` the base-2 log-sum-exp of its scaled
// scores.
void weigh(float *scores, int64_t low, int64_t keys, int64_t first, int64_t count, const Documents &documents,
           float scale, float *sums, float *logs) {
    const float factor = scale * LOG2E;
    Lanes most[VECTORS], total[VECTORS];
    for (int part = 0; part < VECTORS; part++) most[part] = Lanes{} - INFINITY, total[part] = Lanes{};
    for (int64_t t = 0; t < keys; t++) {
        const Range seen = documents.seen_by(low + t, first, count);
        for (int part = 0; part < VECTORS; part++) {
            const Lanes score = lanes(scores + t * SIDE + part * LANES) * factor;
            most[part] = larger(most[part], seen.holds(SIDE) ? score : where(seen, part * LANES, score, -INFINITY));
        }
    }
    for (int64_t t = 0; t < keys; t++) {
        const Range seen = documents.seen_by(low + t, first, count);
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

// Computes y, and in `logs` (B, H, T) the base-2 log-sum-exp of each query's scaled scores.
void attention(const Heads<float> &q, const Heads<float> &k, const Heads<float> &v, const Heads<float> &y, float *logs,
               const Shape &shape, int64_t threads) {
    parts(shape.rows * shape.heads, shape.work(), threads, [&](int64_t begin, int64_t end) {
        const int64_t T = shape.tokens, D = shape.size, group = shape.heads / shape.kv_heads;
        std::vector<float> values(T * D), queries(SIDE * D), weights(shape.padded() * SIDE), out(SIDE * D);
        float sums[SIDE], own[SIDE];
        for (int64_t pair = begin; pair < end; pair++) {
            const int64_t b = pair / shape.heads, head = pair % shape.heads, kv = head / group;
            const Documents documents(shape, b);
            gather(v.at(b, 0, kv, D), v.token, T, D, values.data());
            for (int64_t first = 0; first < T; first += SIDE) {
                const int64_t count = std::min(SIDE, T - first);
                const int64_t low = documents.earliest(first), keys = first + count - low;
                gather_channels(q.at(b, first, head, D), q.token, count, D, queries.data());
                product<false>(keys, SIDE, k.at(b, low, kv, D), k.token, 1, queries.data(), SIDE, weights.data(), SIDE,
                               [=](int64_t) { return Range{0, D}; });
                weigh(weights.data(), low, keys, first, count, documents, shape.scale, sums, own);
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

// For a block of queries and a block of keys, converts scores into weights, and gradients of the weights into gradients
// of the scores, (keys, 64) each.
void slopes(float *scores, float *by_weight, int64_t low, int64_t keys, int64_t first, int64_t count,
            const Documents &documents, float scale, const float *logs, const float *along) {
    for (int64_t t = 0; t < keys; t++) {
        const Range seen = documents.seen_by(low + t, first, count);
        for (int part = 0; part < VECTORS; part++) {
            const int64_t at = t * SIDE + part * LANES;
            Lanes weight = power_of_two_below(lanes(scores + at) * (scale * LOG2E) - lanes(logs + part * LANES));
            if (!seen.holds(SIDE)) weight = where(seen, part * LANES, weight, 0);
            put(scores + at, weight);
            put(by_weight + at, weight * (lanes(by_weight + at) - lanes(along + part * LANES)) * scale);
        }
    }
}

// Computes the gradients of q, k and v from the gradient of y. The weights are recomputed.
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
            const Documents documents(shape, b);
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
                    const int64_t start = documents.earliest(first) / SIDE * SIDE;
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
                        slopes(scores.data(), by_weight.data(), low, keys, first, count, documents, shape.scale, log,
                               along);
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
