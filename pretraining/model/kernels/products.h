// Products with few rows or many, of numbers in fp32 with a weight that lies in panels of columns.
//
// A panel holds so many columns that their sums for some rows stay in the registers of a processor; its numbers lie in
// the order in which they are multiplied. A sum is taken in this order whatever the number of rows and threads: what
// comes of a row does not depend on the others.

#pragma once

#include "numbers.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16, MOST_ROWS = 12;
#else
constexpr int64_t LANES = 8, MOST_ROWS = 6;
#endif
constexpr int64_t PANEL = 2 * LANES;  // columns
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// What a product ends with
struct Nothing {
    void operator()(float*, int64_t) const {}
};
struct Bias {
    const float* bias;
    void operator()(float* out, int64_t column) const {
        for (int64_t j = 0; j < PANEL; ++j) out[j] += bias[column + j];
    }
};
struct BiasAndGelu {
    const float* bias;
    void operator()(float* out, int64_t column) const {
        for (int64_t j = 0; j < PANEL; ++j) {
            const float value = out[j] + bias[column + j];
            float below, density;
            normal(value, below, density);
            out[j] = value * below;
        }
    }
};

// Some rows with a panel, whose first column is that of `out`
template <int64_t ROWS, class End>
void multiply_rows(const float* x, int64_t width, int64_t stride, const float* panel, float* out, int64_t out_stride,
                   int64_t column, const End& end) {
    lanes sums[ROWS][2];
    for (int64_t r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = lanes{};
    for (int64_t k = 0; k < width; ++k) {
        const lanes left = *(const lanes*)(panel + k * PANEL), right = *(const lanes*)(panel + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int64_t r = 0; r < ROWS; ++r) {
            const float value = x[r * stride + k];
            sums[r][0] += value * left;
            sums[r][1] += value * right;
        }
    }
    for (int64_t r = 0; r < ROWS; ++r) {
        *(lanes*)(out + r * out_stride) = sums[r][0];
        *(lanes*)(out + r * out_stride + LANES) = sums[r][1];
        end(out + r * out_stride, column);
    }
}

// The same for a number of rows that is known when it runs
template <int64_t ROWS, class End>
void multiply_few(int64_t rows, const float* x, int64_t width, int64_t stride, const float* panel, float* out,
                  int64_t out_stride, int64_t column, const End& end) {
    if (rows == ROWS) return multiply_rows<ROWS>(x, width, stride, panel, out, out_stride, column, end);
    if constexpr (ROWS > 1)
        multiply_few<ROWS - 1>(rows, x, width, stride, panel, out, out_stride, column, end);
}

// Where the n-th of so many parts of a number of things begins
inline int64_t part(int64_t n, int64_t parts, int64_t things) { return n * things / parts; }

inline int64_t row_blocks(int64_t rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

// out = end(x * weight), for the columns from `first` to `last`, which are the first of `out`. All threads of a parallel
// region call it, and go on together.
template <class End>
void multiply(const float* x, int64_t rows, int64_t width, const float* weight, int64_t first, int64_t last, float* out,
              const End& end) {
    const int64_t columns = last - first, panels = columns / PANEL, blocks = row_blocks(rows);
    const int64_t groups = std::min(blocks, (2 * int64_t(threads_here()) + panels - 1) / panels);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * groups; ++task) {
        const int64_t column = task / groups * PANEL, group = task % groups;
        const float* panel = weight + (first + column) * width;
        for (int64_t b = part(group, groups, blocks); b < part(group + 1, groups, blocks); ++b) {
            const int64_t begin = part(b, blocks, rows), count = part(b + 1, blocks, rows) - begin;
            multiply_few<MOST_ROWS>(count, x + begin * width, width, width, panel, out + begin * columns + column,
                                    columns, first + column, end);
        }
    }
}

// (columns, width) -> panels; columns are multiples of a panel
void pack_panels(const float* weight, float* panels, int64_t columns, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(columns / PANEL, threads)) schedule(static)
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t k = 0; k < width; ++k)
            for (int64_t j = 0; j < PANEL; ++j)
                panels[(column * width) + k * PANEL + j] = weight[(column + j) * width + k];
}

}  // namespace
