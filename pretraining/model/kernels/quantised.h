// Around products in 8 bits: rows of numbers as bytes with a scale for each row, and products back to their scale.

#pragma once

#include "numbers.h"

namespace {

// bytes = 128 + x / scale; the scale is a 127th of the largest absolute value, and NaN where a number is NaN
template <class T, class Byte>
float quantise_row(const T* x, Byte* bytes, int64_t width) {
    float largest = 0;
    int none = 0;
#pragma omp simd reduction(max : largest) reduction(| : none)
    for (int64_t j = 0; j < width; ++j) {
        const float size = std::fabs(load(x[j]));
        largest = size > largest ? size : largest;
        none |= size != size;
    }
    const float factor = largest > 0 ? 127.0f / largest : 0.0f;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) bytes[j] = Byte(int32_t(std::nearbyintf(load(x[j]) * factor)) + 128);
    return none ? NAN : largest / 127.0f;
}

template <class T>
void quantise_rows(const T* x, uint8_t* bytes, float* scales, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) scales[i] = quantise_row(x + i * width, bytes + i * width, width);
}

// x = x * the scale of its row
template <class T>
void rescale_rows(T* x, const float* scales, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const float scale = scales[i];
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) store(x[i * width + j], load(x[i * width + j]) * scale);
    }
}

}  // namespace
