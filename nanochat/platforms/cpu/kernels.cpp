// Operations of a decoding pass, each in one loop over memory: norms, rotations, attention over a cache, gates.
//
// torch runs each of them as three to ten operators, which costs more than computing when a pass has few tokens.
// Numbers are fp32 or bf16 in memory and fp32 in between. A row never depends on the other rows, so a reply is the same
// alone and in a batch. kernels.py compiles this file and says what the arguments are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void narrow(float x, float &y) { y = x; }

inline void narrow(float x, bf16 &y) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    y.bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

// exp(x) to within 2e-7 of its value; std::exp would be called number by number.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float whole = std::floor(x * 1.44269504f + 0.5f);
    float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    float y = 1.9875691e-4f;
    for (float c : {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 0.5f, 1.0f, 1.0f}) y = y * r + c;
    uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return y * power;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Calls work(first, last) for parts of the rows, on at most `threads` threads. A thread is worth starting for PART
// numbers.
template <class Work> void parts(int64_t rows, int64_t numbers, int64_t threads, Work work) {
    constexpr int64_t PART = 1 << 17, MOST = 16;
    const int64_t count = std::min({threads, rows, numbers / PART, MOST});
    if (count < 2) return work(0, rows);
    std::vector<std::thread> others;
    for (int64_t i = 1; i < count; i++) others.emplace_back(work, i * rows / count, (i + 1) * rows / count);
    work(0, rows / count);
    for (auto &other : others) other.join();
}

template <class T> float inverse_rms(const T *x, int64_t channels, float epsilon) {
    float sum = 0;
    for (int64_t i = 0; i < channels; i++) sum += wide(x[i]) * wide(x[i]);
    return 1.0f / std::sqrt(sum / float(channels) + epsilon);
}

template <class T>
void norm(const T *x, const T *added, const float *weight, T *sum, T *y, int64_t rows, int64_t channels,
          float epsilon, int64_t threads) {
    parts(rows, rows * channels, threads, [=](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) {
            const T *in = x + row * channels;
            T *out = y + row * channels;
            if (added) {
                const T *more = added + row * channels;
                T *both = sum + row * channels;
                for (int64_t i = 0; i < channels; i++) narrow(wide(in[i]) + wide(more[i]), both[i]);
                in = both;
            }
            float inverse = inverse_rms(in, channels, epsilon);
            if (weight)
                for (int64_t i = 0; i < channels; i++) narrow(wide(in[i]) * inverse * weight[i], out[i]);
            else
                for (int64_t i = 0; i < channels; i++) narrow(wide(in[i]) * inverse, out[i]);
        }
    });
}

template <class T>
void turn(const T *x, int64_t stride, const float *weight, const T *cos, const T *sin, int64_t turns, T *y,
          int64_t tokens, int64_t heads, int64_t size, int64_t half, float epsilon, float sharpen, int64_t threads) {
    parts(tokens, tokens * heads * size, threads, [=](int64_t begin, int64_t end) {
        std::vector<float> normed(size);
        float *n = normed.data();
        for (int64_t token = begin; token < end; token++) {
            const T *c = cos + token % turns * half, *s = sin + token % turns * half;
            for (int64_t head = 0; head < heads; head++) {
                const T *in = x + token * stride + head * size;
                T *out = y + (token * heads + head) * size;
                float factor = inverse_rms(in, size, epsilon) * sharpen;
                if (weight)
                    for (int64_t i = 0; i < size; i++) n[i] = wide(in[i]) * factor * weight[head * size + i];
                else
                    for (int64_t i = 0; i < size; i++) n[i] = wide(in[i]) * factor;
                for (int64_t i = 0; i < half; i++) {
                    narrow(n[i] * wide(c[i]) + n[i + half] * wide(s[i]), out[i]);
                    narrow(n[i + half] * wide(c[i]) - n[i] * wide(s[i]), out[i + half]);
                }
                for (int64_t i = 2 * half; i < size; i++) narrow(n[i], out[i]);
            }
        }
    });
}

// One query head over `keys` keys that lie `stride` numbers apart. SIZE is the head size where it is known, else 0.
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

// False, and nothing is written, if a place is not one of the `length` places of a row of the cache.
template <class T>
bool attend(const T *q, int64_t q_stride, const T *k, int64_t k_stride, const T *v, int64_t v_stride, T *held_k,
            T *held_v, int64_t slot, int64_t length, const int64_t *places, T *y, int64_t rows, int64_t heads,
            int64_t kv_heads, int64_t size, int64_t window, float scale, int64_t threads) {
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
                    y + (row * heads + head) * size);
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

#ifdef __AVX512BF16__
constexpr int64_t BLOCK = 64;  // outputs whose weights lie together, two inputs of each output side by side
constexpr int64_t AHEAD = 4096;  // numbers that are fetched ahead

// ROWS rows of x times one block of a matrix, [inputs / 2][BLOCK][2] numbers; rows of y are `outputs` apart.
template <int ROWS> void few_rows(const bf16 *x, const bf16 *w, bf16 *y, int64_t outputs, int64_t inputs) {
    __m512 sums[ROWS][4];
    for (auto &row : sums)
        for (auto &sum : row) sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2, w += 2 * BLOCK) {
        // The processor itself stops fetching ahead at the end of each page.
        for (int line = 0; line < 4; line++) _mm_prefetch((const char *)(w + AHEAD + 32 * line), _MM_HINT_T0);
        __m512bh weights[4];
        for (int part = 0; part < 4; part++) weights[part] = (__m512bh)_mm512_loadu_si512(w + 32 * part);
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            std::memcpy(&pair, x + row * inputs + i, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int part = 0; part < 4; part++)
                sums[row][part] = _mm512_dpbf16_ps(sums[row][part], weights[part], both);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < 4; part++)
            _mm256_storeu_si256((__m256i *)(y + row * outputs + 16 * part),
                                (__m256i)_mm512_cvtneps_pbh(sums[row][part]));
}

// A matrix as oneDNN lays out bf16: blocks of outputs, one after the other.
void multiply(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int64_t outputs, int64_t inputs) {
    for (int64_t output = 0; output < outputs; output += BLOCK, w += BLOCK * inputs)
        for (int64_t row = 0; row < rows; row += 4) {  // a second group of rows finds the block in the cache
            const int64_t left = rows - row;
            auto some = left == 1 ? few_rows<1> : left == 2 ? few_rows<2> : left == 3 ? few_rows<3> : few_rows<4>;
            some(x + row * inputs, w, y + row * outputs + output, outputs, inputs);
        }
}
#endif

}  // namespace

#ifdef __AVX512BF16__
extern "C" void multiply_bf16(const bf16 *x, const bf16 *w, bf16 *y, int64_t rows, int64_t outputs, int64_t inputs) {
    multiply(x, w, y, rows, outputs, inputs);
}
#endif

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
BOTH(bool, attend, ATTEND, (q, q_stride, k, k_stride, v, v_stride, held_k, held_v, slot, length, places, y, rows, heads,
                            kv_heads, size, window, scale, threads))

#define SWIGLU(T) (const T *x, T *y, int64_t threads, int64_t rows, int64_t width)
BOTH(void, swiglu, SWIGLU, (x, y, rows, width, threads))

#define SQUARED_RELU(T) (const T *x, T *y, int64_t threads, int64_t count)
BOTH(void, squared_relu, SQUARED_RELU, (x, y, count, threads))

#define MIX(T) (const T *x, const T *x0, const T *a, const T *b, T *y, int64_t threads, int64_t count)
BOTH(void, mix, MIX, (x, x0, a, b, y, count, threads))
