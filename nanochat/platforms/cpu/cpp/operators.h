// Operators for inference, each in one loop over memory: norms, rotations, attention to a cache, gates; and the loss.
//
// Numbers are fp32 or bf16 in memory and fp32 in between. A row never depends on other rows, so a reply is the same
// alone and in a batch. kernels.py documents the arguments.
#pragma once

#include "common.h"

namespace {

template <class T>
void norm(const T *x, const T *added, const float *weight, T *sum, T *y, int64_t rows, int64_t channels,
          float epsilon, int64_t threads) {
    parts(rows, rows * channels, threads, [=](int64_t first, int64_t last) {
        float factors[GROUP];
        for (int64_t start = first; start < last; start += GROUP) {
            const int64_t some = std::min(GROUP, last - start);
            for (int64_t i = 0; i < some; i++) {
                const T *in = x + (start + i) * channels;
                if (added) {
                    const T *more = added + (start + i) * channels;
                    T *both = sum + (start + i) * channels;
                    for (int64_t j = 0; j < channels; j++) narrow(wide(in[j]) + wide(more[j]), both[j]);
                    in = both;
                }
                factors[i] = squares(in, channels);
            }
            inverse_roots(factors, some, channels, epsilon);
            for (int64_t i = 0; i < some; i++) {
                const T *in = (added ? sum : x) + (start + i) * channels;
                T *out = y + (start + i) * channels;
                const float factor = factors[i];
                if (weight)
                    for (int64_t j = 0; j < channels; j++) narrow(wide(in[j]) * factor * weight[j], out[j]);
                else
                    for (int64_t j = 0; j < channels; j++) narrow(wide(in[j]) * factor, out[j]);
            }
        }
    });
}

// Normalizes and rotates one head. SIZE is the head dimension if it is known at compile time and the whole head is
// rotated, or else 0.
template <class T, int SIZE>
void turn_head(const T *x, float factor, const float *weight, const T *c, const T *s, T *y, int64_t given_size,
               int64_t given_half, float *n) {
    const int64_t size = SIZE ? SIZE : given_size, half = SIZE ? SIZE / 2 : given_half;
    float local[SIZE ? SIZE : 1];
    n = SIZE ? local : n;
    if (weight)
        for (int64_t i = 0; i < size; i++) n[i] = wide(x[i]) * factor * weight[i];
    else
        for (int64_t i = 0; i < size; i++) n[i] = wide(x[i]) * factor;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; i++) {
        narrow(n[i] * wide(c[i]) + n[i + half] * wide(s[i]), y[i]);
        narrow(n[i + half] * wide(c[i]) - n[i] * wide(s[i]), y[i + half]);
    }
    for (int64_t i = 2 * half; i < size; i++) narrow(n[i], y[i]);
}

template <class T>
void turn(const T *x, int64_t stride, const float *weight, const T *cos, const T *sin, int64_t turns, T *y,
          int64_t tokens, int64_t heads, int64_t size, int64_t half, float epsilon, float sharpen, int64_t threads) {
    auto one = size != 2 * half ? turn_head<T, 0> : size == 64 ? turn_head<T, 64> : size == 128 ? turn_head<T, 128>
                                                                                               : turn_head<T, 0>;
    parts(tokens, tokens * heads * size, threads, [=](int64_t begin, int64_t end) {
        std::vector<float> normed(size), factors(GROUP * heads);
        for (int64_t start = begin; start < end; start += GROUP) {
            const int64_t some = std::min(GROUP, end - start);
            std::fill(factors.begin(), factors.end(), 1.0f);
            if (epsilon >= 0) {  // otherwise nothing is normed
                for (int64_t i = 0; i < some * heads; i++)
                    factors[i] = squares(x + (start + i / heads) * stride + i % heads * size, size);
                inverse_roots(factors.data(), some * heads, size, epsilon);
            }
            for (int64_t i = 0; i < some; i++) {
                const int64_t token = start + i, place = token % turns * half;
                for (int64_t head = 0; head < heads; head++)
                    one(x + token * stride + head * size, factors[i * heads + head] * sharpen,
                        weight ? weight + head * size : nullptr, cos + place, sin + place,
                        y + (token * heads + head) * size, size, half, normed.data());
            }
        }
    });
}

// Attends with one query head to `keys` keys that are `stride` numbers apart. SIZE is the head dimension if it is known
// at compile time, or else 0.
template <class T, int SIZE>
void query(const float *q, const T *k, const T *v, int64_t stride, int64_t keys, int64_t size, float *scores,
           float *sums, T *y) {
    const int64_t D = SIZE ? SIZE : size;
    float most = -INFINITY;
    for (int64_t t = 0; t < keys; t++) {
        const T *key = k + t * stride;
        float score = 0;
        for (int64_t i = 0; i < D; i++) score += q[i] * wide(key[i]);
        scores[t] = score;
        most = score > most ? score : most;
    }
    float total = 0;
    for (int64_t t = 0; t < keys; t++) scores[t] = exponential(scores[t] - most);
    for (int64_t t = 0; t < keys; t++) total += scores[t];
    float local[SIZE ? SIZE : 1];
    float *out = SIZE ? local : sums;
    for (int64_t i = 0; i < D; i++) out[i] = 0;
    for (int64_t t = 0; t < keys; t++) {
        const T *value = v + t * stride;
        float share = scores[t];
        for (int64_t i = 0; i < D; i++) out[i] += share * wide(value[i]);
    }
    float inverse = 1.0f / total;
    for (int64_t i = 0; i < D; i++) narrow(out[i] * inverse, y[i]);
}

// Writes new keys and values into the cache and attends to it. Returns false, with nothing written, if a position is
// outside the `length` positions of a row of the cache.
template <class T>
bool attend(const T *q, int64_t q_stride, const T *k, int64_t k_stride, const T *v, int64_t v_stride, T *held_k,
            T *held_v, int64_t slot, int64_t length, const int64_t *places, T *y, int64_t y_stride, int64_t rows,
            int64_t heads, int64_t kv_heads, int64_t size, int64_t window, float scale, int64_t threads) {
    const int64_t width = kv_heads * size, group = heads / kv_heads;
    int64_t seen = 0;
    for (int64_t row = 0; row < rows; row++) {
        if (places[row] < 0 || places[row] >= length) return false;
        seen += std::min(places[row], window) + 1;
    }
    parts(rows, 2 * seen * heads * size, threads, [=](int64_t begin, int64_t end) {
        std::vector<float> scores, floats(2 * size);
        for (int64_t row = begin; row < end; row++) {
            const int64_t place = places[row], keys = std::min(place, window) + 1, first = place + 1 - keys;
            T *own_k = held_k + row * slot, *own_v = held_v + row * slot;
            std::memcpy(own_k + place * width, k + row * k_stride, width * sizeof(T));
            std::memcpy(own_v + place * width, v + row * v_stride, width * sizeof(T));
            if (int64_t(scores.size()) < keys) scores.resize(keys);
            for (int64_t head = 0; head < heads; head++) {
                const T *in = q + row * q_stride + head * size;
                const int64_t start = first * width + head / group * size;
                for (int64_t i = 0; i < size; i++) floats[i] = wide(in[i]) * scale;
                auto one = size == 64 ? query<T, 64> : size == 128 ? query<T, 128> : query<T, 0>;
                one(floats.data(), own_k + start, own_v + start, width, keys, size, scores.data(), &floats[size],
                    y + row * y_stride + head * size);
            }
        }
    });
    return true;
}

template <class T> void swiglu(const T *x, T *y, int64_t rows, int64_t width, int64_t threads) {
    parts(rows, rows * width, threads, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const T *gates = x + row * 2 * width, *ups = gates + width;
            T *out = y + row * width;
            for (int64_t i = 0; i < width; i++) {
                float gate = wide(gates[i]);
                narrow(gate * sigmoid(gate) * wide(ups[i]), out[i]);
            }
        }
    });
}

template <class T> void squared_relu(const T *x, T *y, int64_t count, int64_t threads) {
    parts(count, count, threads, [=](int64_t first, int64_t last) {
#pragma GCC ivdep  // y may be x itself
        for (int64_t i = first; i < last; i++) {
            float kept = wide(x[i]) > 0 ? wide(x[i]) : 0;
            narrow(kept * kept, y[i]);
        }
    });
}

template <class T> void mix(const T *x, const T *x0, const T *a, const T *b, T *y, int64_t count, int64_t threads) {
    const float of_x = wide(*a), of_x0 = wide(*b);
    parts(count, count, threads, [=](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) narrow(of_x * wide(x[i]) + of_x0 * wide(x0[i]), y[i]);
    });
}

// Computes cap tanh(x / cap) for the first `width` numbers of each row. Rows of x are `stride` numbers apart.
template <class T>
void softcap(const T *x, float *y, int64_t rows, int64_t width, int64_t stride, float cap, int64_t threads) {
    const float twice = 2 * cap, slope = 2 / cap;
    parts(rows, rows * width, threads, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const T *in = x + row * stride;
            float *out = y + row * width;
            for (int64_t i = 0; i < width; i++) out[i] = (sigmoid(wide(in[i]) * slope) - 0.5f) * twice;
        }
    });
}

// Computes the log-sum-exp of each row.
template <class T> void log_total(const T *x, float *y, int64_t rows, int64_t width, int64_t threads) {
    parts(rows, rows * width, threads, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const T *in = x + row * width;
            const float most = largest(in, width);
            float total = 0;
            for (int64_t i = 0; i < width; i++) total += exponential(wide(in[i]) - most);
            y[row] = most + std::log(total);
        }
    });
}

// Returns the sum of exp(capped logit - cap), and writes each exponential times the derivative of its capped logit to
// `slopes`.
template <class T> float capped_exponentials(const T *x, int64_t count, float cap, float *slopes) {
    const float slope = -2 / cap, twice = 2 * cap;
    float total = 0;
    int64_t i = 0;
#ifdef __AVX512F__
    constexpr float LOG2E = 1.44269504f;
    const __m512 one = _mm512_set1_ps(1), inner = _mm512_set1_ps(slope * LOG2E), outer = _mm512_set1_ps(twice * LOG2E);
    const __m512 most = _mm512_set1_ps(126);  // passed first to the minimum, so that NaN stays NaN
    __m512 totals = _mm512_setzero_ps();
    for (; i + 16 <= count; i += 16) {
        const __m512 divisor = power_of_two(_mm512_min_ps(most, sixteen(x + i) * inner)) + one;
        const __m512 near = _mm512_rcp14_ps(divisor), twice_near = near + near;
        const __m512 share = _mm512_fnmadd_ps(near * near, divisor, twice_near);  // one Newton step
        const __m512 exponent = power_of_two(_mm512_fmsub_ps(share, outer, outer));
        totals += exponent;
        _mm512_storeu_ps(slopes + i, exponent * (share - share * share) * _mm512_set1_ps(4));
    }
    total = _mm512_reduce_add_ps(totals);
#endif
    for (; i < count; i++) {
        const float share = 1.0f / (1.0f + exponential(wide(x[i]) * slope));  // the capped logit is (2 share - 1) cap
        const float exponent = exponential(share * twice - twice);
        total += exponent;
        slopes[i] = exponent * (4 * share * (1 - share));
    }
    return total;
}

// Computes the weighted cross-entropy of each row of logits, and overwrites the logits with their gradient. Only the
// first `vocab` logits of a row count. If `cap` is not 0, logits are softcapped first. A row with a negative target has
// no loss. Returns false, with nothing written, if a target whose weight is not 0 is not below `vocab`.
template <class T>
bool loss(T *x, const int64_t *targets, const float *weights, float *losses, int64_t rows, int64_t width,
          int64_t vocab, float cap, int64_t threads) {
    const float slope = cap ? 2 / cap : 1, square = cap ? 1 / (cap * cap) : 0;
    for (int64_t row = 0; row < rows; row++)
        if (weights[row] != 0 && targets[row] >= vocab) return false;
    parts(rows, 4 * rows * width, threads, [=](int64_t first, int64_t last) {
        std::vector<float> powers(vocab);
        float *power = powers.data();
        for (int64_t row = first; row < last; row++) {
            T *own = x + row * width;
            const float weight = weights[row];
            if (weight == 0 || targets[row] < 0) {
                losses[row] = 0 * weight;  // 0, or NaN if the weight is not finite
                std::memset(own, 0, width * sizeof(T));
                continue;
            }
            const int64_t target = targets[row];
            float total = 0, own_slope = 1, logit, most = cap;  // the cap serves as well as the largest
            if (cap) {
                logit = (sigmoid(wide(own[target]) * slope) - 0.5f) * (2 * cap);
                own_slope = 1 - logit * logit * square;
                total = capped_exponentials(own, vocab, cap, power);
            } else {
                logit = wide(own[target]);
                most = largest(own, vocab);
                for (int64_t i = 0; i < vocab; i++) total += power[i] = exponential(wide(own[i]) - most);
            }
            const float share = weight / total;
            const float mine = (exponential(logit - most) / total - 1) * weight * own_slope;
            losses[row] = (std::log(total) + most - logit) * weight;
            scaled(power, share, own, vocab);
            narrow(mine, own[target]);
            std::memset(own + vocab, 0, (width - vocab) * sizeof(T));
        }
    });
    return true;
}

}  // namespace
