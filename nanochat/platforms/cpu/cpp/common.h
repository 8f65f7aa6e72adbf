// Code that all kernels share: number formats, the exponential function, and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <thread>
#include <vector>

#ifdef __AVX512F__
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

// Returns exp(x) with a relative error below 2e-7. Unlike std::exp, it can be vectorized.
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

#ifdef __AVX512F__
inline __m512 sixteen(const float *x) { return _mm512_loadu_ps(x); }
inline __m512 sixteen(const bf16 *x) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

// Returns 2^x with a relative error below 3e-7.
inline __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5353362e-4f);
    for (float c : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f})
        y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, whole);
}

#endif

#ifdef __AVX512BF16__
inline void store(float *y, __m512 x) { _mm512_storeu_ps(y, x); }
inline void store(bf16 *y, __m512 x) { _mm256_storeu_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(x)); }
#endif

// Writes factor x to y.
template <class T> inline void scaled(const float *x, float factor, T *y, int64_t count) {
    int64_t i = 0;
#ifdef __AVX512BF16__
    for (; i + 16 <= count; i += 16) store(y + i, _mm512_loadu_ps(x + i) * _mm512_set1_ps(factor));
#endif
    for (; i < count; i++) narrow(x[i] * factor, y[i]);
}

// The OpenMP threads of torch's own operators, which exist if torch has loaded GNU's OpenMP for the process. Threads of
// our own would compete with these, which spin between two operators.
struct Team {
    template <class Function> static Function found(const char *name) { return (Function)dlsym(RTLD_DEFAULT, name); }

    void (*run)(void (*)(void *), void *, unsigned, unsigned) = found<decltype(run)>("GOMP_parallel");
    int (*number)() = found<int (*)()>("omp_get_thread_num");
    int (*size)() = found<int (*)()>("omp_get_num_threads");

    bool there() const { return run && number && size; }
};

inline const Team team;

// Calls work(first, last). Only this function contains the machine code of `work`: a compiler that inlined it twice, for
// one thread and for several, might order its sums in two ways.
template <class Work> __attribute__((noinline)) void call_part(const Work &work, int64_t first, int64_t last) {
    work(first, last);
}

// Calls work(first, last) for parts of the rows, on at most `threads` threads. Waking a thread pays off for PART
// numbers.
template <class Work> void parts(int64_t rows, int64_t numbers, int64_t threads, Work work) {
    constexpr int64_t PART = 1 << 17, MOST = 16;
    const int64_t count = std::min({threads, rows, numbers / PART, MOST});
    if (count < 2) return call_part(work, 0, rows);
    auto part = [&](int64_t i) { call_part(work, i * rows / count, (i + 1) * rows / count); };
    if (team.there()) {
        struct Call {
            decltype(part) &one;
            int64_t count;
        } call{part, count};
        auto share = [](void *given) {  // the team may be smaller than requested
            const Call &call = *(const Call *)given;
            for (int64_t i = team.number(); i < call.count; i += team.size()) call.one(i);
        };
        return team.run(share, &call, unsigned(count), 0);
    }
    std::vector<std::thread> others;
    for (int64_t i = 1; i < count; i++) others.emplace_back(part, i);
    part(0);
    for (auto &other : others) other.join();
}

// The number of rows whose norms are computed before the first is used. The roots and quotients of a group overlap,
// while a single one would have to be waited for.
constexpr int64_t GROUP = 16;

template <class T> inline float squares(const T *x, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum += wide(x[i]) * wide(x[i]);
    return sum;
}

template <class T> inline float dot(const T *x, const T *y, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum += wide(x[i]) * wide(y[i]);
    return sum;
}

// Converts the sums of squares of rows into the factors of their RMS norms, in place.
inline void inverse_roots(float *sums, int64_t count, int64_t channels, float epsilon) {
    for (int64_t i = 0; i < count; i++) sums[i] = 1.0f / std::sqrt(sums[i] / float(channels) + epsilon);
}

// Returns the largest number.
template <class T> inline float largest(const T *x, int64_t count) {
    constexpr int64_t LANES = 64;  // separate maxima, because a compiler may not reorder comparisons
    float lanes[LANES], most = -INFINITY;
    for (float &lane : lanes) lane = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; j++) lanes[j] = wide(x[i + j]) > lanes[j] ? wide(x[i + j]) : lanes[j];
    for (; i < count; i++) lanes[0] = wide(x[i]) > lanes[0] ? wide(x[i]) : lanes[0];
    for (float lane : lanes) most = lane > most ? lane : most;
    return most;
}

}  // namespace
