// All layers of an encoder that answers, in one call: threads start once, and nothing lies between the products but their
// ends. Products are of fp32, bf16 or bytes; those of attention of bf16, where these are not of fp32 and the processor has
// such products. All else is fp32; n pieces of s sequences, H hidden.

#pragma once

#include "attention_by_heads.h"
#include "products.h"

namespace {

// The weights of a layer: those of products, and the weight and the bias of each norm
template <class Rows>
struct ServedLayer {
    typename Rows::Weight qkv, output;
    const float *norm, *norm_bias;
    typename Rows::Weight inner, outer;
    const float *last_norm, *last_norm_bias;
};

// Room for the rows between the products; each part is written whole before it is read
template <class Rows>
struct Between {
    typename Rows::Number *qkv, *context, *inner;
    float *ended, *scales;
    uint8_t* bytes;
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

// Attention of one head: for each query, the mean of the values of the pieces that it sees, weighted by softmax. The
// first query sees the first `first_seen` pieces of the sequence; where `one_way`, each later one sees one more.
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
            multiply_few(rows, query + begin * query_stride, size, query_stride, keys + j * size, scores + j, rounded);
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
            multiply_few(rows, scores, length, rounded, values + column * length, to, out_stride);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < PANEL; ++j) to[r * out_stride + j] *= shares[r];
        }
    }
}

// A head of a sequence in fp32, and the room in which a thread computes one after another; in bf16, `Head` has the same
class FloatHead {
    const Sequences<float>& all;
    const int64_t hidden;
    std::vector<float> scratch;
    const float* qkv = nullptr;
    int64_t n = 0;

   public:
    explicit FloatHead(const Sequences<float>& all)
        : all(all), hidden(all.heads * all.size), scratch(scratch_of_head(all.longest(), all.size)) {}

    void open(int64_t number) {
        const int64_t sequence = number / all.heads;
        qkv = all.qkv + all.starts[sequence] * 3 * hidden + number % all.heads * all.size, n = all.lengths[sequence];
    }

    void forward(int64_t from, int64_t to, float* out) {
        const int64_t stride = 3 * hidden;
        attend_head(qkv + from * stride, stride, to - from, all.sight.end(from, n), all.sight.one_way, qkv + hidden,
                    qkv + 2 * hidden, stride, n, all.size, out, hidden, scratch.data());
    }
};

inline FloatHead make_head(const Sequences<float>& all) { return FloatHead(all); }
#ifdef CLOZE_HALVES
inline Head<Lanes> make_head(const Sequences<bfloat16>& all) { return Head<Lanes>(all, false); }
#endif

// The context of all pieces of some sequences, or of one of each, whose hidden states `asked` becomes
template <class Rows>
void attend(const ServedLayer<Rows>& layer, const float* x, const int64_t* places, float* asked, const Between<Rows>& room,
            const Sequences<typename Rows::Number>& all) {
    const int64_t base = all.starts[0], n = all.starts[all.count] - base, hidden = all.heads * all.size;
    const int64_t first = places ? hidden : 0, stride = 3 * hidden;  // queries of few are computed apart
    multiply(Rows::of(x, n, hidden, room.bytes, room.scales), n, hidden, layer.qkv, first, stride, room.qkv + first, stride);
    if (places) {
#pragma omp for schedule(static)
        for (int64_t s = 0; s < all.count; ++s)
            std::memcpy(asked + s * hidden, x + (places[s] - base) * hidden, hidden * sizeof *x);
        multiply(Rows::of(asked, all.count, hidden, room.bytes, room.scales), all.count, hidden, layer.qkv, 0, hidden,
                 room.context, hidden);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < all.count; ++s)
            std::memcpy(room.qkv + (places[s] - base) * stride, room.context + s * hidden, hidden * sizeof *room.qkv);
    }
    auto head = make_head(all);
#pragma omp for schedule(dynamic)
    for (int64_t number = 0; number < all.count * all.heads; ++number) {
        const int64_t s = number / all.heads, column = number % all.heads * all.size;
        const int64_t from = places ? places[s] - all.starts[s] : 0, row = places ? s : all.starts[s] - base;
        head.open(number);
        head.forward(from, places ? from + 1 : all.lengths[s], room.context + row * hidden + column);
    }
}

// The block behind attention, for any rows: x (rows, H) becomes what the layer gives
template <class Rows>
void finish_layer(const ServedLayer<Rows>& layer, float* x, const Between<Rows>& room, int64_t rows, int64_t hidden,
                  int64_t wide, float epsilon) {
    const auto taken = [&](const auto* from, int64_t width) {
        return Rows::of(from, rows, width, room.bytes, room.scales);
    };
    multiply(taken(room.context, hidden), rows, hidden, layer.output, 0, hidden, room.ended, hidden);
    add_and_norm(room.ended, x, layer.norm, layer.norm_bias, epsilon, x, rows, hidden);
    multiply<WithGelu>(taken(x, hidden), rows, hidden, layer.inner, 0, wide, room.inner, wide);
    multiply(taken(room.inner, wide), rows, wide, layer.outer, 0, hidden, room.ended, hidden);
    add_and_norm(room.ended, x, layer.last_norm, layer.last_norm_bias, epsilon, x, rows, hidden);
}

// Counts the sequences from this one on that have at most `rows` rows together; at least one.
inline int64_t count_sequences(int64_t rows, const int32_t* starts, int64_t from, int64_t sequences) {
    int64_t to = from + 1;
    while (to < sequences && starts[to + 1] - starts[from] <= rows) ++to;
    return to - from;
}

// x (n, H) goes through the layers in its place. Where places are given, the last layer answers for one piece of every
// sequence alone: `asked` (s, H) becomes its hidden states. A layer takes sequences of so many rows at once, or one:
// what lies between its products stays in the cache. `between` has room for 6 H + 2 `wide` numbers a row.
template <class Rows>
void answer(float* x, const ServedLayer<Rows>* layers, const int32_t* starts, const int64_t* places, float* asked,
            float* between, int64_t rows_at_once, int64_t depth, int64_t sequences, int64_t heads, int64_t hidden,
            int64_t wide, int64_t longest, int64_t one_way, double epsilon, int64_t threads) {
    using Number = typename Rows::Number;
    const int64_t size = hidden / heads, most = std::max(rows_at_once, longest);
    float *const inner = between + 5 * most * hidden, *const scales = inner + most * wide;
    const Between<Rows> room{(Number*)between, (Number*)(between + 3 * most * hidden), (Number*)inner,
                             between + 4 * most * hidden, scales, (uint8_t*)(scales + most)};
    std::vector<int32_t> lengths(sequences);
    for (int64_t s = 0; s < sequences; ++s) lengths[s] = starts[s + 1] - starts[s];
#pragma omp parallel num_threads(int(threads))
    {
        for (int64_t l = 0; l < depth; ++l)
            for (int64_t from = 0, count; from < sequences; from += count) {
                count = count_sequences(rows_at_once, starts, from, sequences);
                const bool few = places && l + 1 == depth;
                float* rows = x + starts[from] * hidden;
                const Sequences<Number> some{room.qkv - starts[from] * 3 * hidden, nullptr, starts + from,
                                             lengths.data() + from, nullptr, Dropout(0, 0),
                                             1.0f / std::sqrt(float(size)), {longest, one_way != 0}, count, heads, size};
                attend(layers[l], rows, few ? places + from : nullptr, asked + from * hidden, room, some);
                finish_layer(layers[l], few ? asked + from * hidden : rows, room,
                             few ? count : starts[from + count] - starts[from], hidden, wide, float(epsilon));
            }
    }
}

}  // namespace
