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

// Gradients in units of 2^-50, so that sums of any order are the same. One beyond `limit` sets bit 0 of `broken`,
// one that is not finite also bit 1.
template <class T>
void add_fixed(const T* gradient, int64_t* sum, int64_t* broken, int64_t count, int64_t adds, double limit,
               int64_t threads) {
    constexpr int64_t block = 1 << 11;  // which stays in the cache between its two passes
    const int64_t blocks = (count + block - 1) / block;
    uint32_t largest = 0;  // as bits, whose order is that of absolute values; those of NaN are the largest
#pragma omp parallel for num_threads(limit_threads(blocks >> 3, threads)) schedule(static) reduction(max : largest)
    for (int64_t index = 0; index < blocks; ++index) {
        const int64_t begin = index * block, end = std::min(count, begin + block);
        uint32_t most = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = begin; i < end; ++i) most = std::max(most, float_to_bits(load(gradient[i])) & 0x7FFFFFFF);
        largest = std::max(largest, most);
        if (adds)
            for (int64_t i = begin; i < end; ++i) sum[i] += int64_t(std::nearbyint(double(load(gradient[i])) * 0x1p50));
        else
            for (int64_t i = begin; i < end; ++i) sum[i] = int64_t(std::nearbyint(double(load(gradient[i])) * 0x1p50));
    }
    *broken |= (largest > float_to_bits(float(limit))) | (largest >= 0x7F800000) << 1;
}

// out = these sums as float, rounded once.
void take_fixed(float* out, const int64_t* sum, int64_t count, int64_t threads) {
    constexpr int64_t block = 1 << 14;
    const int64_t blocks = (count + block - 1) / block;
#pragma omp parallel for num_threads(limit_threads(blocks, threads)) schedule(static)
    for (int64_t index = 0; index < blocks; ++index)
        for (int64_t i = index * block; i < std::min(count, (index + 1) * block); ++i) out[i] = float(sum[i]) * 0x1p-50f;
}

// squares = of each block, an offset and a length, the squares of its numbers, added up in double.
void add_block_squares(const float* numbers, double* squares, const int64_t* blocks, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(count, threads)) schedule(static)
    for (int64_t index = 0; index < count; ++index) {
        const float* block = numbers + blocks[2 * index];
        const int64_t length = blocks[2 * index + 1];
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < length; ++i) sum += double(block[i]) * block[i];
        squares[index] = sum;
    }
}

}  // namespace
