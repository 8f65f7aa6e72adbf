// Attention of a chunk of queries to a cache in fp32, which reads keys and values where they lie.
//
// The heads of a group share their keys and values, so their queries are computed together: column i of the scores is
// head i % group of query i / group. Keys are taken in blocks, and what a query has summed so far is scaled down when a
// larger score is found. Blocks begin at multiples of KEYS, so the result of a query does not depend on its chunk.
#pragma once

#include "common.h"
#include "lanes.h"

namespace {

constexpr int64_t KEYS = 256;  // keys in a block, whose scores stay in the processor's cache
constexpr float NOTHING = -1e30f;  // below every score; unlike infinity, it can be subtracted from itself

struct Chunk {
    int64_t rows, count, heads, kv_heads, size, window;
    float scale;
    int64_t group() const { return heads / kv_heads; }
    int64_t columns() const { return count * group(); }
};

// Up to 64 columns of a chunk, in one row and one group of heads.
struct Columns {
    int64_t from, count, place;  // the first column, and the position of the chunk's first query
    const Chunk &chunk;

    int64_t position(int64_t column) const { return place + (from + column) / chunk.group(); }

    // Returns which columns see the key at a position. A query sees its own key and `window` before it.
    Range seeing(int64_t key) const {
        const int64_t first = std::max<int64_t>(key - place, 0);
        const int64_t end = std::min(key - place + chunk.window + 1, chunk.count);
        const int64_t low = std::clamp<int64_t>(first * chunk.group() - from, 0, count);
        return {low, std::clamp<int64_t>(end * chunk.group() - from, low, count)};
    }
};

// Copies queries channel by channel, (size, 64), with zeros after the last column, so that products of them with keys
// are base-2 logarithms of weights.
void gather_queries(const Columns &columns, const Heads<const float> &q, int64_t row, int64_t kv, float *to) {
    const Chunk &chunk = columns.chunk;
    const int64_t group = chunk.group();
    std::fill(to, to + chunk.size * SIDE, 0.0f);
    for (int64_t i = 0; i < columns.count; i++) {
        const int64_t column = columns.from + i;
        const float *query = q.at(row, column / group, kv * group + column % group, chunk.size);
        for (int64_t j = 0; j < chunk.size; j++) to[j * SIDE + i] = query[j] * (chunk.scale * LOG2E);
    }
}

// What the columns have summed over the keys so far.
struct Sums {
    float most[SIDE], weights[SIDE];  // the largest score, and the sum of weights relative to it
    std::vector<float> values;  // (64, size) the weighted sums of the values

    explicit Sums(int64_t size) : values(SIDE * size) {}

    void clear() {
        std::fill(most, most + SIDE, NOTHING);
        std::fill(weights, weights + SIDE, 0.0f);
        std::fill(values.begin(), values.end(), 0.0f);
    }

    // Converts the scores (keys, 64) of the keys from `low` on into weights relative to the largest score yet, and scales
    // the earlier sums down accordingly.
    void weigh(float *scores, int64_t low, int64_t keys, const Columns &columns) {
        const int64_t size = columns.chunk.size;
        float factors[SIDE];
        for (int part = 0; part * LANES < columns.count; part++) {
            const auto visible = [&](int64_t t, Lanes x, float hidden) {
                const Range seen = columns.seeing(low + t);
                return seen.holds(columns.count) ? x : where(seen, part * LANES, x, hidden);
            };
            float *const own = scores + part * LANES;
            const Lanes before = lanes(most + part * LANES);
            Lanes now = before;
            for (int64_t t = 0; t < keys; t++)
                now = larger(now, visible(t, lanes(own + t * SIDE), NOTHING));
            const Lanes factor = power_of_two_below(before - now);
            Lanes total = lanes(weights + part * LANES) * factor;
            for (int64_t t = 0; t < keys; t++) {
                const Lanes weight = visible(t, power_of_two_below(lanes(own + t * SIDE) - now), 0);
                total += weight;
                put(own + t * SIDE, weight);
            }
            put(most + part * LANES, now);
            put(weights + part * LANES, total);
            put(factors + part * LANES, factor);
        }
        for (int64_t i = 0; i < columns.count; i++)
            if (factors[i] != 1.0f) scaled(&values[i * size], factors[i], &values[i * size], size);
    }
};

// Computes attention; `firsts` holds the position of the first query of each row.
void attend_chunk(const Heads<const float> &q, const Heads<const float> &k, const Heads<const float> &v,
                  const Heads<float> &y, const int64_t *firsts, const Chunk &chunk, int64_t threads) {
    const int64_t blocks = (chunk.columns() + SIDE - 1) / SIDE, tasks = chunk.rows * chunk.kv_heads * blocks;
    const int64_t D = chunk.size, group = chunk.group();
    const int64_t longest = *std::max_element(firsts, firsts + chunk.rows) + chunk.count;
    parts(tasks, chunk.rows * chunk.count * longest * chunk.heads, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> queries(D * SIDE), scores(KEYS * SIDE), block(KEYS * D);
        Sums sums(D);
        for (int64_t task = begin; task < end; task++) {
            const int64_t row = task / blocks / chunk.kv_heads, kv = task / blocks % chunk.kv_heads;
            const int64_t from = task % blocks * SIDE;
            const Columns columns{from, std::min(SIDE, chunk.columns() - from), firsts[row], chunk};
            gather_queries(columns, q, row, kv, queries.data());
            sums.clear();
            const int64_t earliest = std::max<int64_t>(columns.position(0) - chunk.window, 0) / KEYS * KEYS;
            const int64_t high = columns.position(columns.count - 1) + 1;
            for (int64_t low = earliest; low < high; low += KEYS) {
                const int64_t keys = std::min(KEYS, high - low);
                gather(k.at(row, low, kv, D), k.token, keys, D, block.data());
                product<false>(keys, columns.count, block.data(), D, 1, queries.data(), SIDE,
                               scores.data(), SIDE, [=](int64_t) { return Range{0, D}; });
                sums.weigh(scores.data(), low, keys, columns);
                gather(v.at(row, low, kv, D), v.token, keys, D, block.data());
                product<true>(columns.count, D, scores.data(), 1, SIDE, block.data(), D,
                              sums.values.data(), D, [=](int64_t) { return Range{0, keys}; });
            }
            for (int64_t i = 0; i < columns.count; i++)
                scaled(&sums.values[i * D], 1.0f / sums.weights[i],
                       y.at(row, (from + i) / group, kv * group + (from + i) % group, D), D);
        }
    });
}

}  // namespace
