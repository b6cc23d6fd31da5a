// Gradients of a step, added up.

#pragma once

#include "numbers.h"

namespace {

// sum = gradient, or sum += gradient where there is one already: right after the product that made the gradient, while
// that is still in the cache.
template <class T>
void add_gradient(const T* gradient, float* sum, int64_t count, int64_t adds, int64_t threads) {
    constexpr int64_t block = 1 << 14;
    const int64_t blocks = (count + block - 1) / block;
#pragma omp parallel for num_threads(threads_for(blocks, threads)) schedule(static)
    for (int64_t index = 0; index < blocks; ++index) {
        const int64_t begin = index * block, end = std::min(count, begin + block);
        if (adds)
            for (int64_t i = begin; i < end; ++i) sum[i] += load(gradient[i]);
        else
            for (int64_t i = begin; i < end; ++i) sum[i] = load(gradient[i]);
    }
}

}  // namespace
