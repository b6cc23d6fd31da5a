// Products with few rows or many: rows of fp32 with a weight in fp32, of bf16 with one in bf16, of bytes with bytes.
//
// A weight lies in panels of columns. A panel has so many that their sums for some rows stay in the registers of a
// processor; its numbers lie in the order in which they are multiplied. A sum is taken in this order whatever the number
// of rows and threads: what comes of a row does not depend on the others.

#pragma once

#include "blocks.h"
#include "quantised.h"
#include "sixteen.h"

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#include <immintrin.h>
#define CLOZE_BYTES  // the processor multiplies bytes with exact sums
#endif

namespace {

constexpr int64_t PANEL = 2 * LANES;  // columns
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Asks memory for a part of the panel behind the one that is multiplied, which the thread multiplies next; few rows do not
// give the processor the time to find out by itself.
inline void ask_ahead(const void* part, int64_t size) {
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch((const char*)part + at, 0, 2);
}

// out = some rows of fp32 with a panel
template <int64_t ROWS>
void multiply_floats(const float* x, int64_t width, int64_t stride, const float* panel, float* out,
                     int64_t out_stride) {
    lanes sums[ROWS][2];
    for (int64_t r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = lanes{};
    for (int64_t k = 0; k < width; ++k) {
        const lanes left = *(const lanes*)(panel + k * PANEL), right = *(const lanes*)(panel + k * PANEL + LANES);
        ask_ahead(panel + (width + k) * PANEL, PANEL * sizeof *panel);
#pragma GCC unroll 16
        for (int64_t r = 0; r < ROWS; ++r) {
            const float value = x[r * stride + k];
            sums[r][0] += value * left;
            sums[r][1] += value * right;
        }
    }
    for (int64_t r = 0; r < ROWS; ++r) {
        *(lanes*)(out + r * out_stride) = sums[r][0];
        *(lanes*)(out + r * out_stride + LANES) = sums[r][1];
    }
}

// The same for a number of rows that is known when it runs
inline void multiply_few(int64_t rows, const float* x, int64_t width, int64_t stride, const float* panel, float* out,
                         int64_t out_stride) {
    with_rows<MOST_ROWS>(
        rows, [&](auto count) { multiply_floats<count.value>(x, width, stride, panel, out, out_stride); });
}

// Rows of fp32 and weights that they are multiplied with. `Number` is what attention reads and gives; where it is not
// EXACT, what lies around products may be computed with less than fp32 has.
struct Floats {
    using Number = float;
    static constexpr bool EXACT = true;
    struct Weight {
        const float *panels, *bias;
    };
    const float* rows;

    // All threads of a parallel region make them together, of rows that lie at x.
    static Floats of(const float* x, int64_t, int64_t, uint8_t*, float*) { return {x}; }

    void multiply(int64_t begin, int64_t count, int64_t width, const Weight& weight, int64_t column, float* out,
                  int64_t out_stride) const {
        multiply_few(count, rows + begin * width, width, width, weight.panels + column * width, out, out_stride);
    }
};

#ifdef CLOZE_BYTES
// How bytes are multiplied: four at a time in a lane where the processor adds up their products by itself, else two at a
// time in 16 bits. Sums are the same; four at a time would overflow 16 bits there.
#ifdef __AVX512F__
typedef __m512i byte_lanes;
inline byte_lanes in_all_lanes(int32_t value) { return _mm512_set1_epi32(value); }
inline byte_lanes load_lanes(const void* from) { return _mm512_loadu_si512(from); }
inline void store_lanes(void* to, byte_lanes value) { _mm512_storeu_si512(to, value); }
#else
typedef __m256i byte_lanes;
inline byte_lanes in_all_lanes(int32_t value) { return _mm256_set1_epi32(value); }
inline byte_lanes load_lanes(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline void store_lanes(void* to, byte_lanes value) { _mm256_storeu_si256((__m256i*)to, value); }
#endif
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
typedef uint8_t row_byte;
inline byte_lanes load_weights(const int8_t* from) { return load_lanes(from); }
inline byte_lanes add_products(byte_lanes sums, byte_lanes bytes, byte_lanes weights) {
#ifdef __AVX512F__
    return _mm512_dpbusd_epi32(sums, bytes, weights);
#else
    return _mm256_dpbusd_avx_epi32(sums, bytes, weights);
#endif
}
#else
typedef int16_t row_byte;
#ifdef __AVX512BW__
inline byte_lanes load_weights(const int8_t* from) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from)); }
inline byte_lanes add_products(byte_lanes sums, byte_lanes bytes, byte_lanes weights) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(bytes, weights));
}
#else
inline byte_lanes load_weights(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }
inline byte_lanes add_products(byte_lanes sums, byte_lanes bytes, byte_lanes weights) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(bytes, weights));
}
#endif
#endif
constexpr int64_t TOGETHER = sizeof(int32_t) / sizeof(row_byte);  // in a lane

// Rows of bytes, 128 standing for 0, with a scale each, and weights of bytes with a scale for each column. In a panel
// the bytes of a column that are multiplied together lie together.
struct Bytes {
#ifdef CLOZE_HALVES
    using Number = bfloat16;
#else
    using Number = float;
#endif
    static constexpr bool EXACT = false;
    struct Weight {
        const int8_t* panels;
        const float *bias, *scales;
        const int32_t* zeros;  // less what a row of zeros would give in each column
    };
    const row_byte* rows;
    const float* scales;

    template <class T>
    static Bytes of(const T* x, int64_t count, int64_t width, uint8_t* bytes, float* scales) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; ++i) scales[i] = quantise_row(x + i * width, (row_byte*)bytes + i * width, width);
        return {(row_byte*)bytes, scales};
    }

    // Multiplies without the scales of the rows. Not inlined: a compiler may reorder factors, and would do so for some
    // numbers of rows and not for others.
    template <int64_t ROWS>
    __attribute__((noinline)) void multiply_rows(int64_t begin, int64_t width, const Weight& weight, int64_t column,
                                                 float* out, int64_t out_stride) const {
        byte_lanes sums[ROWS][2];
        int32_t found[ROWS][PANEL];
#pragma GCC unroll 16
        for (int64_t r = 0; r < ROWS; ++r) {
            sums[r][0] = load_lanes(weight.zeros + column);
            sums[r][1] = load_lanes(weight.zeros + column + LANES);
        }
        const int8_t* panel = weight.panels + column * width;
        for (int64_t k = 0; k < width; k += TOGETHER) {
            const int8_t* weights = panel + k * PANEL;
            if constexpr (LANES == 8) ask_ahead(weights + width * PANEL, TOGETHER * PANEL);  // with sixteen it costs 2%
            const byte_lanes left = load_weights(weights), right = load_weights(weights + TOGETHER * LANES);
#pragma GCC unroll 16
            for (int64_t r = 0; r < ROWS; ++r) {
                int32_t together;
                std::memcpy(&together, rows + (begin + r) * width + k, sizeof together);
                const byte_lanes value = in_all_lanes(together);
                sums[r][0] = add_products(sums[r][0], value, left);
                sums[r][1] = add_products(sums[r][1], value, right);
            }
        }
#pragma GCC unroll 16
        for (int64_t r = 0; r < ROWS; ++r) {
            store_lanes(found[r], sums[r][0]);
            store_lanes(found[r] + LANES, sums[r][1]);
        }
        for (int64_t r = 0; r < ROWS; ++r)
            for (int64_t j = 0; j < PANEL; ++j)
                out[r * out_stride + j] = float(found[r][j]) * weight.scales[column + j];
    }

    void multiply(int64_t begin, int64_t count, int64_t width, const Weight& weight, int64_t column, float* out,
                  int64_t out_stride) const {
        with_rows<MOST_ROWS>(
            count, [&](auto number) { multiply_rows<number.value>(begin, width, weight, column, out, out_stride); });
        for (int64_t r = 0; r < count; ++r)
            for (int64_t j = 0; j < PANEL; ++j) out[r * out_stride + j] *= scales[begin + r];
    }
};

// (columns, width) -> panels, and less what a row of zeros gives; widths are multiples of 4
void pack_bytes(const float*, const int8_t* weight, int8_t* panels, int32_t* zeros, int64_t columns, int64_t width,
                int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(columns / PANEL, threads)) schedule(static)
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t j = 0; j < PANEL; ++j) {
            int32_t sum = 0;
            for (int64_t k = 0; k < width; ++k) {
                const int8_t value = weight[(column + j) * width + k];
                panels[column * width + k / TOGETHER * TOGETHER * PANEL + TOGETHER * j + k % TOGETHER] = value;
                sum += value;
            }
            zeros[column + j] = -128 * sum;
        }
}
#endif

#ifdef CLOZE_HALVES
// Rows and weights in bf16. In a panel two numbers of a column lie together.
struct Halves {
    using Number = bfloat16;
    static constexpr bool EXACT = false;
    struct Weight {
        const bfloat16* panels;
        const float* bias;
    };
    const bfloat16* rows;

    static Halves of(const float* x, int64_t count, int64_t width, uint8_t* bytes, float*) {
        bfloat16* halves = (bfloat16*)bytes;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < width; ++j) store(halves[i * width + j], x[i * width + j]);
        return {halves};
    }
    static Halves of(const bfloat16* x, int64_t, int64_t, uint8_t*, float*) { return {x}; }

    void multiply(int64_t begin, int64_t count, int64_t width, const Weight& weight, int64_t column, float* out,
                  int64_t out_stride) const {
        const uint32_t* panel = (const uint32_t*)(weight.panels + column * width);
        with_rows<MOST_ROWS>(count, [&](auto number) {
            multiply_pairs<number.value>(rows + begin * width, width, panel, out, out_stride, width);
        });
    }
};

// (columns, width) -> panels; widths are multiples of 2
void pack_halves(const bfloat16* weight, bfloat16* panels, int64_t columns, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(columns / PANEL, threads)) schedule(static)
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t j = 0; j < PANEL; ++j)
            for (int64_t k = 0; k < width; ++k)
                panels[column * width + k / 2 * 2 * PANEL + 2 * j + k % 2] = weight[(column + j) * width + k];
}
#endif

// (columns, width) -> panels; columns are multiples of a panel
void pack_floats(const float* weight, float* panels, int64_t columns, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(columns / PANEL, threads)) schedule(static)
    for (int64_t column = 0; column < columns; column += PANEL)
        for (int64_t k = 0; k < width; ++k)
            for (int64_t j = 0; j < PANEL; ++j)
                panels[column * width + k * PANEL + j] = weight[(column + j) * width + k];
}

// What a product ends with: as it is, or with gelu
struct Plainly {
    template <class T>
    static T of(T value) {
        return value;
    }
};

struct WithGelu {
    static float of(float value) {
        float below, density;
        normal(value, below, density);
        return value * below;
    }
#ifdef CLOZE_HALVES
    static __m512 of(__m512 value) { return gelu(value); }
#else
    static lanes of(lanes x) {  // the same polynomial
        const lanes most = lanes{} + 4.8f, near = x < -most ? -most : x > most ? most : x;
        const lanes t = near * near * 0.08680556f - 1.0f;
        lanes p{};
        for (const float factor : OF_GELU) p = p * t + factor;
        return x * (near * p + 0.5f);
    }
#endif
};

// out = the end of a panel's sums + bias
template <class End, bool EXACT, class T>
inline void finish(const float* sums, const float* bias, T* out) {
#ifdef CLOZE_HALVES
    if constexpr (!EXACT) {
        for (int64_t j = 0; j < PANEL; j += SIXTEEN)
            store_sixteen(out + j, End::of(_mm512_add_ps(load_sixteen(sums + j), load_sixteen(bias + j))));
        return;
    }
#else
    if constexpr (!EXACT) {
        for (int64_t j = 0; j < PANEL; j += LANES)
            *(lanes*)(out + j) = End::of(*(const lanes*)(sums + j) + *(const lanes*)(bias + j));
        return;
    }
#endif
    for (int64_t j = 0; j < PANEL; ++j) store(out[j], End::of(sums[j] + bias[j]));
}

// out = the end of x * weight + bias, for the columns from `first` to `last`; rows of out lie so far apart. All threads of
// a parallel region call it, and go on together.
template <class End = Plainly, class Rows, class T>
void multiply(const Rows& x, int64_t rows, int64_t width, const typename Rows::Weight& weight, int64_t first,
              int64_t last, T* out, int64_t out_stride) {
    const int64_t panels = (last - first) / PANEL, blocks = row_blocks(rows);
    const int64_t groups = std::min(blocks, (2 * int64_t(count_threads()) + panels - 1) / panels);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels * groups; ++task) {
        const int64_t column = task / groups * PANEL, group = task % groups;
        for (int64_t b = part(group, groups, blocks); b < part(group + 1, groups, blocks); ++b) {
            const int64_t begin = part(b, blocks, rows), count = part(b + 1, blocks, rows) - begin;
            float sums[MOST_ROWS * PANEL];
            x.multiply(begin, count, width, weight, first + column, sums, PANEL);
            for (int64_t r = 0; r < count; ++r)
                finish<End, Rows::EXACT>(sums + r * PANEL, weight.bias + first + column,
                                         out + (begin + r) * out_stride + column);
        }
    }
}

}  // namespace
