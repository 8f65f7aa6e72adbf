// Products of training in 8-bit integers. They are a source of their own because they take longer to compile than all of
// training.cpp, and only --matmul int8 needs them. training.py documents the arguments.

#include "int8.h"

extern "C" void pack_int8_fp32(const float *w, uint8_t *packed, float *factors, int64_t threads, int64_t outputs,
                               int64_t inputs, int64_t back) {
    int8::pack(w, packed, factors, outputs, inputs, back, threads);
}

extern "C" void product_int8_bf16(const bf16 *x, const uint8_t *packed, const float *factors, bf16 *y, int64_t threads,
                                  int64_t rows, int64_t outputs, int64_t inputs, int64_t squared) {
    auto product = squared ? int8::product<true> : int8::product<false>;
    product(x, packed, factors, y, rows, outputs, inputs, threads);
}

extern "C" void gradient_int8_bf16(const bf16 *g, const bf16 *x, float *dw, int64_t threads, int64_t tokens,
                                   int64_t outputs, int64_t inputs) {
    int8::gradient(g, x, dw, tokens, outputs, inputs, threads);
}
