// A pass of one new token per row, or of a few, through all layers of a published decoder.
//
// The operators are those of operators.h, panels.h and products.h in the order of models/qwen/layers.py, so that the
// results are the same as when Python calls them one by one, which takes up to half as long as the products when there
// is one row.
#pragma once

#include "operators.h"
#include "panels.h"
#ifdef __AVX512BF16__
#include "products.h"
#endif

namespace {

enum Format : int64_t { FP32, BF16, INT8 };

// A matrix with any factors and biases of its outputs: in panels for activations in fp32, in blocks for those in bf16.
// decoder.py has the same fields in the same order.
struct Matrix {
    const void *weights;
    const float *scales, *bias;
    int64_t format, outputs, inputs;
};

struct Layer {
    Matrix q, k, v;  // if k.weights is null, q holds the rows of all three
    Matrix out, gate_up, down;
    const float *first_norm, *second_norm;  // (channels)
    const float *head_norms;                // (heads + kv_heads, size), or null
    int64_t window;
    int64_t half;  // pairs of channels of a head that are rotated
};

struct Sizes {
    int64_t layers, rows, tokens;  // `tokens` are those of each row
    int64_t channels, heads, kv_heads, size;
    int64_t hidden;      // channels within the MLP
    int64_t length;      // positions in a slot of the cache
    int64_t slot, layer; // numbers from one slot, and from one layer, of the cache to the next
    int64_t turns;       // tokens that have a rotation of their own: those of one row, or of all
};

inline void product(const Matrix &m, const float *x, float *y, int64_t rows, int64_t threads) {
    if (m.format == FP32) panels(x, (const float *)m.weights, m.scales, y, threads, rows, m.outputs, m.inputs);
    if (m.format == BF16) panels(x, (const bf16 *)m.weights, m.scales, y, threads, rows, m.outputs, m.inputs);
    if (m.format == INT8) panels(x, (const int8_t *)m.weights, m.scales, y, threads, rows, m.outputs, m.inputs);
}

#ifdef __AVX512BF16__
inline void product(const Matrix &m, const bf16 *x, bf16 *y, int64_t rows, int64_t threads) {
    if (m.format == BF16) multiply_blocks(x, (const bf16 *)m.weights, m.scales, y, threads, rows, m.outputs, m.inputs);
    if (m.format == INT8) multiply_blocks(x, (const int8_t *)m.weights, m.scales, y, threads, rows, m.outputs, m.inputs);
}
#endif

template <class T> void multiply(const Matrix &m, const T *x, T *y, int64_t rows, int64_t threads) {
    product(m, x, y, rows, threads);
    if (m.bias)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < m.outputs; i++)
                narrow(wide(y[row * m.outputs + i]) + m.bias[i], y[row * m.outputs + i]);
}

// The queries, keys or values of all rows, among products.
template <class T> struct Part {
    T *x;
    int64_t stride;  // numbers from one row to the next
};

// Computes the normed activations y (rows, tokens, channels) after the last layer for embeddings x, which are overwritten.
// Writes the new keys and values to their positions `places` (tokens, rows) in the cache. Returns false if a position is
// outside of it.
template <class T>
bool decode(const Layer *layers, const Sizes &s, T *x, const float *last_norm, const T *cos, const T *sin, T *cached_k,
            T *cached_v, const int64_t *places, T *y, int64_t threads, float epsilon, float scale) {
    const int64_t rows = s.rows * s.tokens;  // of all products
    const int64_t q_width = s.heads * s.size, kv_width = s.kv_heads * s.size;
    const int64_t width = q_width + 2 * kv_width;
    std::vector<T> normed(rows * s.channels), products(rows * width), turned(rows * (q_width + kv_width));
    std::vector<T> attended(rows * q_width), added(rows * s.channels);
    std::vector<T> gates(rows * 2 * s.hidden), inner(rows * s.hidden);
    const T *mlp = nullptr;  // the output of the previous layer's MLP, which is added to x together with the norm
    for (int64_t i = 0; i < s.layers; i++) {
        const Layer &layer = layers[i];
        norm(x, mlp, layer.first_norm, x, normed.data(), rows, s.channels, epsilon, threads);

        Part<T> q = {products.data(), width}, k = {q.x + q_width, width}, v = {k.x + kv_width, width};
        if (layer.k.weights) {
            q.stride = q_width, k = {q.x + rows * q_width, kv_width}, v = {k.x + rows * kv_width, kv_width};
            multiply(layer.k, normed.data(), k.x, rows, threads);
            multiply(layer.v, normed.data(), v.x, rows, threads);
        }
        multiply(layer.q, normed.data(), q.x, rows, threads);
        const float *k_norms = layer.head_norms ? layer.head_norms + q_width : nullptr;
        const float head_epsilon = layer.head_norms ? epsilon : -1;
        T *turned_q = turned.data(), *turned_k = turned_q + rows * q_width;
        turn(q.x, q.stride, layer.head_norms, cos, sin, s.turns, turned_q, rows, s.heads, s.size, layer.half,
             head_epsilon, 1.0f, threads);
        turn(k.x, k.stride, k_norms, cos, sin, s.turns, turned_k, rows, s.kv_heads, s.size, layer.half, head_epsilon,
             1.0f, threads);
        for (int64_t t = 0; t < s.tokens; t++) {  // one token after the other, which are rounded as they are alone
            const bool fits = attend(turned_q + t * q_width, s.tokens * q_width, turned_k + t * kv_width,
                                     s.tokens * kv_width, v.x + t * v.stride, s.tokens * v.stride,
                                     cached_k + i * s.layer, cached_v + i * s.layer, s.slot, s.length,
                                     places + t * s.rows, &attended[t * q_width], s.tokens * q_width, s.rows, s.heads,
                                     s.kv_heads, s.size, layer.window, scale, threads);
            if (!fits) return false;
        }

        multiply(layer.out, attended.data(), added.data(), rows, threads);
        norm(x, added.data(), layer.second_norm, x, normed.data(), rows, s.channels, epsilon, threads);
        multiply(layer.gate_up, normed.data(), gates.data(), rows, threads);
        swiglu(gates.data(), inner.data(), rows, s.hidden, threads);
        multiply(layer.down, inner.data(), added.data(), rows, threads);
        mlp = added.data();
    }
    norm(x, mlp, last_norm, x, y, rows, s.channels, epsilon, threads);
    return true;
}

}  // namespace
