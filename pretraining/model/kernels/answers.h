// All layers of an encoder that answers, in one call: threads start once, and nothing lies between the products but their
// ends. fp32; n pieces of s sequences, H hidden.

#pragma once

#include "products.h"

namespace {

// The weights of a layer: products in panels, biases, and the weight and the bias of each norm
struct ServedLayer {
    const float *qkv, *qkv_bias, *output, *output_bias, *norm, *norm_bias;
    const float *inner, *inner_bias, *outer, *outer_bias, *last_norm, *last_norm_bias;
};

// Room for the rows between the products; each part is written whole before it is read
struct Between {
    float *qkv, *context, *ended, *inner;
};

// out = the layer norm of x + residual, which may lie where out does
void add_and_norm(const float* x, const float* residual, const float* weight, const float* bias, float epsilon,
                  float* out, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const float *xi = x + i * width, *ri = residual + i * width;
        float* to = out + i * width;
        float mean = 0, variance = 0;
        for (int64_t j = 0; j < width; ++j) mean += to[j] = xi[j] + ri[j];
        mean /= float(width);
        for (int64_t j = 0; j < width; ++j) variance += (to[j] - mean) * (to[j] - mean);
        const float scale = 1.0f / std::sqrt(variance / float(width) + epsilon);
        for (int64_t j = 0; j < width; ++j) to[j] = std::fma((to[j] - mean) * scale, weight[j], bias[j]);
    }
}

// What a thread needs for a head of a sequence: keys in panels of pieces, values in panels of columns, scores of rows
inline int64_t scratch_of_head(int64_t length, int64_t size) {
    const int64_t rounded = (length + PANEL - 1) / PANEL * PANEL;
    return rounded * size + length * size + MOST_ROWS * rounded;
}

// Of one head: the means of the values of the pieces that each query sees, of which the first sees so many; the next one
// sees one more where `one_way`
void attend_head(const float* query, int64_t query_stride, int64_t queries, int64_t first_seen, int64_t one_way,
                 const float* key, const float* value, int64_t stride, int64_t length, int64_t size, float* out,
                 int64_t out_stride, float* scratch) {
    const int64_t rounded = (length + PANEL - 1) / PANEL * PANEL, blocks = row_blocks(queries);
    float *keys = scratch, *values = keys + rounded * size, *scores = values + length * size;
    for (int64_t j = 0; j < rounded; ++j) {
        float* to = keys + (j / PANEL * size) * PANEL + j % PANEL;
        for (int64_t d = 0; d < size; ++d) to[d * PANEL] = j < length ? key[j * stride + d] : 0.0f;
    }
    for (int64_t column = 0; column < size; column += PANEL)
        for (int64_t j = 0; j < length; ++j)
            std::memcpy(values + (column * length) + j * PANEL, value + j * stride + column, PANEL * sizeof(float));
    const float factor = 1.0f / std::sqrt(float(size));
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t begin = part(b, blocks, queries), rows = part(b + 1, blocks, queries) - begin;
        float shares[MOST_ROWS];
        for (int64_t j = 0; j < rounded; j += PANEL)
            multiply_few<MOST_ROWS>(rows, query + begin * query_stride, size, query_stride, keys + j * size,
                                    scores + j, rounded, j, Nothing());
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t seen = first_seen + (one_way ? begin + r : 0);
            float *row = scores + r * rounded, largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
            for (int64_t j = 0; j < seen; ++j) largest = row[j] > largest ? row[j] : largest;
            for (int64_t j = 0; j < seen; ++j) sum += row[j] = exponential(factor * (row[j] - largest));
            std::memset(row + seen, 0, (length - seen) * sizeof(float));
            shares[r] = 1.0f / sum;
        }
        for (int64_t column = 0; column < size; column += PANEL) {
            float* to = out + begin * out_stride + column;
            multiply_few<MOST_ROWS>(rows, scores, length, rounded, values + column * length, to, out_stride, column,
                                    Nothing());
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < PANEL; ++j) to[r * out_stride + j] *= shares[r];
        }
    }
}

// The block behind attention, for any rows: x (rows, H) becomes what the layer gives
void finish_layer(const ServedLayer& layer, float* x, const Between& room, int64_t rows, int64_t hidden, int64_t wide,
                  float epsilon) {
    multiply(room.context, rows, hidden, layer.output, 0, hidden, room.ended, Bias{layer.output_bias});
    add_and_norm(room.ended, x, layer.norm, layer.norm_bias, epsilon, x, rows, hidden);
    multiply(x, rows, hidden, layer.inner, 0, wide, room.inner, BiasAndGelu{layer.inner_bias});
    multiply(room.inner, rows, wide, layer.outer, 0, hidden, room.ended, Bias{layer.outer_bias});
    add_and_norm(room.ended, x, layer.last_norm, layer.last_norm_bias, epsilon, x, rows, hidden);
}

// x (n, H) goes through the layers in its place. Where places are given, the last layer answers for one piece of every
// sequence alone: `asked` (s, H) becomes its hidden states.
void answer(float* x, const ServedLayer* layers, const int32_t* starts, const int64_t* places, float* asked,
            float* between, int64_t depth, int64_t sequences, int64_t heads, int64_t hidden, int64_t wide,
            int64_t longest, int64_t one_way, double epsilon, int64_t threads) {
    const int64_t n = starts[sequences], size = hidden / heads, rows = n * hidden;
    const Between room{between, between + 3 * rows, between + 4 * rows, between + 5 * rows};
#pragma omp parallel num_threads(int(threads))
    {
        std::vector<float> scratch(scratch_of_head(longest, size));
        for (int64_t l = 0; l < depth; ++l) {
            const ServedLayer& layer = layers[l];
            const bool few = places && l + 1 == depth;
            // of the last layer, queries of few rows lie where its context will, and keys and values where qkv would
            const int64_t first = few ? hidden : 0, stride = 3 * hidden - first;
            multiply(x, n, hidden, layer.qkv, first, 3 * hidden, room.qkv, Bias{layer.qkv_bias});
            if (few) {
#pragma omp for schedule(static)
                for (int64_t s = 0; s < sequences; ++s)
                    std::memcpy(asked + s * hidden, x + places[s] * hidden, hidden * sizeof(float));
                multiply(asked, sequences, hidden, layer.qkv, 0, hidden, room.ended, Bias{layer.qkv_bias});
            }
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < sequences * heads; ++task) {
                const int64_t s = task / heads, column = task % heads * size, begin = starts[s];
                const int64_t length = starts[s + 1] - begin, row = few ? s : begin;
                const float* keys = room.qkv + begin * stride + hidden - first + column;
                const float* queries = few ? room.ended + s * hidden : room.qkv + begin * stride;
                const int64_t seen = !one_way ? length : few ? places[s] - begin + 1 : 1;
                attend_head(queries + column, few ? hidden : stride, few ? 1 : length, seen, one_way, keys,
                            keys + hidden, stride, length, size, room.context + row * hidden + column, hidden,
                            scratch.data());
            }
            finish_layer(layer, few ? asked : x, room, few ? sequences : n, hidden, wide, float(epsilon));
        }
    }
}

}  // namespace
