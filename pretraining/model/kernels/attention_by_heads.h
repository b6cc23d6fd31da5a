// Attention in bf16, a head of a sequence at a time: scores, shares and their gradients stay in the cache.
//
// Of the forward pass `spreads` is kept, two numbers for each row of scores. From them the backward pass computes the
// shares again.
//
// Blocks of scores in which no piece sees another are not computed: with a window, time grows with length times window.
//
// NaN stays visible. Within its sequence it may reach pieces that do not see its own piece: where pieces see one way or
// a window, those of the same blocks of 32, since 0 times NaN is NaN.

#pragma once

#include "attention.h"
#include "blocks.h"
#include "sixteen.h"
#include "turning.h"

#ifdef CLOZE_HALVES

namespace {

constexpr int64_t AHEAD = 16;  // how many rows before it is read memory is asked for a row
constexpr int64_t LINE = 32;   // numbers that memory gives at once

inline int64_t round_up(int64_t length) { return (length + BLOCK - 1) / BLOCK * BLOCK; }

// Part of a row of scores or shares
struct Columns {
    int64_t begin, end;
};

// Makes a row of scores ready for vectors of sixteen: outside of what is seen, to the end of its block, scores are so low
// that they weigh next to nothing, until their shares are set to zero. Returns where the block ends.
inline int64_t open_row(float* scores, Columns seen, float outside = -INFINITY) {
    const int64_t end = round_up(seen.end);
    std::fill(scores, scores + seen.begin, outside);
    std::fill(scores + seen.end, scores + end, outside);
    return end;
}

// The highest score of a row, and the logarithm of the sum of exp(score - highest). They are kept apart: added to a
// huge score, the logarithm would be rounded away.
struct Spread {
    float highest, log_sum;
};

// A row of scores becomes what dropout keeps of its shares; returns its highest score, and the sum whose logarithm is part of
// its spread. Dropout numbers the columns from `column`.
inline std::pair<float, float> share_row(float* scores, Columns seen, float scale, const Dropout& dropout, uint32_t key,
                                         uint32_t column, bfloat16* kept) {
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
        store_sixteen(kept + j, dropout.drops() ? drop_sixteen(share, dropout, key, column + uint32_t(j)) : share);
    }
    return {largest, sum};
}

// From a row of scores and the gradient of what was kept of its shares: that again, and the gradient of the scores.
inline void share_row_backward(float* scores, float* grad, Columns seen, float scale, Spread spread,
                               const Dropout& dropout, uint32_t key, uint32_t column, bfloat16* kept,
                               bfloat16* slopes) {
    const int64_t end = open_row(scores, seen);
    open_row(grad, seen, 0.0f);
    __m512 sums = _mm512_setzero_ps();
    for (int64_t j = 0; j < end; j += SIXTEEN) {
        const __m512 away = _mm512_sub_ps(load_sixteen(scores + j), _mm512_set1_ps(spread.highest));
        const __m512 share = exponential(_mm512_fmsub_ps(away, _mm512_set1_ps(scale), _mm512_set1_ps(spread.log_sum)));
        __m512 factor = _mm512_set1_ps(1.0f);
        if (dropout.drops()) factor = drop_sixteen(factor, dropout, key, column + uint32_t(j));
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
    const Sequences<bfloat16>& all;
    const int64_t size, hidden;
    std::vector<bfloat16> queries, keys, values, grads, kept, slopes, kept_turned, slopes_turned;
    std::vector<uint32_t> key_columns, key_rows, value_columns, value_rows, query_rows, grad_rows;  // in panels
    std::vector<float> scores, grad_scores, sums;
    int64_t head = 0, start = 0, n = 0, length = 0;  // the length with the rows of zeros behind the n of the sequence
    int64_t band = 0;  // how far apart rows of scores and shares lie

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

    // How many rows of a block lie within the sequence
    int64_t count_rows(int64_t first) const { return std::min(BLOCK, n - first); }

    // Where the block begins that holds the first piece that the rows of a block see: the first column of their scores
    int64_t origin(int64_t first) const { return all.sight.begin(first) / BLOCK * BLOCK; }

    // How many pieces some rows of a block see together, from their origin on
    int64_t count_seen(int64_t first, int64_t rows) const { return all.sight.end(first + rows - 1, n) - origin(first); }

    // The most columns of a block of rows of scores that are computed, in whole blocks
    int64_t find_band() const { return std::min(length, BLOCK + 2 * round_up(std::min(length, all.sight.window))); }

    // The columns of what a row of a block sees: nothing, where it lies behind the sequence
    Columns seen(int64_t first, int64_t i) const {
        return i < n ? Columns{all.sight.begin(i) - origin(first), all.sight.end(i, n) - origin(first)} : Columns{0, 0};
    }

    // Outside of what a row sees, nothing is kept, to the end of the blocks that are multiplied.
    static void clear_outside(Columns seen, int64_t end, bfloat16* row) {
        std::memset(row, 0, seen.begin * sizeof *row);
        std::memset(row + seen.end, 0, (end - seen.end) * sizeof *row);
    }

    // The number by which dropout knows the first column of a block's scores
    uint32_t column(int64_t first) const { return (uint32_t(head) << 16) + uint32_t(origin(first)); }

    // out = scores or their gradient, of some rows of a block: left (queries, size) with the columns that they see
    void score(const std::vector<bfloat16>& left, const std::vector<uint32_t>& columns, int64_t first, int64_t rows,
               float* out) {
        const Panels right{columns.data() + origin(first) * size / 2, size};
        multiply<Blocks>(left.data() + first * size, size, right, out, band, rows, count_seen(first, rows), size);
    }

    // sums = shares or slopes of some rows of a block with what they see of right (length, size)
    void sum_over_keys(const std::vector<bfloat16>& left, const std::vector<uint32_t>& right, int64_t first, int64_t rows) {
        multiply<Blocks>(left.data(), band, Panels{right.data(), length}.from(origin(first)), sums.data(), size, rows,
                         size, count_seen(first, rows));
    }

    void share_backward(int64_t first, const Spread* spreads) {
        const int64_t from = origin(first), end = round_up(count_seen(first, count_rows(first)));
        for (int64_t r = 0; r < BLOCK; ++r) {
            const int64_t i = first + r, at = r * band;
            if (i < n)
                share_row_backward(scores.data() + at, grad_scores.data() + at, seen(first, i), all.scale,
                                   spreads[(start + i) * all.heads + head], all.dropout, row_key(i), column(first),
                                   kept.data() + at, slopes.data() + at);
            clear_outside(seen(first, i), end, kept.data() + at);
            clear_outside(seen(first, i), end, slopes.data() + at);
        }
        for (int64_t j = 0; j < end; j += BLOCK) {
            const int64_t to = (from + j) * band + first - origin(from + j);  // blocks see each other, or neither
            turn_block<BLOCK>(kept.data() + j, band, kept_turned.data() + to, band);
            turn_block<BLOCK>(slopes.data() + j, band, slopes_turned.data() + to, band);
        }
    }

    // sums = turned (keys, queries) @ right (queries, size); one way, keys are seen by no query that lies in a block before
    void sum_over_queries(const std::vector<bfloat16>& turned, const std::vector<uint32_t>& right) {
        for (int64_t j = 0; j < n; j += BLOCK) {
            const int64_t from = all.sight.one_way ? j : origin(j);
            const int64_t to = std::min(n, round_up(j + BLOCK + std::min(n, all.sight.window)));
            multiply<Blocks>(turned.data() + j * band + from - origin(j), band, Panels{right.data(), length}.from(from),
                             sums.data() + j * size, size, count_rows(j), size, to - from);
        }
    }

   public:
    Head(const Sequences<bfloat16>& all, bool backward) : all(all), size(all.size), hidden(all.heads * all.size) {
        const int64_t longest = length = round_up(all.longest()), whole = longest * size, widest = find_band();
        for (auto* each : {&queries, &keys, &values}) each->resize(whole);
        for (auto* each : {&key_columns, &value_rows}) each->resize(whole / 2);
        kept.resize(BLOCK * widest);
        scores.resize(BLOCK * widest);
        sums.resize(backward ? whole : BLOCK * size);
        if (!backward) return;
        grads.resize(whole);
        for (auto* each : {&key_rows, &value_columns, &query_rows, &grad_rows}) each->resize(whole / 2);
        for (auto* each : {&kept_turned, &slopes_turned}) each->resize(longest * widest);
        slopes.resize(BLOCK * widest);
        grad_scores.resize(BLOCK * widest);
    }

    // Goes to a head, by its number among those of all sequences.
    void open(int64_t number) {
        const int64_t sequence = number / all.heads;
        head = number % all.heads, start = all.starts[sequence], n = all.lengths[sequence], length = round_up(n);
        band = find_band();
        const bfloat16 *flat = all.qkv + start * 3 * hidden + head * size;
        int64_t part = 0;
        for (auto* each : {&queries, &keys, &values}) {
            take(flat + part, 3 * hidden, all.bias ? all.bias + part + head * size : nullptr, *each);
            part += hidden;
        }
        pair_columns(keys.data(), length, size, key_columns.data());
    }

    // The context of its pieces from one to another; that of the first goes to `out`.
    void forward(int64_t from, int64_t to, bfloat16* out, Spread* spreads = nullptr) {
        pair_rows(values.data(), length, size, value_rows.data());
        for (int64_t first = from, rows; first < to; first += rows) {
            rows = std::min(BLOCK - first % BLOCK, to - first);
            score(queries, key_columns, first, rows, scores.data());
            for (int64_t i = first, at = 0; i < first + rows; ++i, at += band) {
                const auto [highest, sum] = share_row(scores.data() + at, seen(first, i), all.scale, all.dropout,
                                                      row_key(i), column(first), kept.data() + at);
                if (spreads) spreads[(start + i) * all.heads + head] = {highest, std::log(sum)};
                clear_outside(seen(first, i), round_up(count_seen(first, rows)), kept.data() + at);
            }
            sum_over_keys(kept, value_rows, first, rows);
            put(rows, out + (first - from) * hidden, hidden, nullptr);
        }
    }

    void forward(bfloat16* context, Spread* spreads) {
        forward(0, n, context + start * hidden + head * size, spreads);
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
            const int64_t rows = count_rows(first);
            score(queries, key_columns, first, rows, scores.data());
            score(grads, value_columns, first, rows, grad_scores.data());
            share_backward(first, spreads);
            sum_over_keys(slopes, key_rows, first, rows);
            put(rows, flat + first * 3 * hidden, 3 * hidden, grad_bias);
        }
        sum_over_queries(slopes_turned, query_rows);
        put(n, flat + hidden, 3 * hidden, grad_bias + size);
        sum_over_queries(kept_turned, grad_rows);
        put(n, flat + 2 * hidden, 3 * hidden, grad_bias + 2 * size);
    }
};

// Of a sequence, whose heads lie side by side in memory, if there are enough for all threads
inline int64_t count_heads_at_once(int64_t count, int64_t heads, int64_t threads) {
    return std::max<int64_t>(1, std::min(heads, count * heads / (4 * threads)));
}

// Threads go to the heads of all sequences, one after another, and compute with each
template <class Blocks, class Function>
inline void for_each_head(const Sequences<bfloat16>& all, bool backward, int64_t threads, const Function& compute) {
    const int64_t heads = all.count * all.heads;
#pragma omp parallel num_threads(limit_threads(heads, threads))
    {
        [[maybe_unused]] const Blocks blocks{};
        Head<Blocks> head(all, backward);
#pragma omp for schedule(dynamic, count_heads_at_once(all.count, all.heads, threads))
        for (int64_t number = 0; number < heads; ++number) {
            head.open(number);
            compute(head, number);
        }
    }
}

// context (pieces, heads * size) = what each piece takes of its sequence; spreads is (pieces, heads, 2)
template <class Blocks>
void attention(const bfloat16* qkv, const bfloat16* bias, const int32_t* starts, const int32_t* lengths,
               const uint32_t* keys, int64_t site, double probability, double scale, int64_t one_way, int64_t window,
               bfloat16* context, Spread* spreads, int64_t count, int64_t heads, int64_t size, int64_t threads) {
    const Sequences<bfloat16> all{qkv, bias, starts, lengths, keys, Dropout(probability, site), float(scale),
                                  {window, one_way != 0}, count, heads, size};
    for_each_head<Blocks>(all, false, threads, [&](Head<Blocks>& head, int64_t) { head.forward(context, spreads); });
}

// The gradients of queries, keys and values, and of their bias, from that of the context
template <class Blocks>
void attention_backward(const bfloat16* qkv, const bfloat16* bias, const int32_t* starts, const int32_t* lengths,
                        const uint32_t* keys, int64_t site, double probability, double scale, int64_t one_way,
                        int64_t window, const bfloat16* grad, const Spread* spreads, bfloat16* grad_qkv,
                        bfloat16* grad_bias, int64_t count, int64_t heads, int64_t size, int64_t threads) {
    const Sequences<bfloat16> all{qkv, bias, starts, lengths, keys, Dropout(probability, site), float(scale),
                                  {window, one_way != 0}, count, heads, size};
    std::vector<float> sums(count * heads * 3 * size, 0.0f);  // of each head by itself: added up in a fixed order
    for_each_head<Blocks>(all, true, threads, [&](Head<Blocks>& head, int64_t number) {
        head.backward(grad, spreads, grad_qkv, sums.data() + number * 3 * size);
    });
    for (int64_t part = 0; part < 3 && grad_bias; ++part)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < size; ++d) {
                float sum = 0;
                for (int64_t s = 0; s < count; ++s) sum += sums[((s * heads + h) * 3 + part) * size + d];
                store(grad_bias[(part * heads + h) * size + d], sum);
            }
}

}  // namespace

#endif
