// Products of bf16 blocks with 64 columns, summed in fp32, with AMX tiles or else with AVX512-BF16.
#pragma once

#include <immintrin.h>
#include <new>
#include <sys/syscall.h>
#include <type_traits>
#include <unistd.h>

#include "common.h"

namespace {

constexpr int64_t COLUMNS = 64;           // in the right factor and in the product
constexpr int64_t BETWEEN = 2 * COLUMNS;  // numbers from one pair of interleaved rows to the next

// Allocates memory that is aligned to cache lines. A tile row that spans two lines takes five times as long to load.
template <class T> struct ByLine {
    using value_type = T;
    ByLine() = default;
    template <class U> ByLine(const ByLine<U> &) {}
    T *allocate(size_t count) { return static_cast<T *>(::operator new(count * sizeof(T), std::align_val_t(64))); }
    void deallocate(T *x, size_t) { ::operator delete(x, std::align_val_t(64)); }
    friend bool operator==(ByLine, ByLine) { return true; }
    friend bool operator!=(ByLine, ByLine) { return false; }
};
template <class T> using Lines = std::vector<T, ByLine<T>>;

#ifdef __AMX_BF16__
// Asks Linux for the tile registers, and returns whether this process may use them.
inline bool lent_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

inline const bool has_tiles = lent_tiles();

// Configures the thread's eight tiles while the object lives, with rows of 64 bytes: tiles 0 to 5, for products and left
// factors, get `rows` rows, at most 16, and tiles 6 and 7, for right factors, get 16.
struct Tiles {
    explicit Tiles(int64_t rows = 16) {
        if (!has_tiles) return;
        const uint8_t left = uint8_t(rows);
        alignas(64) struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; tile++) shape.rows[tile] = tile < 6 ? left : 16;
        _tile_loadconfig(&shape);
    }
    ~Tiles() {
        if (has_tiles) _tile_release();
    }
};

// Sets 32 rows and columns of c to a times b, or adds the product to them.
template <bool ADD>
inline void square(const bf16 *a, int64_t a_row, const bf16 *b, float *c, int64_t c_row, int64_t pairs) {
    const int64_t left = a_row * sizeof(bf16), right = BETWEEN * sizeof(bf16), made = c_row * sizeof(float);
    if (ADD) {
        _tile_loadd(0, c, made);
        _tile_loadd(1, c + 16, made);
        _tile_loadd(2, c + 16 * c_row, made);
        _tile_loadd(3, c + 16 * c_row + 16, made);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < pairs; p += 16, a += 32, b += 16 * BETWEEN) {
        _tile_loadd(4, a, left);
        _tile_loadd(6, b, right);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 32, right);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * a_row, left);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, made);
    _tile_stored(1, c + 16, made);
    _tile_stored(2, c + 16 * c_row, made);
    _tile_stored(3, c + 16 * c_row + 16, made);
}
#else
struct Tiles {
    explicit Tiles(int64_t = 16) {}
    ~Tiles() {}  // not trivial, so that compilers do not warn of unused variables
};
#endif

// Sets ROWS rows and 32 columns of c to a times b, or adds the product to them.
template <int ROWS, bool ADD>
inline void few_rows(const bf16 *a, int64_t a_row, const bf16 *b, float *c, int64_t c_row, int64_t pairs) {
    __m512 sums[ROWS][2];
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < 2; part++)
            sums[i][part] = ADD ? _mm512_loadu_ps(c + i * c_row + 16 * part) : _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++, a += 2, b += BETWEEN) {
        const __m512bh one = (__m512bh)_mm512_loadu_si512(b), two = (__m512bh)_mm512_loadu_si512(b + 32);
        for (int i = 0; i < ROWS; i++) {
            int32_t pair;
            std::memcpy(&pair, a + i * a_row, 4);
            const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], one, left);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], two, left);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int part = 0; part < 2; part++) _mm512_storeu_ps(c + i * c_row + 16 * part, sums[i][part]);
}

// Which zeros a product may skip. LEFT: row i of the left factor is zero before column i. RIGHT: within the last 64
// rows, column j of the right factor is zero after row j.
enum Zeros { NONE, LEFT, RIGHT };

// Sets c (rows, 64) to a (rows, inputs) times b, or adds the product to c. The rows of b are interleaved:
// [inputs / 2][64][2]. `rows` and `inputs` are multiples of 32. The thread must hold a Tiles object.
template <bool ADD>
void product(int64_t rows, int64_t inputs, const bf16 *a, int64_t a_row, const bf16 *b, float *c, int64_t c_row,
             Zeros zeros = NONE) {
    for (int64_t i = 0; i < rows; i += 32)
        for (int64_t j = 0; j < COLUMNS; j += 32) {
            const int64_t from = zeros == LEFT ? i : 0, to = zeros == RIGHT ? inputs - 32 + j : inputs;
            const bf16 *left = a + i * a_row + from, *right = b + from * COLUMNS + 2 * j;
            float *made = c + i * c_row + j;
#ifdef __AMX_BF16__
            if (has_tiles) {
                square<ADD>(left, a_row, right, made, c_row, (to - from) / 2);
                continue;
            }
#endif
            const auto some = [=](auto height, int64_t row) {
                const int64_t skip = zeros == LEFT ? row : 0;
                few_rows<height, ADD>(left + row * a_row + skip, a_row, right + skip * COLUMNS, made + row * c_row,
                                      c_row, (to - from - skip) / 2);
            };
            some(std::integral_constant<int, 12>(), 0);
            some(std::integral_constant<int, 12>(), 12);
            some(std::integral_constant<int, 8>(), 24);
        }
}

}  // namespace
