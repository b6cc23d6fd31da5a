// Gradients of a step: added up, and how large they are.

#pragma once

#include <cfloat>

#include "numbers.h"

namespace {

// sum = gradient, or sum += gradient where there is one already: right after the product that made the gradient, while
// that is still in the cache.
template <class T>
void add_gradient(const T* gradient, float* sum, int64_t count, int64_t adds, int64_t threads) {
    constexpr int64_t block = 1 << 14;
    const int64_t blocks = (count + block - 1) / block;
#pragma omp parallel for num_threads(limit_threads(blocks, threads)) schedule(static)
    for (int64_t index = 0; index < blocks; ++index) {
        const int64_t begin = index * block, end = std::min(count, begin + block);
        if (adds)
            for (int64_t i = begin; i < end; ++i) sum[i] += load(gradient[i]);
        else
            for (int64_t i = begin; i < end; ++i) sum[i] = load(gradient[i]);
    }
}

// sum = the squares of some numbers, added up in double, in blocks of a fixed size: the number of threads does not matter.
// What is more than a float can be is infinite, since an optimizer keeps squares as floats.
void add_squares(const float* numbers, double* sum, int64_t count, int64_t threads) {
    constexpr int64_t block = 1 << 14;
    const int64_t blocks = (count + block - 1) / block;
    std::vector<double> sums(blocks);
#pragma omp parallel for num_threads(limit_threads(blocks, threads)) schedule(static)
    for (int64_t index = 0; index < blocks; ++index) {
        const int64_t begin = index * block, end = std::min(count, begin + block);
        double squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = begin; i < end; ++i) squares += double(numbers[i]) * numbers[i];
        sums[index] = squares;
    }
    *sum = 0;
    for (const double squares : sums) *sum += squares;
    if (*sum > double(FLT_MAX)) *sum = INFINITY;
}

}  // namespace
