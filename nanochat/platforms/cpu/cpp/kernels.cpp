// The functions that kernels.py calls: operators for inference, products with panels, and whole decoding passes.
//
// torch runs each operator as three to ten of its own, and in a pass with few tokens launching these costs more than
// computing. The logits of a loss are so many that each of torch's operators waits for memory. kernels.py compiles this
// file and documents the arguments.

#include "attention_chunk.h"
#include "decode.h"
#include "operators.h"
#include "panels.h"

#define PRODUCT(FUNCTION, X, W)                                                                                        \
    (const X *x, const W *w, const float *scales, X *y, int64_t threads, int64_t rows, int64_t outputs,                \
     int64_t inputs) {                                                                                                 \
        FUNCTION(x, w, scales, y, threads, rows, outputs, inputs);                                                     \
    }
extern "C" void panels_fp32 PRODUCT(panels, float, float)
extern "C" void panels_bf16 PRODUCT(panels, float, bf16)
extern "C" void panels_int8 PRODUCT(panels, float, int8_t)

#ifdef __AVX512BF16__
extern "C" void blocks_bf16 PRODUCT(multiply_blocks, bf16, bf16)
extern "C" void blocks_int8 PRODUCT(multiply_blocks, bf16, int8_t)

extern "C" void attend_many_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const int64_t *firsts, bf16 *y,
                                 int64_t threads, int64_t q_row, int64_t q_stride, int64_t k_row, int64_t k_stride,
                                 int64_t v_row, int64_t v_stride, int64_t rows, int64_t count, int64_t heads,
                                 int64_t kv_heads, int64_t size, int64_t window, float scale) {
    attend_many(q, k, v, firsts, y, threads, q_row, q_stride, k_row, k_stride, v_row, v_stride, rows, count, heads,
                kv_heads, size, window, scale);
}
#endif

extern "C" void attend_many_fp32(const float *q, const float *k, const float *v, const int64_t *firsts, float *y,
                                 int64_t threads, int64_t q_row, int64_t q_stride, int64_t k_row, int64_t k_stride,
                                 int64_t v_row, int64_t v_stride, int64_t rows, int64_t count, int64_t heads,
                                 int64_t kv_heads, int64_t size, int64_t window, float scale) {
    attend_chunk({q, q_row, q_stride}, {k, k_row, k_stride}, {v, v_row, v_stride},
                 {y, count * heads * size, heads * size}, firsts, {rows, count, heads, kv_heads, size, window, scale},
                 threads);
}

#define BOTH(RESULT, NAME, ARGUMENTS, GIVEN)                                                                           \
    extern "C" RESULT NAME##_fp32 ARGUMENTS(float) { return NAME<float> GIVEN; }                                       \
    extern "C" RESULT NAME##_bf16 ARGUMENTS(bf16) { return NAME<bf16> GIVEN; }

#define NORM(T)                                                                                                        \
    (const T *x, const T *added, const float *weight, T *sum, T *y, int64_t threads, int64_t rows, int64_t channels,   \
     float epsilon)
BOTH(void, norm, NORM, (x, added, weight, sum, y, rows, channels, epsilon, threads))

#define TURN(T)                                                                                                        \
    (const T *x, const float *weight, const T *cos, const T *sin, T *y, int64_t threads, int64_t stride,               \
     int64_t turns, int64_t tokens, int64_t heads, int64_t size, int64_t half, float epsilon, float sharpen)
BOTH(void, turn, TURN, (x, stride, weight, cos, sin, turns, y, tokens, heads, size, half, epsilon, sharpen, threads))

#define ATTEND(T)                                                                                                      \
    (const T *q, const T *k, const T *v, T *held_k, T *held_v, const int64_t *places, T *y, int64_t threads,           \
     int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t slot, int64_t length, int64_t rows,                 \
     int64_t heads, int64_t kv_heads, int64_t size, int64_t window, float scale)
BOTH(bool, attend, ATTEND, (q, q_stride, k, k_stride, v, v_stride, held_k, held_v, slot, length, places, y, heads * size, rows,
                            heads, kv_heads, size, window, scale, threads))

#define SWIGLU(T) (const T *x, T *y, int64_t threads, int64_t rows, int64_t width)
BOTH(void, swiglu, SWIGLU, (x, y, rows, width, threads))

#define SQUARED_RELU(T) (const T *x, T *y, int64_t threads, int64_t count)
BOTH(void, squared_relu, SQUARED_RELU, (x, y, count, threads))

#define MIX(T) (const T *x, const T *x0, const T *a, const T *b, T *y, int64_t threads, int64_t count)
BOTH(void, mix, MIX, (x, x0, a, b, y, count, threads))

#define SOFTCAP(T)                                                                                                     \
    (const T *x, float *y, int64_t threads, int64_t rows, int64_t width, int64_t stride, float cap)
BOTH(void, softcap, SOFTCAP, (x, y, rows, width, stride, cap, threads))

#define LOG_TOTAL(T) (const T *x, float *y, int64_t threads, int64_t rows, int64_t width)
BOTH(void, log_total, LOG_TOTAL, (x, y, rows, width, threads))

#define LOSS(T)                                                                                                        \
    (T *x, const int64_t *targets, const float *weights, float *losses, int64_t threads, int64_t rows, int64_t width,  \
     int64_t vocab, float cap)
BOTH(bool, loss, LOSS, (x, targets, weights, losses, rows, width, vocab, cap, threads))

#define DECODE(T)                                                                                                      \
    (const Layer *layers, const Sizes *sizes, T *x, const float *last_norm, const T *cos, const T *sin, T *cached_k,   \
     T *cached_v, const int64_t *places, T *y, int64_t threads, float epsilon, float scale) {                          \
        return decode(layers, *sizes, x, last_norm, cos, sin, cached_k, cached_v, places, y, threads, epsilon, scale); \
    }
extern "C" bool decode_fp32 DECODE(float)
#ifdef __AVX512BF16__
extern "C" bool decode_bf16 DECODE(bf16)
#endif
