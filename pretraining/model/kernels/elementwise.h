// Between matrix products, row by row: gelu and gates, layer norm with dropout and residual, dropout by itself, rotary
// positions.

#pragma once

#include "sixteen.h"

namespace {

inline void gelu(float value, float& result, float& slope) {
    float below, density;
    normal(value, below, density);
    result = value * below;
    slope = std::fma(value, density, below);
}

// The same by tanh, which is value / (1 + e^(-2 u)) where u = sqrt(2 / pi) (value + 0.044715 value^3)
inline void gelu_tanh(float value, float& result, float& slope) {
    const float square = value * value;
    const float doubled = value * std::fma(0.071354816f, square, 1.5957691f);  // 2 u
    const float below = 1.0f / (1.0f + exponential(-doubled)), above = 1.0f / (1.0f + exponential(doubled));
    result = value * below;
    slope = std::fma(result * above, std::fma(0.21406445f, square, 1.5957691f), below);
}

using Activation = void (*)(float, float&, float&);

// The activation of every bfloat16 number, and in the upper half its slope: looking up is faster than computing.
template <Activation ACTIVATION>
std::vector<uint32_t> activate_each_bfloat16() {
    std::vector<uint32_t> table(1 << 16);
    for (uint32_t bits = 0; bits < table.size(); ++bits) {
        float result, slope;
        bfloat16 both[2];
        ACTIVATION(bits_to_float(bits << 16), result, slope);
        store(both[0], result);
        store(both[1], slope);
        table[bits] = both[0].bits | uint32_t(both[1].bits) << 16;
    }
    return table;
}

template <Activation ACTIVATION>
inline void activate_row(float* x, const float* bias, float* out, int64_t width) {
    for (int64_t j = 0; j < width; ++j) ACTIVATION(x[j] + bias[j], out[j], x[j]);
}

// Looks up as many numbers of a row as come in sixteens, and returns how many. Compilers for a processor with tiles do not
// choose the instruction that looks up sixteen at once, which takes a third of the time there.
inline int64_t activate_sixteens(bfloat16* x, const bfloat16* bias, bfloat16* out, int64_t width, const uint32_t* entries) {
    int64_t j = 0;
#ifdef CLOZE_TILES
    for (; j + 16 <= width; j += 16) {
        const __m512 sum = _mm512_add_ps(load_sixteen(x + j), load_sixteen(bias + j));
        const __m256i value = (__m256i)_mm512_cvtneps_pbh(sum);
        const __m512i entry = _mm512_i32gather_epi32(_mm512_cvtepu16_epi32(value), entries, sizeof *entries);
        _mm256_storeu_si256((__m256i*)(out + j), _mm512_cvtepi32_epi16(entry));
        _mm256_storeu_si256((__m256i*)(x + j), _mm512_cvtepi32_epi16(_mm512_srli_epi32(entry, 16)));
    }
#endif
    return j;
}

template <Activation ACTIVATION>
inline void activate_row(bfloat16* x, const bfloat16* bias, bfloat16* out, int64_t width) {
    static const std::vector<uint32_t> table = activate_each_bfloat16<ACTIVATION>();
    const uint32_t* entries = table.data();
    const int64_t done = activate_sixteens(x, bias, out, width, entries);
#pragma omp simd
    for (int64_t j = done; j < width; ++j) {
        bfloat16 value;
        store(value, load(x[j]) + load(bias[j]));
        const uint32_t entry = entries[value.bits];
        out[j].bits = uint16_t(entry);
        x[j].bits = uint16_t(entry >> 16);
    }
}

// out = gelu(x + bias); x becomes the slope there, which is all that the backward pass needs
template <class T>
void gelu_forward(T* x, const T* bias, T* out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) activate_row<gelu>(x + i * width, bias, out + i * width, width);
}

template <class T>
void gelu_tanh_forward(T* x, const T* bias, T* out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) activate_row<gelu_tanh>(x + i * width, bias, out + i * width, width);
}

// grad_x, and grad_bias = its sum over rows
template <class T>
void gelu_backward(const T* grad, const T* slope, T* grad_x, T* grad_bias, int64_t rows, int64_t width,
                   int64_t threads) {
    threads = limit_threads(rows, threads);
    ColumnSums sums(threads, width);
#pragma omp parallel num_threads(threads)
    {
        float* sum = sums.mine();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < width; ++j) {
                float result = load(grad[i * width + j]) * load(slope[i * width + j]);
                store(grad_x[i * width + j], result);
                sum[j] += result;
            }
    }
    sums.write(grad_bias, 0, width);
}

// out (rows, width) = gelu of the left half of x (rows, 2 width), times the right half
template <class T>
void geglu_forward(const T* x, T* out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T *left = x + i * 2 * width, *right = left + width;
        T* to = out + i * width;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) {
            float result, slope;
            gelu(load(left[j]), result, slope);
            store(to[j], result * load(right[j]));
        }
    }
}

template <class T>
void geglu_backward(const T* grad, const T* x, T* grad_x, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const T *left = x + i * 2 * width, *right = left + width, *from = grad + i * width;
        T *to_left = grad_x + i * 2 * width, *to_right = to_left + width;
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) {
            float result, slope;
            gelu(load(left[j]), result, slope);
            store(to_left[j], load(from[j]) * load(right[j]) * slope);
            store(to_right[j], load(from[j]) * result);
        }
    }
}

// Rotates queries and keys in rows of x (rows, 3 * heads * size), in place: the left half of each head with the right one,
// by the angles of the row's position. `turns` (positions, size): their cosines, then their sines; the direction is 1 or -1.
template <class T>
void rotate(T* x, const int64_t* positions, const float* turns, double direction, int64_t rows, int64_t heads,
            int64_t size, int64_t threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const float *cosines = turns + positions[i] * size, *sines = cosines + half;
        for (int64_t h = 0; h < 2 * heads; ++h) {
            T *left = x + (i * 3 * heads + h) * size, *right = left + half;
#pragma omp simd
            for (int64_t d = 0; d < half; ++d) {
                const float sine = float(direction) * sines[d], one = load(left[d]), other = load(right[d]);
                store(left[d], one * cosines[d] - other * sine);
                store(right[d], other * cosines[d] + one * sine);
            }
        }
    }
}

// x becomes residual + dropout(x + bias); out = its layer norm
template <class T>
void norm_forward(T* x, const T* bias, const T* residual, const T* weight, const T* shift, const uint32_t* keys,
                  int64_t site, double probability, double epsilon, T* out, float* means, float* scales, int64_t rows,
                  int64_t width, int64_t threads) {
#pragma omp parallel num_threads(limit_threads(rows, threads))
    {
        const Dropout dropout(probability, site);
        std::vector<float> row(width);
        float* sum = row.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            T* xi = x + i * width;
            const T* ri = residual + i * width;
            if (dropout.drops()) {
                const uint32_t key = dropout.key(keys[i]);
#pragma omp simd
                for (int64_t j = 0; j < width; ++j)
                    store(xi[j], load(ri[j]) + (load(xi[j]) + load(bias[j])) * dropout(key, uint32_t(j)));
            } else
                for (int64_t j = 0; j < width; ++j) store(xi[j], load(ri[j]) + load(xi[j]) + load(bias[j]));
            float mean = 0, variance = 0;
            for (int64_t j = 0; j < width; ++j) mean += sum[j] = load(xi[j]);
            mean /= float(width);
            for (int64_t j = 0; j < width; ++j) variance += (sum[j] - mean) * (sum[j] - mean);
            float scale = 1.0f / std::sqrt(variance / float(width) + float(epsilon));
            for (int64_t j = 0; j < width; ++j)
                store(out[i * width + j], std::fma((sum[j] - mean) * scale, load(weight[j]), load(shift[j])));
            means[i] = mean;
            scales[i] = scale;
        }
    }
}

// From the gradient of the norm and, where it is given, from `past`, the gradient that the sum gets from elsewhere: the
// gradients of the residual and of x (through dropout), and those of weight, shift and bias, summed over rows.
template <class T>
void norm_backward(const T* grad, const T* past, const T* sum, const float* means, const float* scales, const T* weight,
                   const uint32_t* keys, int64_t site, double probability, T* grad_residual, T* grad_x,
                   T* grad_weight, T* grad_shift, T* grad_bias, int64_t rows, int64_t width, int64_t threads) {
    threads = limit_threads(rows, threads);
    ColumnSums sums(threads, 3 * width);
#pragma omp parallel num_threads(threads)
    {
        const Dropout dropout(probability, site);
        float *to_weight = sums.mine(), *to_shift = to_weight + width, *to_bias = to_shift + width;
        std::vector<float> buffer(2 * width);
        float *normed = buffer.data(), *inner = normed + width;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t at = i * width;
            float mean = means[i], scale = scales[i], first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
            for (int64_t j = 0; j < width; ++j) {
                float g = load(grad[at + j]);
                normed[j] = (load(sum[at + j]) - mean) * scale;
                inner[j] = g * load(weight[j]);
                first += inner[j];
                second += inner[j] * normed[j];
                to_weight[j] += g * normed[j];
                to_shift[j] += g;
            }
            first /= float(width);
            second /= float(width);
            for (int64_t j = 0; j < width; ++j) inner[j] = scale * (inner[j] - first - normed[j] * second);
            if (past)
                for (int64_t j = 0; j < width; ++j) inner[j] += load(past[at + j]);
            for (int64_t j = 0; j < width; ++j) store(grad_residual[at + j], inner[j]);
            if (dropout.drops()) {
                const uint32_t key = dropout.key(keys[i]);
#pragma omp simd
                for (int64_t j = 0; j < width; ++j) inner[j] *= dropout(key, uint32_t(j));
            }
            for (int64_t j = 0; j < width; ++j) {
                store(grad_x[at + j], inner[j]);
                to_bias[j] += inner[j];
            }
        }
    }
    sums.write(grad_weight, 0, width);
    sums.write(grad_shift, width, width);
    sums.write(grad_bias, 2 * width, width);
}

// out = dropout(x); also its own backward pass
template <class T>
void dropout_rows(const T* x, const uint32_t* keys, int64_t site, double probability, T* out, int64_t rows,
                  int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const Dropout dropout(probability, site);
        const uint32_t key = dropout.key(keys[i]);
#pragma omp simd
        for (int64_t j = 0; j < width; ++j)
            store(out[i * width + j], load(x[i * width + j]) * dropout(key, uint32_t(j)));
    }
}

}  // namespace
