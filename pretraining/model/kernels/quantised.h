// Around products in 8 bits: rows of numbers as bytes with a scale for each row, and products back to their scale.

#pragma once

#include "numbers.h"

namespace {

// bytes = 128 + x / scale, the scale of a row being a 127th of its largest number
template <class T>
void quantise_rows(const T* x, uint8_t* bytes, float* scales, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T* from = x + i * width;
        uint8_t* to = bytes + i * width;
        float largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t j = 0; j < width; ++j) {
            const float size = std::fabs(load(from[j]));
            largest = size > largest ? size : largest;
        }
        scales[i] = largest / 127.0f;
        const float factor = largest > 0 ? 127.0f / largest : 0.0f;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) to[j] = uint8_t(int32_t(std::nearbyintf(load(from[j]) * factor)) + 128);
    }
}

// x = x * the scale of its row
template <class T>
void rescale_rows(T* x, const float* scales, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const float scale = scales[i];
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) store(x[i * width + j], load(x[i * width + j]) * scale);
    }
}

}  // namespace
