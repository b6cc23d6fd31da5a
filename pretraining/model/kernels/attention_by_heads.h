// Attention in bf16, a head of a sequence at a time: scores, shares and their gradients stay in the cache.
//
// Of the forward pass `spreads` is kept, two numbers for each row of scores. From them the backward pass computes the
// shares again.
//
// What is no number stays visible. Within its sequence it may reach pieces that do not see it: where pieces look one way,
// those of its own block of 32, since nothing times what is no number is none.

#pragma once

#include "attention.h"
#include "blocks.h"
#include "sixteen.h"
#include "turning.h"

#ifdef CLOZE_HALVES

namespace {

constexpr int64_t AHEAD = 16;  // how many rows before it is read memory is asked for a row
constexpr int64_t LINE = 32;   // numbers that memory gives at once

inline int64_t padded(int64_t length) { return (length + BLOCK - 1) / BLOCK * BLOCK; }

// What all heads of all sequences share. Queries, keys and values lie (pieces, 3 * heads * size), their bias apart.
struct Sequences {
    const bfloat16 *qkv, *bias;
    const int32_t *starts, *lengths;
    const uint32_t* keys;  // of the rows, for dropout
    Dropout dropout;
    float scale;  // of scores
    bool one_way;
    int64_t count, heads, size;

    int64_t longest() const { return padded(*std::max_element(lengths, lengths + count)); }
};

// Makes a row of scores ready for vectors of sixteen: behind what is seen, to the end of its block, scores are so low that
// they weigh next to nothing, until their shares are set to zero. Returns where the block ends.
inline int64_t open_row(float* scores, int64_t seen) {
    const int64_t end = padded(seen);
    std::fill(scores + seen, scores + end, -INFINITY);
    return end;
}

// The highest score of a row, and the logarithm of the sum of the exponentials of what each score lies below it. Apart
// they hold for huge scores too, in whose sum the logarithm would be lost.
struct Spread {
    float highest, log_sum;
};

// A row of scores becomes what dropout keeps of its shares; returns its spread.
inline Spread share_row(float* scores, int64_t seen, float scale, const Dropout& dropout, uint32_t key, uint32_t head,
                        bfloat16* kept) {
    const int64_t end = open_row(scores, seen);
    __m512 highest = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    for (int64_t j = 0; j < end; j += SIXTEEN) highest = _mm512_max_ps(load_sixteen(scores + j), highest);
    const float largest = _mm512_reduce_max_ps(highest);
    for (int64_t j = 0; j < end; j += SIXTEEN) {
        const __m512 away = _mm512_sub_ps(load_sixteen(scores + j), _mm512_set1_ps(largest));  // exactly 0 for the largest
        const __m512 weight = exponential(_mm512_mul_ps(away, _mm512_set1_ps(scale)));
        store_sixteen(scores + j, weight);
        sums = _mm512_add_ps(sums, weight);
    }
    const float sum = _mm512_reduce_add_ps(sums);
    for (int64_t j = 0; j < end; j += SIXTEEN) {
        const __m512 share = _mm512_mul_ps(load_sixteen(scores + j), _mm512_set1_ps(1.0f / sum));
        store_sixteen(kept + j, dropout.drops() ? kept_of(share, dropout, key, head | uint32_t(j)) : share);
    }
    return {largest, std::log(sum)};
}

// From a row of scores and the gradient of what was kept of its shares: that again, and the gradient of the scores.
inline void share_row_backward(float* scores, float* grad, int64_t seen, float scale, Spread spread,
                               const Dropout& dropout, uint32_t key, uint32_t head, bfloat16* kept, bfloat16* slopes) {
    const int64_t end = open_row(scores, seen);
    std::fill(grad + seen, grad + end, 0.0f);
    __m512 sums = _mm512_setzero_ps();
    for (int64_t j = 0; j < end; j += SIXTEEN) {
        const __m512 away = _mm512_sub_ps(load_sixteen(scores + j), _mm512_set1_ps(spread.highest));
        const __m512 share = exponential(_mm512_fmsub_ps(away, _mm512_set1_ps(scale), _mm512_set1_ps(spread.log_sum)));
        __m512 factor = _mm512_set1_ps(1.0f);
        if (dropout.drops()) factor = kept_of(factor, dropout, key, head | uint32_t(j));
        const __m512 slope = _mm512_mul_ps(load_sixteen(grad + j), factor);
        store_sixteen(kept + j, _mm512_mul_ps(share, factor));
        store_sixteen(scores + j, share);
        store_sixteen(grad + j, slope);
        sums = _mm512_fmadd_ps(share, slope, sums);
    }
    const __m512 inner = _mm512_set1_ps(_mm512_reduce_add_ps(sums));
    for (int64_t j = 0; j < end; j += SIXTEEN) {
        const __m512 share = _mm512_mul_ps(load_sixteen(scores + j), _mm512_set1_ps(scale));
        store_sixteen(slopes + j, _mm512_mul_ps(share, _mm512_sub_ps(load_sixteen(grad + j), inner)));
    }
}

// A head of a sequence, and the room in which a thread computes one after another; its products by Tiles or Lanes.
template <class Blocks>
class Head {
    const Sequences& all;
    const int64_t size, hidden;
    std::vector<bfloat16> queries, keys, values, grads, kept, slopes, kept_turned, slopes_turned;
    std::vector<uint32_t> key_columns, key_rows, value_columns, value_rows, query_rows, grad_rows;  // in panels
    std::vector<float> scores, grad_scores, sums;
    int64_t head = 0, start = 0, n = 0, length = 0;  // the length with the rows of zeros behind the n of the sequence

    void prefetch(const bfloat16* row) const {
        for (int64_t d = 0; d < size; d += LINE) __builtin_prefetch(row + d);
    }

    // Rows of flat ones, with the bias where there is one
    void take(const bfloat16* flat, int64_t width, const bfloat16* bias, std::vector<bfloat16>& out) const {
        bfloat16* to = out.data();
        for (int64_t i = 0; i < n; ++i) {
            prefetch(flat + std::min(i + AHEAD, n - 1) * width);
            if (bias)
                for (int64_t d = 0; d < size; d += SIXTEEN)
                    store_sixteen(to + i * size + d,
                                  _mm512_add_ps(load_sixteen(flat + i * width + d), load_sixteen(bias + d)));
            else
                std::memcpy(to + i * size, flat + i * width, size * sizeof *to);
        }
        std::memset(to + n * size, 0, (length - n) * size * sizeof *to);
    }

    // The sums of some rows go to flat ones, and are added to `total` where there is one.
    void put(int64_t rows, bfloat16* flat, int64_t width, float* total) const {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t d = 0; d < size; d += SIXTEEN) {
                const __m512 values = load_sixteen(sums.data() + i * size + d);
                store_sixteen(flat + i * width + d, values);
                if (total) store_sixteen(total + d, _mm512_add_ps(load_sixteen(total + d), values));
            }
    }

    uint32_t row_key(int64_t i) const { return all.dropout.drops() ? all.dropout.key(all.keys[start + i]) : 0; }

    // How much a row sees: nothing, where it lies behind the sequence
    int64_t seen(int64_t i) const { return i < n ? seen_by(i, n, all.one_way) : 0; }

    // Behind what a row sees, nothing is kept, to the end of the blocks that are multiplied.
    void clear_behind(int64_t i, int64_t end, bfloat16* row) const {
        std::memset(row + seen(i), 0, (end - seen(i)) * sizeof *row);
    }

    // How many rows of a block lie within the sequence
    int64_t rows_from(int64_t first) const { return std::min(BLOCK, n - first); }

    // How many pieces the rows of a block see together
    int64_t seen_from(int64_t first) const { return all.one_way ? std::min(n, first + BLOCK) : n; }

    void score(int64_t first) {
        multiply<Blocks>(queries.data() + first * size, size, {key_columns.data(), size}, scores.data(), length,
                         rows_from(first), seen_from(first), size);
    }

    void share_backward(int64_t first, const Spread* spreads) {
        const int64_t end = padded(seen_from(first));
        for (int64_t r = 0; r < BLOCK; ++r) {
            const int64_t i = first + r, at = r * length;
            if (i < n)
                share_row_backward(scores.data() + at, grad_scores.data() + at, seen(i), all.scale,
                                   spreads[(start + i) * all.heads + head], all.dropout, row_key(i),
                                   uint32_t(head) << 16, kept.data() + at, slopes.data() + at);
            clear_behind(i, end, kept.data() + at);
            clear_behind(i, end, slopes.data() + at);
        }
        for (int64_t j = 0; j < end; j += BLOCK) {
            turn_block<BLOCK>(kept.data() + j, length, kept_turned.data() + j * length + first, length);
            turn_block<BLOCK>(slopes.data() + j, length, slopes_turned.data() + j * length + first, length);
        }
    }

    // sums = turned (keys, queries) @ right (queries, size); keys are seen by no query that lies in a block before
    void sum_over_queries(const std::vector<bfloat16>& turned, const std::vector<uint32_t>& right) {
        for (int64_t j = 0; j < n; j += BLOCK) {
            const int64_t from = all.one_way ? j : 0;
            multiply<Blocks>(turned.data() + j * length + from, length, Panels{right.data(), length}.from(from),
                             sums.data() + j * size, size, rows_from(j), size, n - from);
        }
    }

   public:
    Head(const Sequences& all, bool backward) : all(all), size(all.size), hidden(all.heads * all.size) {
        const int64_t longest = all.longest(), whole = longest * size;
        for (auto* each : {&queries, &keys, &values}) each->resize(whole);
        for (auto* each : {&key_columns, &value_rows}) each->resize(whole / 2);
        kept.resize(BLOCK * longest);
        scores.resize(BLOCK * longest);
        sums.resize(backward ? whole : BLOCK * size);
        if (!backward) return;
        grads.resize(whole);
        for (auto* each : {&key_rows, &value_columns, &query_rows, &grad_rows}) each->resize(whole / 2);
        for (auto* each : {&kept_turned, &slopes_turned}) each->resize(longest * longest);
        slopes.resize(BLOCK * longest);
        grad_scores.resize(BLOCK * longest);
    }

    // Goes to a head, by its number among those of all sequences.
    void open(int64_t number) {
        const int64_t sequence = number / all.heads;
        head = number % all.heads, start = all.starts[sequence], n = all.lengths[sequence], length = padded(n);
        const bfloat16 *flat = all.qkv + start * 3 * hidden + head * size, *bias = all.bias + head * size;
        take(flat, 3 * hidden, bias, queries);
        take(flat + hidden, 3 * hidden, bias + hidden, keys);
        take(flat + 2 * hidden, 3 * hidden, bias + 2 * hidden, values);
        pair_columns(keys.data(), length, size, key_columns.data());
    }

    void forward(bfloat16* context, Spread* spreads) {
        pair_rows(values.data(), length, size, value_rows.data());
        for (int64_t first = 0; first < n; first += BLOCK) {
            score(first);
            for (int64_t r = 0; r < BLOCK; ++r) {
                const int64_t i = first + r, at = r * length;
                if (i < n)
                    spreads[(start + i) * all.heads + head] =
                        share_row(scores.data() + at, seen(i), all.scale, all.dropout, row_key(i), uint32_t(head) << 16,
                                  kept.data() + at);
                clear_behind(i, padded(seen_from(first)), kept.data() + at);
            }
            multiply<Blocks>(kept.data(), length, {value_rows.data(), length}, sums.data(), size, rows_from(first), size,
                             seen_from(first));
            put(rows_from(first), context + (start + first) * hidden + head * size, hidden, nullptr);
        }
    }

    // `grad_bias` (3 * size): the sums over the rows of this head alone
    void backward(const bfloat16* grad, const Spread* spreads, bfloat16* grad_qkv, float* grad_bias) {
        bfloat16* flat = grad_qkv + start * 3 * hidden + head * size;
        take(grad + start * hidden + head * size, hidden, nullptr, grads);
        pair_columns(values.data(), length, size, value_columns.data());
        pair_rows(keys.data(), length, size, key_rows.data());
        pair_rows(queries.data(), length, size, query_rows.data());
        pair_rows(grads.data(), length, size, grad_rows.data());
        for (int64_t first = 0; first < n; first += BLOCK) {
            score(first);
            multiply<Blocks>(grads.data() + first * size, size, {value_columns.data(), size}, grad_scores.data(), length,
                             rows_from(first), seen_from(first), size);
            share_backward(first, spreads);
            multiply<Blocks>(slopes.data(), length, {key_rows.data(), length}, sums.data(), size, rows_from(first), size,
                             seen_from(first));
            put(rows_from(first), flat + first * 3 * hidden, 3 * hidden, grad_bias);
        }
        sum_over_queries(slopes_turned, query_rows);
        put(n, flat + hidden, 3 * hidden, grad_bias + size);
        sum_over_queries(kept_turned, grad_rows);
        put(n, flat + 2 * hidden, 3 * hidden, grad_bias + 2 * size);
    }
};

// Of a sequence, whose heads lie side by side in memory, if there are enough for all threads
inline int64_t heads_at_once(int64_t count, int64_t heads, int64_t threads) {
    return std::max<int64_t>(1, std::min(heads, count * heads / (4 * threads)));
}

// Threads go to the heads of all sequences, one after another, and compute with each
template <class Blocks, class Function>
inline void for_each_head(const Sequences& all, bool backward, int64_t threads, const Function& compute) {
    const int64_t heads = all.count * all.heads;
#pragma omp parallel num_threads(threads_for(heads, threads))
    {
        [[maybe_unused]] const Blocks blocks{};
        Head<Blocks> head(all, backward);
#pragma omp for schedule(dynamic, heads_at_once(all.count, all.heads, threads))
        for (int64_t number = 0; number < heads; ++number) {
            head.open(number);
            compute(head, number);
        }
    }
}

// context (pieces, heads * size) = what each piece takes of its sequence; spreads is (pieces, heads, 2)
template <class Blocks>
void attention(const bfloat16* qkv, const bfloat16* bias, const int32_t* starts, const int32_t* lengths,
               const uint32_t* keys, int64_t site, double probability, double scale, int64_t one_way, bfloat16* context,
               Spread* spreads, int64_t count, int64_t heads, int64_t size, int64_t threads) {
    const Sequences all{qkv,          bias,           starts, lengths, keys, Dropout(probability, site),
                        float(scale), one_way != 0, count,  heads,   size};
    for_each_head<Blocks>(all, false, threads, [&](Head<Blocks>& head, int64_t) { head.forward(context, spreads); });
}

// The gradients of queries, keys and values, and of their bias, from that of the context
template <class Blocks>
void attention_backward(const bfloat16* qkv, const bfloat16* bias, const int32_t* starts, const int32_t* lengths,
                        const uint32_t* keys, int64_t site, double probability, double scale, int64_t one_way,
                        const bfloat16* grad, const Spread* spreads, bfloat16* grad_qkv, bfloat16* grad_bias,
                        int64_t count, int64_t heads, int64_t size, int64_t threads) {
    const Sequences all{qkv,          bias,           starts, lengths, keys, Dropout(probability, site),
                        float(scale), one_way != 0, count,  heads,   size};
    std::vector<float> sums(count * heads * 3 * size, 0.0f);  // of each head by itself: added up in a fixed order
    for_each_head<Blocks>(all, true, threads, [&](Head<Blocks>& head, int64_t number) {
        head.backward(grad, spreads, grad_qkv, sums.data() + number * 3 * size);
    });
    for (int64_t part = 0; part < 3; ++part)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < size; ++d) {
                float sum = 0;
                for (int64_t s = 0; s < count; ++s) sum += sums[((s * heads + h) * 3 + part) * size + d];
                store(grad_bias[(part * heads + h) * size + d], sum);
            }
}

}  // namespace

#endif
