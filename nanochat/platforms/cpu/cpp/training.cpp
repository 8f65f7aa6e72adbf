// Operators for training, each in one loop over memory: gradients of norms, rotations, gates and mixtures, and
// attention with its gradients.
//
// Numbers are fp32 or bf16 in memory and fp32 in between. Sums over tokens first store each token's terms and then add
// these in token order, so no result depends on the number of threads. training.py documents the arguments.

#include "attention_fp32.h"
#include "common.h"
#ifdef __AVX512BF16__
#include "attention.h"
#endif

namespace {

// For a group of rows, the factor of each row's RMS norm, and how much of the row must be subtracted from its gradient.
struct Norms {
    float inverses[GROUP], along[GROUP];

    template <class T, class G> void add(int64_t i, const T *x, const G *g, int64_t channels) {
        float sum = 0, products = 0;
        for (int64_t j = 0; j < channels; j++) {
            sum += wide(x[j]) * wide(x[j]);
            products += wide(x[j]) * wide(g[j]);
        }
        inverses[i] = sum, along[i] = products;
    }

    void finish(int64_t count, int64_t channels, float epsilon) {
        inverse_roots(inverses, count, channels, epsilon);
        for (int64_t i = 0; i < count; i++)
            along[i] = inverses[i] * inverses[i] * inverses[i] * along[i] / float(channels);
    }
};

// Computes dx for y = norm(x), plus `more`, the gradient of x from its other uses.
template <class T>
void norm_back(const T *x, const T *g, const T *more, T *dx, int64_t rows, int64_t channels, float epsilon,
               int64_t threads) {
    parts(rows, 2 * rows * channels, threads, [=](int64_t first, int64_t last) {
        Norms made;
        for (int64_t start = first; start < last; start += GROUP) {
            const int64_t some = std::min(GROUP, last - start);
            for (int64_t i = 0; i < some; i++)
                made.add(i, x + (start + i) * channels, g + (start + i) * channels, channels);
            made.finish(some, channels, epsilon);
            for (int64_t i = 0; i < some; i++) {
                const float inverse = made.inverses[i], along = made.along[i];
                const int64_t from = (start + i) * channels, to = from + channels;
                if (more)
                    for (int64_t j = from; j < to; j++)
                        narrow(inverse * wide(g[j]) - along * wide(x[j]) + wide(more[j]), dx[j]);
                else
                    for (int64_t j = from; j < to; j++) narrow(inverse * wide(g[j]) - along * wide(x[j]), dx[j]);
            }
        }
    });
}

// Adds up rows of `columns` numbers each.
void add_rows(const float *each, int64_t rows, int64_t columns, float *sums) {
    std::vector<double> totals(columns);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < columns; i++) totals[i] += each[row * columns + i];
    for (int64_t i = 0; i < columns; i++) sums[i] = float(totals[i]);
}

// Computes dx, dx0, da and db for y = a x + b x0. `more` is added to dx0.
template <class T>
void mix_back(const T *g, const T *x, const T *x0, const T *more, const T *a, const T *b, T *dx, T *dx0, float *sums,
              int64_t rows, int64_t channels, int64_t threads) {
    const float of_x = wide(*a), of_x0 = wide(*b);
    std::vector<float> each(2 * rows);
    float *products = each.data();
    parts(rows, 2 * rows * channels, threads, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const int64_t at = row * channels;
            float by_a = 0, by_b = 0;
            for (int64_t i = at; i < at + channels; i++) {
                const float slope = wide(g[i]);
                by_a += slope * wide(x[i]);
                by_b += slope * wide(x0[i]);
                narrow(of_x * slope, dx[i]);
            }
            products[2 * row] = by_a, products[2 * row + 1] = by_b;
            if (more)
                for (int64_t i = at; i < at + channels; i++) narrow(of_x0 * wide(g[i]) + wide(more[i]), dx0[i]);
            else
                for (int64_t i = at; i < at + channels; i++) narrow(of_x0 * wide(g[i]), dx0[i]);
        }
    });
    add_rows(products, rows, 2, sums);
}

// Computes the gradient of a head before its rotation. SIZE is the head dimension if it is known at compile time, or
// else 0.
template <class T, int SIZE>
void turn_head_back(const T *g, const T *c, const T *s, float *back, int64_t size, float sharpen) {
    const int64_t half = (SIZE ? SIZE : size) / 2;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; i++) {
        const float one = wide(g[i]) * sharpen, two = wide(g[i + half]) * sharpen;
        back[i] = one * wide(c[i]) - two * wide(s[i]);
        back[i + half] = one * wide(s[i]) + two * wide(c[i]);
    }
}

// Computes dx for heads that were normalized, multiplied by `sharpen` and rotated. The tokens of x and dx are
// `x_stride` and `dx_stride` numbers apart, and g is contiguous.
template <class T>
void turn_back(const T *g, const T *x, const T *cos, const T *sin, T *dx, int64_t x_stride, int64_t dx_stride,
               int64_t turns, int64_t tokens, int64_t heads, int64_t size, float epsilon, float sharpen,
               int64_t threads) {
    const int64_t half = size / 2;
    auto one = size == 64 ? turn_head_back<T, 64> : size == 128 ? turn_head_back<T, 128> : turn_head_back<T, 0>;
    parts(tokens, 2 * tokens * heads * size, threads, [=](int64_t begin, int64_t end) {
        std::vector<float> turned(GROUP * size);
        Norms made;
        for (int64_t start = begin * heads; start < end * heads; start += GROUP) {  // heads of all tokens, in order
            const int64_t some = std::min(GROUP, end * heads - start);
            for (int64_t i = 0; i < some; i++) {
                const int64_t token = (start + i) / heads, head = (start + i) % heads, place = token % turns * half;
                float *back = &turned[i * size];
                one(g + (start + i) * size, cos + place, sin + place, back, size, sharpen);
                made.add(i, x + token * x_stride + head * size, back, size);
            }
            made.finish(some, size, epsilon);
            for (int64_t i = 0; i < some; i++) {
                const int64_t token = (start + i) / heads, head = (start + i) % heads;
                const T *in = x + token * x_stride + head * size;
                T *out = dx + token * dx_stride + head * size;
                const float *back = &turned[i * size], inverse = made.inverses[i], along = made.along[i];
                for (int64_t j = 0; j < size; j++) narrow(inverse * back[j] - along * wide(in[j]), out[j]);
            }
        }
    });
}

// Computes dx for y = relu(x)^2. It needs only y, because 2 relu(x) = 2 sqrt(y).
template <class T> void squared_relu_back(const T *g, const T *y, T *dx, int64_t count, int64_t threads) {
    parts(count, 2 * count, threads, [=](int64_t first, int64_t last) {
#pragma GCC ivdep  // dx may be g
        for (int64_t i = first; i < last; i++) narrow(2 * wide(g[i]) * std::sqrt(wide(y[i])), dx[i]);
    });
}

// Computes y = x + lambda sigmoid(w x) before, where w reads the first `read` channels, and `before` is the x of the
// token before. The first token of a row of `length` tokens has none, so its y is x.
template <class T>
void smear(const T *x, const T *w, const T *lambda, T *y, float *gates, int64_t tokens, int64_t length,
           int64_t channels, int64_t read, int64_t threads) {
    const float most = wide(*lambda);
    parts(tokens, 2 * tokens * channels, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T *own = x + token * channels, *before = own - channels;
            T *out = y + token * channels;
            gates[token] = sigmoid(dot(own, w, read));
            if (token % length == 0) {
                std::memcpy(out, own, channels * sizeof(T));
                continue;
            }
            const float gate = most * gates[token];
            for (int64_t i = 0; i < channels; i++) narrow(wide(own[i]) + gate * wide(before[i]), out[i]);
        }
    });
}

// Computes dx, dw and dlambda for smear(). `sums` holds dw followed by dlambda.
template <class T>
void smear_back(const T *g, const T *x, const T *w, const T *lambda, const float *gates, T *dx, float *sums,
                int64_t tokens, int64_t length, int64_t channels, int64_t read, int64_t threads) {
    const float most = wide(*lambda);
    std::vector<float> products(tokens * (read + 1));
    float *each = products.data();
    parts(tokens, 4 * tokens * channels, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T *own = x + token * channels, *slope = g + token * channels;
            T *out = dx + token * channels;
            const float by_gate = token % length ? dot(slope, own - channels, channels) : 0;
            const float gate = gates[token], by_logit = by_gate * most * gate * (1 - gate);
            float *row = each + token * (read + 1);
            for (int64_t i = 0; i < read; i++) row[i] = by_logit * wide(own[i]);
            row[read] = by_gate * gate;
            const bool followed = (token + 1) % length != 0;
            const float after = followed ? most * gates[token + 1] : 0;
            const T *next = followed ? slope + channels : slope;
            for (int64_t i = 0; i < read; i++)
                narrow(wide(slope[i]) + after * wide(next[i]) + by_logit * wide(w[i]), out[i]);
            for (int64_t i = read; i < channels; i++) narrow(wide(slope[i]) + after * wide(next[i]), out[i]);
        }
    });
    add_rows(each, tokens, read + 1, sums);
}

// Adds 3 sigmoid(w x) value to each head of v, where w reads the first `read` channels of x. The tokens of v are
// `stride` numbers apart. Writes sigmoid(w x) to `gates` (tokens, heads).
template <class T>
void gate(const T *x, const T *w, const T *value, T *v, float *gates, int64_t tokens, int64_t channels, int64_t stride,
          int64_t heads, int64_t size, int64_t read, int64_t threads) {
    parts(tokens, 2 * tokens * heads * size, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++)
            for (int64_t head = 0; head < heads; head++) {
                const T *added = value + (token * heads + head) * size;
                T *own = v + token * stride + head * size;
                const float open = sigmoid(dot(x + token * channels, w + head * read, read));
                gates[token * heads + head] = open;
                for (int64_t i = 0; i < size; i++) narrow(wide(own[i]) + 3 * open * wide(added[i]), own[i]);
            }
    });
}

// Computes the gradients for gate(): of `value`, and of w in `sums` (heads, read). Also adds the gradient of the first
// `read` channels of x to dx.
template <class T>
void gate_back(const T *g, const T *x, const T *w, const T *value, const float *gates, T *by_value, T *dx, float *sums,
               int64_t tokens, int64_t channels, int64_t stride, int64_t heads, int64_t size, int64_t read,
               int64_t threads) {
    std::vector<float> products(tokens * heads * read);
    float *each = products.data();
    parts(tokens, 2 * tokens * heads * size, threads, [=](int64_t first, int64_t last) {
        std::vector<float> by_read(read);
        for (int64_t token = first; token < last; token++) {
            const T *own = x + token * channels;
            std::fill(by_read.begin(), by_read.end(), 0.0f);
            for (int64_t head = 0; head < heads; head++) {
                const T *slope = g + token * stride + head * size, *added = value + (token * heads + head) * size;
                T *out = by_value + (token * heads + head) * size;
                const float open = gates[token * heads + head];
                float by_gate = 0;
                for (int64_t i = 0; i < size; i++) {
                    by_gate += wide(slope[i]) * wide(added[i]);
                    narrow(3 * open * wide(slope[i]), out[i]);
                }
                const float by_logit = 3 * by_gate * open * (1 - open);
                for (int64_t i = 0; i < read; i++) {
                    each[(token * heads + head) * read + i] = by_logit * wide(own[i]);
                    by_read[i] += by_logit * wide(w[head * read + i]);
                }
            }
            T *out = dx + token * channels;
            for (int64_t i = 0; i < read; i++) narrow(wide(out[i]) + by_read[i], out[i]);
        }
    });
    add_rows(each, tokens, heads * read, sums);
}

// Computes the sum of the squares of all numbers, first within pieces and then over the pieces.
template <class T> void square_sum(const T *x, float *sum, int64_t count, int64_t threads) {
    constexpr int64_t PIECE = 4096;
    const int64_t pieces = (count + PIECE - 1) / PIECE;
    std::vector<float> found(pieces);
    float *each = found.data();
    parts(pieces, count / 4, threads, [=](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) each[i] = squares(x + i * PIECE, std::min(PIECE, count - i * PIECE));
    });
    add_rows(each, pieces, 1, sum);
}

// Copies k to y, but takes channels [D/4, D/2) and [3D/4, D) of each head from the token before or, with `back`, from
// the token after. They are zero if a row of `length` tokens has no such token.
template <class T>
void shift(const T *k, T *y, int64_t tokens, int64_t length, int64_t heads, int64_t size, int64_t back,
           int64_t threads) {
    const int64_t width = heads * size, part = size / 4;
    parts(tokens, tokens * width, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++) {
            const T *own = k + token * width, *other = back ? own + width : own - width;
            const bool there = back ? (token + 1) % length : token % length;
            for (int64_t at = 0; at < width; at += 2 * part) {
                T *out = y + token * width + at;
                std::memcpy(out, own + at, part * sizeof(T));
                if (there)
                    std::memcpy(out + part, other + at + part, part * sizeof(T));
                else
                    std::memset(out + part, 0, part * sizeof(T));
            }
        }
    });
}

// Computes z, which is y without its component along v, for each head of y. Every heads / kv_heads heads of a token
// share a head of v. The tokens of v are `stride` numbers apart; y and z are contiguous.
template <class T>
void exclude(const T *y, const T *v, T *z, int64_t stride, int64_t tokens, int64_t heads, int64_t kv_heads,
             int64_t size, float epsilon, int64_t threads) {
    const int64_t group = heads / kv_heads;
    parts(tokens, 2 * tokens * heads * size, threads, [=](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; token++)
            for (int64_t head = 0; head < heads; head++) {
                const T *own = v + token * stride + head / group * size, *in = y + (token * heads + head) * size;
                T *out = z + (token * heads + head) * size;
                const float share = dot(in, own, size) / (squares(own, size) + float(size) * epsilon);
                for (int64_t i = 0; i < size; i++) narrow(wide(in[i]) - share * wide(own[i]), out[i]);
            }
    });
}

// Computes dy and dv for exclude(). dv is contiguous.
template <class T>
void exclude_back(const T *g, const T *y, const T *v, T *dy, T *dv, int64_t stride, int64_t tokens, int64_t heads,
                  int64_t kv_heads, int64_t size, float epsilon, int64_t threads) {
    const int64_t group = heads / kv_heads;
    parts(tokens, 4 * tokens * heads * size, threads, [=](int64_t first, int64_t last) {
        std::vector<float> total(size);
        for (int64_t token = first; token < last; token++)
            for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
                const T *own = v + token * stride + kv_head * size;
                const float inverse = 1 / (squares(own, size) + float(size) * epsilon);
                std::fill(total.begin(), total.end(), 0.0f);
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                    const int64_t from = (token * heads + head) * size;
                    const T *slope = g + from, *in = y + from;
                    const float share = dot(in, own, size) * inverse, along = dot(slope, own, size) * inverse;
                    for (int64_t i = 0; i < size; i++) {
                        narrow(wide(slope[i]) - along * wide(own[i]), dy[from + i]);
                        total[i] += 2 * share * along * wide(own[i]) - share * wide(slope[i]) - along * wide(in[i]);
                    }
                }
                T *out = dv + (token * kv_heads + kv_head) * size;
                for (int64_t i = 0; i < size; i++) narrow(total[i], out[i]);
            }
    });
}

}  // namespace

// `positions` may be null. `strides` holds two numbers for each tensor in the order below:
// from row to row, and from token to token.
#define ATTENTION(T)                                                                                                   \
    (T *q, T *k, T *v, const int64_t *positions, T *y, float *logs, const int64_t *strides, int64_t threads,           \
     int64_t rows, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, int64_t window, float scale) {       \
        const Heads<T> made[] = {{q, strides[0], strides[1]}, {k, strides[2], strides[3]},                             \
                                 {v, strides[4], strides[5]}, {y, strides[6], strides[7]}};                            \
        attention(made[0], made[1], made[2], made[3], logs,                                                            \
                  {rows, tokens, heads, kv_heads, size, window, scale, positions}, threads);                           \
    }

#define ATTENTION_BACK(T)                                                                                              \
    (T *q, T *k, T *v, const int64_t *positions, T *y, T *g, const float *logs, T *dq, T *dk, T *dv,                   \
     const int64_t *strides, int64_t threads, int64_t rows, int64_t tokens, int64_t heads, int64_t kv_heads,           \
     int64_t size, int64_t window, float scale) {                                                                      \
        T *const all[] = {q, k, v, y, g, dq, dk, dv};                                                                  \
        Heads<T> made[8];                                                                                              \
        for (int i = 0; i < 8; i++) made[i] = {all[i], strides[2 * i], strides[2 * i + 1]};                            \
        attention_back(made[0], made[1], made[2], made[3], made[4], logs, made[5], made[6], made[7],                   \
                       {rows, tokens, heads, kv_heads, size, window, scale, positions}, threads);                      \
    }

extern "C" void attention_fp32 ATTENTION(float)
extern "C" void attention_back_fp32 ATTENTION_BACK(float)
#ifdef __AVX512BF16__
extern "C" void attention_bf16 ATTENTION(bf16)
extern "C" void attention_back_bf16 ATTENTION_BACK(bf16)
#endif

#define BOTH(NAME, ARGUMENTS, GIVEN)                                                                                   \
    extern "C" void NAME##_fp32 ARGUMENTS(float) { NAME<float> GIVEN; }                                                \
    extern "C" void NAME##_bf16 ARGUMENTS(bf16) { NAME<bf16> GIVEN; }

#define NORM_BACK(T)                                                                                                   \
    (const T *x, const T *g, const T *more, T *dx, int64_t threads, int64_t rows, int64_t channels, float epsilon)
BOTH(norm_back, NORM_BACK, (x, g, more, dx, rows, channels, epsilon, threads))

#define MIX_BACK(T)                                                                                                    \
    (const T *g, const T *x, const T *x0, const T *more, const T *a, const T *b, T *dx, T *dx0, float *sums,           \
     int64_t threads, int64_t rows, int64_t channels)
BOTH(mix_back, MIX_BACK, (g, x, x0, more, a, b, dx, dx0, sums, rows, channels, threads))

#define TURN_BACK(T)                                                                                                   \
    (const T *g, const T *x, const T *cos, const T *sin, T *dx, int64_t threads, int64_t x_stride, int64_t dx_stride,  \
     int64_t turns, int64_t tokens, int64_t heads, int64_t size, float epsilon, float sharpen)
BOTH(turn_back, TURN_BACK,
     (g, x, cos, sin, dx, x_stride, dx_stride, turns, tokens, heads, size, epsilon, sharpen, threads))

#define SQUARED_RELU_BACK(T) (const T *g, const T *y, T *dx, int64_t threads, int64_t count)
BOTH(squared_relu_back, SQUARED_RELU_BACK, (g, y, dx, count, threads))

#define SMEAR(T)                                                                                                       \
    (const T *x, const T *w, const T *lambda, T *y, float *gates, int64_t threads, int64_t tokens, int64_t length,     \
     int64_t channels, int64_t read)
BOTH(smear, SMEAR, (x, w, lambda, y, gates, tokens, length, channels, read, threads))

#define SMEAR_BACK(T)                                                                                                  \
    (const T *g, const T *x, const T *w, const T *lambda, const float *gates, T *dx, float *sums, int64_t threads,     \
     int64_t tokens, int64_t length, int64_t channels, int64_t read)
BOTH(smear_back, SMEAR_BACK, (g, x, w, lambda, gates, dx, sums, tokens, length, channels, read, threads))

#define GATE(T)                                                                                                        \
    (const T *x, const T *w, const T *value, T *v, float *gates, int64_t threads, int64_t tokens, int64_t channels,    \
     int64_t stride, int64_t heads, int64_t size, int64_t read)
BOTH(gate, GATE, (x, w, value, v, gates, tokens, channels, stride, heads, size, read, threads))

#define GATE_BACK(T)                                                                                                   \
    (const T *g, const T *x, const T *w, const T *value, const float *gates, T *by_value, T *dx, float *sums,          \
     int64_t threads, int64_t tokens, int64_t channels, int64_t stride, int64_t heads, int64_t size, int64_t read)
BOTH(gate_back, GATE_BACK,
     (g, x, w, value, gates, by_value, dx, sums, tokens, channels, stride, heads, size, read, threads))

#define SHIFT(T)                                                                                                       \
    (const T *k, T *y, int64_t threads, int64_t tokens, int64_t length, int64_t heads, int64_t size, int64_t back)
BOTH(shift, SHIFT, (k, y, tokens, length, heads, size, back, threads))

#define EXCLUDE(T)                                                                                                     \
    (const T *y, const T *v, T *z, int64_t threads, int64_t stride, int64_t tokens, int64_t heads, int64_t kv_heads,   \
     int64_t size, float epsilon)
BOTH(exclude, EXCLUDE, (y, v, z, stride, tokens, heads, kv_heads, size, epsilon, threads))

#define EXCLUDE_BACK(T)                                                                                                \
    (const T *g, const T *y, const T *v, T *dy, T *dv, int64_t threads, int64_t stride, int64_t tokens, int64_t heads, \
     int64_t kv_heads, int64_t size, float epsilon)
BOTH(exclude_back, EXCLUDE_BACK, (g, y, v, dy, dv, stride, tokens, heads, kv_heads, size, epsilon, threads))

#define SQUARE_SUM(T) (const T *x, float *sum, int64_t threads, int64_t count)
BOTH(square_sum, SQUARE_SUM, (x, sum, count, threads))
