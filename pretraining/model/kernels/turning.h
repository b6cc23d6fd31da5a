// Turning a matrix around, so that rows become columns.

#pragma once

#include "numbers.h"

namespace {

constexpr int64_t SIDE = 64, WORD = 4;  // of a block, and how many numbers of 16 bits are moved as one
constexpr int64_t WORDS = SIDE / WORD;

inline uint64_t load_word(const bfloat16* from) {
    uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Four rows of a block become a word in each of its columns: `to` has a block's words, column by column. Halves of
// words change places, then quarters.
inline void turn_four_rows(const bfloat16* rows, int64_t width, uint64_t* to) {
    constexpr uint64_t even = 0x0000FFFF0000FFFFull, low = 0x00000000FFFFFFFFull;
#pragma omp simd
    for (int64_t j = 0; j < WORDS; ++j) {
        const bfloat16* from = rows + j * WORD;
        const uint64_t a = load_word(from), b = load_word(from + width);
        const uint64_t c = load_word(from + 2 * width), d = load_word(from + 3 * width);
        const uint64_t ab = (a & even) | (b & even) << 16, ab_odd = (a >> 16 & even) | (b & ~even);
        const uint64_t cd = (c & even) | (d & even) << 16, cd_odd = (c >> 16 & even) | (d & ~even);
        uint64_t* column = to + j * WORD * WORDS;
        column[0] = (ab & low) | cd << 32;
        column[WORDS] = (ab_odd & low) | cd_odd << 32;
        column[2 * WORDS] = ab >> 32 | (cd & ~low);
        column[3 * WORDS] = ab_odd >> 32 | (cd_odd & ~low);
    }
}

// out (width, rows) = x (rows, width) turned around, in blocks that stay in the cache
void turn(const bfloat16* x, bfloat16* out, int64_t rows, int64_t width, int64_t threads) {
    const int64_t down = (rows + SIDE - 1) / SIDE, across = (width + SIDE - 1) / SIDE;
#pragma omp parallel for collapse(2) num_threads(threads_for(down* across, threads)) schedule(static)
    for (int64_t block_column = 0; block_column < across; ++block_column)
        for (int64_t block_row = 0; block_row < down; ++block_row) {
            const int64_t row = block_row * SIDE, column = block_column * SIDE;
            const bfloat16* from = x + row * width + column;
            bfloat16* to = out + column * rows + row;
            const int64_t high = std::min(SIDE, rows - row), wide = std::min(SIDE, width - column);
            if (high == SIDE && wide == SIDE) {
                uint64_t block[SIDE * WORDS];
                for (int64_t i = 0; i < WORDS; ++i) turn_four_rows(from + i * WORD * width, width, block + i);
                for (int64_t j = 0; j < SIDE; ++j) std::memcpy(to + j * rows, block + j * WORDS, SIDE * sizeof *to);
            } else
                for (int64_t j = 0; j < wide; ++j)
                    for (int64_t i = 0; i < high; ++i) to[j * rows + i] = from[i * width + j];
        }
}

}  // namespace
