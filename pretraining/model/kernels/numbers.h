// What all kernels stand on: numbers in memory, the hash of dropout, the exponential, threads and their sums.
//
// Dropout has no generator and no stored mask: whether an element is kept is a hash of (row key, site, column). The row
// key stands for the sequence and the position, so a mask depends neither on the batch around it nor on threads or ranks,
// and the backward pass computes it again.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>
#define CLOZE_HALVES  // the processor multiplies bf16, two at a time in a lane of 512 bits
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(CLOZE_HALVES) && defined(__AVX512BW__)
#define CLOZE_TILES  // the processor multiplies tiles too
#endif

namespace {

struct bfloat16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float load(float value) { return value; }
inline float load(bfloat16 value) { return bits_to_float(uint32_t(value.bits) << 16); }

inline void store(float& place, float value) { place = value; }
inline void store(bfloat16& place, float value) {  // to nearest, ties to even; the infinite and NaN stay what they are
    uint32_t bits = float_to_bits(value);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    place.bits = uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

// Every bit of the result depends on every bit of x (Wellons' lowbias32).
inline uint32_t scramble(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

class Dropout {
    uint32_t site, shift;

   public:
    const uint32_t threshold;  // drop where the hash is below: probability * 2^32
    const float scale;         // of what is kept: 1 / (1 - probability)

    // `site` has in its upper half the number of the first head, where a rank computes some heads of a layer: columns of
    // attention begin with that of their head among all.
    Dropout(double probability, int64_t site)
        : site(scramble(uint32_t(site) + 0x9E3779B9u)),
          shift((uint32_t(site >> 32) << 16) * 0x9E3779B9u),
          threshold(uint32_t(probability * 4294967296.0)),
          scale(float(1 / (1 - probability))) {}

    bool drops() const { return threshold > 0; }

    // The key of a row at this site.
    uint32_t key(uint32_t row_key) const { return scramble(row_key ^ site) + shift; }

    // The factor of an element: 0 where it is dropped, else 1 / (1 - probability).
    inline float operator()(uint32_t key, uint32_t column) const {
        return scramble(column * 0x9E3779B9u + key) < threshold ? 0.0f : scale;
    }
};

// e^x to two units in the last place, in a form that compilers turn into vector instructions.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::nearbyintf(x * 1.44269504f);
    float r = std::fma(n, -0.693359375f, x);
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r + 1.0f);
    return p * bits_to_float(uint32_t(int32_t(n) + 127) << 23);
}

// The normal distribution's share below x, and its density, with one exponential (Abramowitz & Stegun 7.1.26: 1.5e-7).
inline void normal(float x, float& below, float& density) {
    float magnitude = std::fabs(x) * 0.70710678f;
    float bell = exponential(-magnitude * magnitude);
    float t = 1.0f / std::fma(0.3275911f, magnitude, 1.0f);
    float p = 1.061405429f;
    p = std::fma(p, t, -1.453152027f);
    p = std::fma(p, t, 1.421413741f);
    p = std::fma(p, t, -0.284496736f);
    p = std::fma(p, t, 0.254829592f);
    float tail = 0.5f * p * t * bell;
    below = x < 0 ? tail : 1.0f - tail;
    density = 0.39894228f * bell;
}

// Of the polynomial of `gelu`
constexpr float OF_GELU[] = {1.44353491e-03f,  -4.19454216e-03f, 5.39276486e-03f,  -7.44351255e-03f,
                             1.38638038e-02f,  -2.21874589e-02f, 3.07209045e-02f,  -4.05659433e-02f,
                             5.29040907e-02f,  -7.29797585e-02f, 1.47212783e-01f};

int limit_threads(int64_t rows, int64_t threads) { return int(std::max<int64_t>(1, std::min(rows, threads))); }

int find_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// The threads of this parallel region, of which there may be fewer than were asked for.
int count_threads() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

// Each thread's sums over its rows, added up in the order of the threads.
class ColumnSums {
    int64_t width;
    std::vector<float> sums;

   public:
    ColumnSums(int64_t threads, int64_t width) : width(width), sums(threads * width, 0.0f) {}
    float* mine() { return sums.data() + find_thread() * width; }
    template <class T>
    void write(T* out, int64_t offset, int64_t count) const {
        for (int64_t j = 0; j < count; ++j) {
            float sum = 0;
            for (size_t start = 0; start < sums.size(); start += width) sum += sums[start + offset + j];
            store(out[j], sum);
        }
    }
};

}  // namespace
