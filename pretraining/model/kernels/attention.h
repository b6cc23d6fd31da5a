// Between the matrix products of attention: heads apart and together, softmax with dropout.

#pragma once

#include "sixteen.h"

namespace {

// Flat rows (pieces, parts * heads * size) -> (parts, sequences, heads, length, size), zeros after a sequence's end
template <class T>
void split_heads(const T* flat, const T* bias, const int32_t* starts, const int32_t* lengths, T* out, int64_t parts,
                 int64_t sequences, int64_t heads, int64_t length, int64_t size, int64_t threads) {
#pragma omp parallel for collapse(3) num_threads(threads_for(parts* sequences* heads, threads)) schedule(static)
    for (int64_t p = 0; p < parts; ++p)
        for (int64_t s = 0; s < sequences; ++s)
            for (int64_t h = 0; h < heads; ++h) {
                T* to = out + ((p * sequences + s) * heads + h) * length * size;
                const int64_t column = (p * heads + h) * size;
                for (int64_t i = 0; i < lengths[s]; ++i) {
                    const T* from = flat + (starts[s] + i) * parts * heads * size + column;
                    if (bias)
                        for (int64_t d = 0; d < size; ++d) store(to[i * size + d], load(from[d]) + load(bias[column + d]));
                    else
                        std::memcpy(to + i * size, from, size * sizeof(T));
                }
                std::memset(to + lengths[s] * size, 0, (length - lengths[s]) * size * sizeof(T));
            }
}

// The other way; where `grad_bias` is given, the sums over all pieces are added to it
template <class T>
void merge_heads(const T* heads_first, const int32_t* starts, const int32_t* lengths, T* flat, float* grad_bias,
                 int64_t parts, int64_t sequences, int64_t heads, int64_t length, int64_t size, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(threads_for(parts* heads, threads)) schedule(static)
    for (int64_t p = 0; p < parts; ++p)
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t column = (p * heads + h) * size;
            for (int64_t s = 0; s < sequences; ++s) {
                const T* from = heads_first + ((p * sequences + s) * heads + h) * length * size;
                for (int64_t i = 0; i < lengths[s]; ++i) {
                    std::memcpy(flat + (starts[s] + i) * parts * heads * size + column, from + i * size,
                                size * sizeof(T));
                    if (grad_bias)
                        for (int64_t d = 0; d < size; ++d) grad_bias[column + d] += load(from[i * size + d]);
                }
            }
        }
}

// How many pieces the i-th of n sees: all, or, one way, none behind itself
inline int64_t seen_by(int64_t i, int64_t n, int64_t one_way) { return one_way ? i + 1 : n; }

// scores (sequences, heads, length, length) become softmax(scale * scores) over the pieces of its sequence that a piece
// sees; dropped = dropout of it
template <class T>
void softmax_forward(T* scores, const int32_t* starts, const int32_t* lengths, const uint32_t* keys, int64_t site,
                     double probability, double scale, T* dropped, int64_t one_way, int64_t sequences, int64_t heads,
                     int64_t length, int64_t threads) {
#pragma omp parallel num_threads(threads_for(sequences* heads, threads))
    {
        const Dropout dropout(probability, site);
        const float factor = float(scale);
        std::vector<float> buffer(length);
        float* row = buffer.data();
#pragma omp for schedule(static)
        for (int64_t b = 0; b < sequences * heads; ++b) {
            const int64_t s = b / heads, n = lengths[s];
            const uint32_t head = uint32_t(b % heads) << 16;
            for (int64_t i = 0; i < n; ++i) {
                const int64_t seen = seen_by(i, n, one_way);
                T* to = scores + (b * length + i) * length;
                T* also = dropped + (b * length + i) * length;
                float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
                for (int64_t j = 0; j < seen; ++j) {
                    row[j] = factor * load(to[j]);
                    largest = row[j] > largest ? row[j] : largest;
                }
                const float sum = raise_row(row, seen, largest);
                const float share = 1.0f / sum;
                for (int64_t j = 0; j < seen; ++j) store(to[j], row[j] *= share);
                if (dropout.drops()) {
                    const uint32_t key = dropout.key(keys[starts[s] + i]);
#pragma omp simd
                    for (int64_t j = 0; j < seen; ++j) store(also[j], row[j] * dropout(key, head | uint32_t(j)));
                    std::memset(also + seen, 0, (length - seen) * sizeof(T));
                }
                std::memset(to + seen, 0, (length - seen) * sizeof(T));
            }
            std::memset(scores + (b * length + n) * length, 0, (length - n) * length * sizeof(T));
            if (dropout.drops())
                std::memset(dropped + (b * length + n) * length, 0, (length - n) * length * sizeof(T));
        }
    }
}

// What was kept of the shares, once more
template <class T>
void redo_dropout(const T* shares, const int32_t* starts, const int32_t* lengths, const uint32_t* keys, int64_t site,
                  double probability, T* dropped, int64_t one_way, int64_t sequences, int64_t heads, int64_t length,
                  int64_t threads) {
#pragma omp parallel for num_threads(threads_for(sequences* heads, threads)) schedule(static)
    for (int64_t b = 0; b < sequences * heads; ++b) {
        const Dropout dropout(probability, site);
        const int64_t s = b / heads, n = lengths[s];
        const uint32_t head = uint32_t(b % heads) << 16;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = (b * length + i) * length, seen = seen_by(i, n, one_way);
            const uint32_t key = dropout.key(keys[starts[s] + i]);
#pragma omp simd
            for (int64_t j = 0; j < seen; ++j)
                store(dropped[at + j], load(shares[at + j]) * dropout(key, head | uint32_t(j)));
            std::memset(dropped + at + seen, 0, (length - seen) * sizeof(T));
        }
        std::memset(dropped + (b * length + n) * length, 0, (length - n) * length * sizeof(T));
    }
}

// grad (of what was kept) becomes the gradient of the scores
template <class T>
void softmax_backward(T* grad, const T* shares, const T* dropped, const int32_t* lengths, double scale,
                      int64_t one_way, int64_t sequences, int64_t heads, int64_t length, int64_t threads) {
    const float factor = float(scale);
#pragma omp parallel for num_threads(threads_for(sequences* heads, threads)) schedule(static)
    for (int64_t b = 0; b < sequences * heads; ++b) {
        const int64_t n = lengths[b / heads];
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = (b * length + i) * length, seen = seen_by(i, n, one_way);
            float inner = 0;
            for (int64_t j = 0; j < seen; ++j) inner += load(dropped[at + j]) * load(grad[at + j]);
            for (int64_t j = 0; j < seen; ++j)
                store(grad[at + j], factor * (load(dropped[at + j]) * load(grad[at + j]) - load(shares[at + j]) * inner));
            std::memset(grad + at + seen, 0, (length - seen) * sizeof(T));
        }
        std::memset(grad + (b * length + n) * length, 0, (length - n) * length * sizeof(T));
    }
}

}  // namespace
