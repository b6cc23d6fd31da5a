// Small products of matrices that lie in the cache: 16-bit operands, sums in fp32, a block of 32 by 32 at a time.
//
// Of a product, the left operand lies in rows. The right one lies in panels of 32 columns, each in rows of pairs: row i
// holds, for every column, its numbers in the rows 2 i and 2 i + 1, side by side. `Tiles` (AMX) and `Lanes` (AVX512-BF16)
// are two ways to multiply.

#pragma once

#include <type_traits>

#include "numbers.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16, MOST_ROWS = 12;  // whose sums stay in the registers, in two vectors of lanes each
#else
constexpr int64_t LANES = 8, MOST_ROWS = 6;
#endif

// Calls a function with a number of rows that is known when it is compiled
template <int64_t ROWS, class Function>
inline void with_rows(int64_t rows, const Function& function) {
    if (rows == ROWS) return function(std::integral_constant<int64_t, ROWS>());
    if constexpr (ROWS > 1) with_rows<ROWS - 1>(rows, function);
}

// Where the n-th of so many parts of a number of things begins
inline int64_t part(int64_t n, int64_t parts, int64_t things) { return n * things / parts; }

inline int64_t row_blocks(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

}  // namespace

#ifdef CLOZE_HALVES

namespace {

constexpr int64_t BLOCK = 32;  // side of a block; operands have room for, and zeros to, a multiple of it

// out = some rows of left, `left_width` apart, with a panel of terms / 2 rows of pairs
template <int64_t ROWS>
inline void multiply_pairs(const bfloat16* left, int64_t left_width, const uint32_t* panel, float* out,
                           int64_t out_width, int64_t terms) {
    __m512 sums[ROWS][2];
#pragma GCC unroll 16
    for (int64_t r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < terms; k += 2) {
        const uint32_t* pairs = panel + k / 2 * BLOCK;
        const __m512bh first = (__m512bh)_mm512_loadu_si512(pairs), second = (__m512bh)_mm512_loadu_si512(pairs + 16);
#pragma GCC unroll 16
        for (int64_t r = 0; r < ROWS; ++r) {
            int32_t two;
            std::memcpy(&two, left + r * left_width + k, sizeof two);
            const __m512bh value = (__m512bh)_mm512_set1_epi32(two);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], value, first);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], value, second);
        }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < ROWS; ++r) {
        _mm512_storeu_ps(out + r * out_width, sums[r][0]);
        _mm512_storeu_ps(out + r * out_width + 16, sums[r][1]);
    }
}

struct Lanes {
    // out (32, 32), rows `out_width` apart = left (32, terms), rows `left_width` apart, @ a panel of rows of pairs; rows
    // of out behind the first so many may be left as they are.
    static void multiply_block(const bfloat16* left, int64_t left_width, const uint32_t* panel, float* out,
                               int64_t out_width, int64_t rows, int64_t terms) {
        for (int64_t b = 0, blocks = row_blocks(rows); b < blocks; ++b) {
            const int64_t i = part(b, blocks, rows);
            with_rows<MOST_ROWS>(part(b + 1, blocks, rows) - i, [&](auto count) {
                multiply_pairs<count.value>(left + i * left_width, left_width, panel, out + i * out_width, out_width,
                                            terms);
            });
        }
    }
};

#ifdef CLOZE_TILES
struct alignas(64) TileSizes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// For as long as it lives, this thread's tiles have their full size: 16 rows of 64 bytes.
class Tiles {
   public:
    Tiles() {
        static constexpr TileSizes sizes;
        _tile_loadconfig(&sizes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // As `Lanes::multiply_block`.
    static void multiply_block(const bfloat16* left, int64_t left_width, const uint32_t* panel, float* out,
                               int64_t out_width, int64_t, int64_t terms) {
        asm volatile("" ::: "memory");  // GCC up to 13 does not know that tiles are read from memory
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < terms; k += 32) {
            const uint32_t* pairs = panel + k / 2 * BLOCK;
            _tile_loadd(4, left + k, left_width * 2);
            _tile_loadd(5, left + 16 * left_width + k, left_width * 2);
            _tile_loadd(6, pairs, BLOCK * 4);
            _tile_loadd(7, pairs + 16, BLOCK * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, out_width * 4);
        _tile_stored(1, out + 16, out_width * 4);
        _tile_stored(2, out + 16 * out_width, out_width * 4);
        _tile_stored(3, out + 16 * out_width + 16, out_width * 4);
    }
};
#endif

// The right operand of a product
struct Panels {
    const uint32_t* pairs;
    int64_t height;  // rows of numbers in each panel, those in front that are passed over too

    // From a row on, whose number is a multiple of a block
    Panels from(int64_t row) const { return {pairs + row / 2 * BLOCK, height}; }
};

// out (rows, columns) = left (rows, terms) @ right, by Tiles or Lanes. Rows of left lie `left_width` apart, those of out
// `out_width`. Both have room for whole blocks; what comes of rows and columns behind is not defined. Terms behind, to the
// next multiple of a block, are zeros in both operands.
template <class Blocks>
inline void multiply(const bfloat16* left, int64_t left_width, Panels right, float* out, int64_t out_width, int64_t rows,
                     int64_t columns, int64_t terms) {
    for (int64_t j = 0; j < columns; j += BLOCK)
        for (int64_t i = 0; i < rows; i += BLOCK)
            Blocks::multiply_block(left + i * left_width, left_width, right.pairs + j * right.height / 2,
                                   out + i * out_width + j, out_width, std::min(BLOCK, rows - i), terms);
}

// The right operand x (rows, width)
inline void pair_rows(const bfloat16* x, int64_t rows, int64_t width, uint32_t* panels) {
    for (int64_t j = 0; j < width; j += BLOCK)
        for (int64_t i = 0; i < rows; i += 2, panels += BLOCK)
            for (int64_t k = 0; k < BLOCK; ++k)
                panels[k] = x[i * width + j + k].bits | uint32_t(x[(i + 1) * width + j + k].bits) << 16;
}

// The right operand x turned around, of x (rows, width)
inline void pair_columns(const bfloat16* x, int64_t rows, int64_t width, uint32_t* panels) {
    for (int64_t i = 0; i < rows; i += BLOCK)
        for (int64_t j = 0; j < width; j += 2, panels += BLOCK)
            for (int64_t k = 0; k < BLOCK; ++k) std::memcpy(panels + k, x + (i + k) * width + j, 4);
}

}  // namespace

#endif
