// Turning a matrix around, so that rows become columns.

#pragma once

#include "numbers.h"

namespace {

constexpr int64_t WORD = 4;  // numbers of 16 bits that are moved as one

inline uint64_t load_word(const bfloat16* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Four rows of a block become a word in each of its columns: `to` has a block's words, column by column. Halves of
// words change places, then quarters.
template <int64_t SIDE>
inline void turn_four_rows(const bfloat16* rows, int64_t width, uint64_t* to) {
    constexpr uint64_t even = 0x0000FFFF0000FFFFull, low = 0x00000000FFFFFFFFull;
    constexpr int64_t words = SIDE / WORD;
#pragma omp simd
    for (int64_t j = 0; j < words; ++j) {
        const bfloat16* from = rows + j * WORD;
        const uint64_t a = load_word(from), b = load_word(from + width);
        const uint64_t c = load_word(from + 2 * width), d = load_word(from + 3 * width);
        const uint64_t ab = (a & even) | (b & even) << 16, ab_odd = (a >> 16 & even) | (b & ~even);
        const uint64_t cd = (c & even) | (d & even) << 16, cd_odd = (c >> 16 & even) | (d & ~even);
        uint64_t* column = to + j * WORD * words;
        column[0] = (ab & low) | cd << 32;
        column[words] = (ab_odd & low) | cd_odd << 32;
        column[2 * words] = ab >> 32 | (cd & ~low);
        column[3 * words] = ab_odd >> 32 | (cd_odd & ~low);
    }
}

// A square block of x becomes one of out; rows of x are `width` apart, those of out `out_width`.
template <int64_t SIDE>
inline void turn_block(const bfloat16* x, int64_t width, bfloat16* out, int64_t out_width) {
    constexpr int64_t words = SIDE / WORD;
    uint64_t block[SIDE * words];
    for (int64_t i = 0; i < words; ++i) turn_four_rows<SIDE>(x + i * WORD * width, width, block + i);
    for (int64_t j = 0; j < SIDE; ++j) std::memcpy(out + j * out_width, block + j * words, SIDE * sizeof *out);
}

// out (width, rows) = x (rows, width) turned around, in blocks that stay in the cache
void turn(const bfloat16* x, bfloat16* out, int64_t rows, int64_t width, int64_t threads) {
    constexpr int64_t side = 64;
    const int64_t down = (rows + side - 1) / side, across = (width + side - 1) / side;
#pragma omp parallel for collapse(2) num_threads(limit_threads(down* across, threads)) schedule(static)
    for (int64_t block_column = 0; block_column < across; ++block_column)
        for (int64_t block_row = 0; block_row < down; ++block_row) {
            const int64_t row = block_row * side, column = block_column * side;
            const bfloat16* from = x + row * width + column;
            bfloat16* to = out + column * rows + row;
            const int64_t high = std::min(side, rows - row), wide = std::min(side, width - column);
            if (high == side && wide == side)
                turn_block<side>(from, width, to, rows);
            else
                for (int64_t j = 0; j < wide; ++j)
                    for (int64_t i = 0; i < high; ++i) to[j * rows + i] = from[i * width + j];
        }
}

}  // namespace
