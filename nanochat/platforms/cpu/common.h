// What all kernels use: number formats, the exponential, and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

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

// The largest number.
template <class T> inline float largest(const T *x, int64_t count) {
    constexpr int64_t LANES = 64;  // found side by side, since a compiler may not reorder comparisons
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
