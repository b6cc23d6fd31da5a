// Small products by a processor's tiles (AMX), of matrices that lie in the cache: 16-bit operands, sums in fp32.
//
// A tile has 16 rows of 64 bytes. Of a product, the left operand lies in rows. The right one lies in rows of pairs: row
// i holds, for every column, its numbers in the rows 2 i and 2 i + 1, side by side.

#pragma once

#include "numbers.h"

#ifdef CLOZE_TILES

namespace {

constexpr int64_t GRAIN = 32;  // rows, columns and terms of products are multiples of it

struct alignas(64) TileSizes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// For as long as it lives, this thread's tiles have their full size.
class Tiles {
   public:
    Tiles() {
        static constexpr TileSizes sizes;
        _tile_loadconfig(&sizes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// out (32, 32), rows `out_width` apart = left (32, terms) @ right (terms / 2 rows of pairs)
inline void multiply_block(const bfloat16* left, int64_t left_width, const uint32_t* right, int64_t right_width,
                           float* out, int64_t out_width, int64_t terms) {
    asm volatile("" ::: "memory");  // GCC up to 13 does not know that tiles are read from memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < terms; k += 32) {
        const uint32_t* pairs = right + k / 2 * right_width;
        _tile_loadd(4, left + k, left_width * 2);
        _tile_loadd(5, left + 16 * left_width + k, left_width * 2);
        _tile_loadd(6, pairs, right_width * 4);
        _tile_loadd(7, pairs + 16, right_width * 4);
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

// out (rows, columns) = left (rows, terms) @ right; all rows of a matrix lie as far apart as it is wide
inline void multiply(const bfloat16* left, int64_t left_width, const uint32_t* right, int64_t right_width, float* out,
                     int64_t out_width, int64_t rows, int64_t columns, int64_t terms) {
    for (int64_t j = 0; j < columns; j += GRAIN)
        for (int64_t i = 0; i < rows; i += GRAIN)
            multiply_block(left + i * left_width, left_width, right + j, right_width, out + i * out_width + j, out_width,
                           terms);
}

// The right operand x (rows, width): pairs (rows / 2, width)
inline void pair_rows(const bfloat16* x, int64_t rows, int64_t width, uint32_t* pairs) {
    for (int64_t i = 0; i < rows / 2; ++i)
        for (int64_t j = 0; j < width; ++j)
            pairs[i * width + j] = x[2 * i * width + j].bits | uint32_t(x[(2 * i + 1) * width + j].bits) << 16;
}

// The right operand x turned around, of x (rows, width): pairs (width / 2, rows)
inline void pair_columns(const bfloat16* x, int64_t rows, int64_t width, uint32_t* pairs) {
    for (int64_t j = 0; j < width / 2; ++j)
        for (int64_t i = 0; i < rows; ++i) std::memcpy(pairs + j * rows + i, x + i * width + 2 * j, 4);
}

}  // namespace

#endif
