// Between the matrix products of attention: heads apart and together, softmax with dropout.

#pragma once

#include "sixteen.h"

namespace {

// Flat rows (pieces, parts * heads * size) -> (parts, sequences, heads, length, size), zeros after a sequence's end
template <class T>
void split_heads(const T* flat, const T* bias, const int32_t* starts, const int32_t* lengths, T* out, int64_t parts,
                 int64_t sequences, int64_t heads, int64_t length, int64_t size, int64_t threads) {
#pragma omp parallel for collapse(3) num_threads(limit_threads(parts* sequences* heads, threads)) schedule(static)
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

// The inverse of `split_heads`; where `grad_bias` is given, the sums over all pieces are added to it
template <class T>
void merge_heads(const T* heads_first, const int32_t* starts, const int32_t* lengths, T* flat, float* grad_bias,
                 int64_t parts, int64_t sequences, int64_t heads, int64_t length, int64_t size, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(limit_threads(parts* heads, threads)) schedule(static)
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

// The pieces that the i-th of the n pieces of a sequence sees, from `begin` up to `end`: those at a distance of at most
// `window` on each side; with `one_way`, none after itself.
struct Sight {
    int64_t window;
    bool one_way;

    int64_t begin(int64_t i) const { return std::max<int64_t>(0, i - window); }
    int64_t end(int64_t i, int64_t n) const { return std::min(n, i + 1 + (one_way ? 0 : window)); }
};

// What all heads of some sequences share. Queries, keys and values lie (pieces, 3 * heads * size), their bias apart.
template <class T>
struct Sequences {
    const T *qkv, *bias;
    const int32_t *starts, *lengths;
    const uint32_t* keys;  // of the rows, for dropout
    Dropout dropout;
    float scale;  // of scores
    Sight sight;
    int64_t count, heads, size;

    int64_t longest() const { return *std::max_element(lengths, lengths + count); }
};

// The layout of scores: `rows` pieces at a time have scores with the same `width` pieces, which begin `window` before
// the first of them, even if that is before the sequence. Without a window, all pieces have scores with all.
struct Bands {
    Sight sight;
    int64_t rows, width;

    Bands(int64_t one_way, int64_t window, int64_t rows, int64_t width)
        : sight{window, one_way != 0}, rows(rows), width(width) {}
    // The piece to which the scores in the first column of row i belong, which may lie before the sequence
    int64_t first(int64_t i) const { return i / rows * rows - (width > rows ? sight.window : 0); }
    // The columns of the row that it sees, of n pieces
    int64_t begin(int64_t i) const { return sight.begin(i) - first(i); }
    int64_t end(int64_t i, int64_t n) const { return sight.end(i, n) - first(i); }

    // A row becomes zeros but for the columns that it sees.
    template <class T>
    void clear(T* row, int64_t begin, int64_t end) const {
        std::memset(row, 0, begin * sizeof(T));
        std::memset(row + end, 0, (width - end) * sizeof(T));
    }
};

// scores (sequences, heads, length, width) become softmax(scale * scores) over the pieces of its sequence that a piece
// sees; dropped = dropout of it. `rows` and `width` are those of `Bands`: without a window both are the length.
template <class T>
void softmax_forward(T* scores, const int32_t* starts, const int32_t* lengths, const uint32_t* keys, int64_t site,
                     double probability, double scale, T* dropped, int64_t one_way, int64_t window, int64_t rows,
                     int64_t width, int64_t sequences, int64_t heads, int64_t length, int64_t threads) {
#pragma omp parallel num_threads(limit_threads(sequences* heads, threads))
    {
        const Dropout dropout(probability, site);
        const Bands bands(one_way, window, rows, width);
        const float factor = float(scale);
        std::vector<float> buffer(width);
        float* row = buffer.data();
#pragma omp for schedule(static)
        for (int64_t b = 0; b < sequences * heads; ++b) {
            const int64_t s = b / heads, n = lengths[s];
            const uint32_t head = uint32_t(b % heads) << 16;
            for (int64_t i = 0; i < n; ++i) {
                const int64_t begin = bands.begin(i), end = bands.end(i, n), seen = end - begin;
                T* to = scores + (b * length + i) * width;
                T* also = dropped + (b * length + i) * width;
                bands.clear(to, begin, end);
                to += begin;
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
                    const uint32_t column = head + uint32_t(bands.sight.begin(i));
                    bands.clear(also, begin, end);
                    also += begin;
#pragma omp simd
                    for (int64_t j = 0; j < seen; ++j) store(also[j], row[j] * dropout(key, column + uint32_t(j)));
                }
            }
            std::memset(scores + (b * length + n) * width, 0, (length - n) * width * sizeof(T));
            if (dropout.drops())
                std::memset(dropped + (b * length + n) * width, 0, (length - n) * width * sizeof(T));
        }
    }
}

// Computes again what dropout kept of the shares.
template <class T>
void redo_dropout(const T* shares, const int32_t* starts, const int32_t* lengths, const uint32_t* keys, int64_t site,
                  double probability, T* dropped, int64_t one_way, int64_t window, int64_t rows, int64_t width,
                  int64_t sequences, int64_t heads, int64_t length, int64_t threads) {
    const Bands bands(one_way, window, rows, width);
#pragma omp parallel for num_threads(limit_threads(sequences* heads, threads)) schedule(static)
    for (int64_t b = 0; b < sequences * heads; ++b) {
        const Dropout dropout(probability, site);
        const int64_t s = b / heads, n = lengths[s];
        const uint32_t head = uint32_t(b % heads) << 16;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = (b * length + i) * width, begin = bands.begin(i), end = bands.end(i, n);
            const uint32_t key = dropout.key(keys[starts[s] + i]);
            const uint32_t column = head + uint32_t(bands.first(i));
#pragma omp simd
            for (int64_t j = begin; j < end; ++j)
                store(dropped[at + j], load(shares[at + j]) * dropout(key, column + uint32_t(j)));
            bands.clear(dropped + at, begin, end);
        }
        std::memset(dropped + (b * length + n) * width, 0, (length - n) * width * sizeof(T));
    }
}

// grad (of what was kept) becomes the gradient of the scores
template <class T>
void softmax_backward(T* grad, const T* shares, const T* dropped, const int32_t* lengths, double scale,
                      int64_t one_way, int64_t window, int64_t rows, int64_t width, int64_t sequences, int64_t heads,
                      int64_t length, int64_t threads) {
    const Bands bands(one_way, window, rows, width);
    const float factor = float(scale);
#pragma omp parallel for num_threads(limit_threads(sequences* heads, threads)) schedule(static)
    for (int64_t b = 0; b < sequences * heads; ++b) {
        const int64_t n = lengths[b / heads];
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = (b * length + i) * width, begin = bands.begin(i), end = bands.end(i, n);
            float inner = 0;
            for (int64_t j = begin; j < end; ++j) inner += load(dropped[at + j]) * load(grad[at + j]);
            for (int64_t j = begin; j < end; ++j)
                store(grad[at + j], factor * (load(dropped[at + j]) * load(grad[at + j]) - load(shares[at + j]) * inner));
            bands.clear(grad + at, begin, end);
        }
        std::memset(grad + (b * length + n) * width, 0, (length - n) * width * sizeof(T));
    }
}

}  // namespace
