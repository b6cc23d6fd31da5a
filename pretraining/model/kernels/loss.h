// The cross-entropy over the vocabulary, whose gradient takes the place of the logits where it is asked for.

#pragma once

#include "sixteen.h"

namespace {

// with `gradient`, logits (rows, stride) become softmax - one-hot over the first `width` columns, zero in the others
template <class T>
void cross_entropy(T* logits, const T* bias, const int64_t* labels, float* losses, uint8_t* correct, int64_t rows,
                   int64_t width, int64_t stride, int64_t gradient, int64_t threads) {
#pragma omp parallel num_threads(limit_threads(rows, threads))
    {
        std::vector<float> buffer(width);
        float* row = buffer.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            T* to = logits + i * stride;
            const float largest = add_bias_row(to, bias, row, width);
            const float right = row[labels[i]];  // an answer only if no equal comes before it
            correct[i] = right == largest && std::find(row, row + labels[i], right) == row + labels[i];
            const float sum = raise_row(row, width, largest);
            losses[i] = std::log(sum) + largest - right;
            if (!gradient) continue;
            row[labels[i]] -= sum;
            store_row(row, 1.0f / sum, to, width);
            std::memset(to + width, 0, (stride - width) * sizeof(T));
        }
    }
}

}  // namespace
