// Sixteen numbers at once, on a processor with vectors of 512 bits that rounds to bf16 by itself; and what all processors do
// with rows of numbers. What compilers make of such loops takes twice as many instructions and more. Numbers below
// 1.2e-38 are 0 here, as in the processor's products of bf16.

#pragma once

#include "numbers.h"

#ifdef CLOZE_HALVES

namespace {

constexpr int64_t SIXTEEN = 16;

inline __m512 load_sixteen(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load_sixteen(const bfloat16* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}

inline void store_sixteen(float* to, __m512 values) { _mm512_storeu_ps(to, values); }
inline void store_sixteen(bfloat16* to, __m512 values) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(values));
}

// e^x, as `exponential` of one number, for x up to 88; NaN stays what it is
inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// GELU to 4.6e-6 for numbers up to 100: x times the normal distribution's share below x, which is a half and an odd
// polynomial up to 4.8, and all beyond
inline __m512 gelu(__m512 x) {
    const __m512 most = _mm512_set1_ps(4.8f);  // comparisons give the second where one is NaN
    const __m512 near = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), most), _mm512_min_ps(most, x));
    const __m512 t = _mm512_fmsub_ps(_mm512_mul_ps(near, near), _mm512_set1_ps(0.08680556f), _mm512_set1_ps(1.0f));
    __m512 p = _mm512_setzero_ps();
    for (const float factor : OF_GELU) p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(factor));
    return _mm512_mul_ps(x, _mm512_fmadd_ps(near, p, _mm512_set1_ps(0.5f)));
}

inline __m512i scramble(__m512i x) {
    const auto mix = [](__m512i value, int bits) {
        return _mm512_xor_si512(value, _mm512_srl_epi32(value, _mm_cvtsi32_si128(bits)));
    };
    x = _mm512_mullo_epi32(mix(x, 16), _mm512_set1_epi32(0x7FEB352D));
    x = _mm512_mullo_epi32(mix(x, 15), _mm512_set1_epi32(int32_t(0x846CA68Bu)));
    return mix(x, 16);
}

// Applies dropout to the values of sixteen columns.
inline __m512 drop_sixteen(__m512 values, const Dropout& dropout, uint32_t key, uint32_t column) {
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i columns = _mm512_add_epi32(_mm512_set1_epi32(int32_t(column)), steps);
    const __m512i mixed = _mm512_mullo_epi32(columns, _mm512_set1_epi32(int32_t(0x9E3779B9u)));
    const __m512i hashes = scramble(_mm512_add_epi32(mixed, _mm512_set1_epi32(int32_t(key))));
    const __mmask16 keeps = _mm512_cmpge_epu32_mask(hashes, _mm512_set1_epi32(int32_t(dropout.threshold)));
    // multiplied, so that NaN stays what it is where it is dropped too
    return _mm512_mul_ps(values, _mm512_maskz_mov_ps(keeps, _mm512_set1_ps(dropout.scale)));
}

}  // namespace

#endif

namespace {

// row = x + bias; returns the largest
template <class T>
inline float add_bias_row(const T* x, const T* bias, float* row, int64_t width) {
    float largest = -INFINITY;
    int64_t j = 0;
#ifdef CLOZE_HALVES
    __m512 highest = _mm512_set1_ps(-INFINITY);
    for (; j + SIXTEEN <= width; j += SIXTEEN) {
        const __m512 sum = _mm512_add_ps(load_sixteen(x + j), load_sixteen(bias + j));
        store_sixteen(row + j, sum);
        highest = _mm512_max_ps(sum, highest);
    }
    largest = _mm512_reduce_max_ps(highest);
#endif
#pragma omp simd reduction(max : largest)
    for (int64_t k = j; k < width; ++k) {
        row[k] = load(x[k]) + load(bias[k]);
        largest = row[k] > largest ? row[k] : largest;
    }
    return largest;
}

// A row of numbers becomes e^(number - largest); returns the sum.
inline float raise_row(float* row, int64_t width, float largest) {
    float sum = 0;
    int64_t j = 0;
#ifdef CLOZE_HALVES
    __m512 sums = _mm512_setzero_ps();
    for (; j + SIXTEEN <= width; j += SIXTEEN) {
        const __m512 raised = exponential(_mm512_sub_ps(load_sixteen(row + j), _mm512_set1_ps(largest)));
        store_sixteen(row + j, raised);
        sums = _mm512_add_ps(sums, raised);
    }
    sum = _mm512_reduce_add_ps(sums);
#endif
    for (; j < width; ++j) sum += row[j] = exponential(row[j] - largest);
    return sum;
}

// to = row * factor
template <class T>
inline void store_row(const float* row, float factor, T* to, int64_t width) {
    int64_t j = 0;
#ifdef CLOZE_HALVES
    for (; j + SIXTEEN <= width; j += SIXTEEN)
        store_sixteen(to + j, _mm512_mul_ps(load_sixteen(row + j), _mm512_set1_ps(factor)));
#endif
    for (; j < width; ++j) store(to[j], row[j] * factor);
}

}  // namespace
