// Fused operations of an encoder on a CPU: what lies between the matrix products, each in one pass over memory.
//
// Numbers are stored as float or bfloat16 and computed as float. Rows are divided over OpenMP threads; each result is
// written by one thread, and sums over rows are taken in a fixed order, so that the same input gives the same bits.
//
// Dropout has no generator and no stored mask: whether an element is kept is a hash of (row key, site, column). The row
// key stands for the sequence and the position, so a mask depends neither on the batch around it nor on threads or ranks,
// and the backward pass computes it again.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
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
inline uint32_t scrambled(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

class Dropout {
    uint32_t threshold;  // drop where the hash is below: probability * 2^32
    float scale;         // of what is kept: 1 / (1 - probability)
    uint32_t site;

   public:
    Dropout(double probability, int64_t site)
        : threshold(uint32_t(probability * 4294967296.0)),
          scale(float(1 / (1 - probability))),
          site(scrambled(uint32_t(site) + 0x9E3779B9u)) {}

    bool drops() const { return threshold > 0; }

    // The key of a row at this site.
    uint32_t key(uint32_t row_key) const { return scrambled(row_key ^ site); }

    // 0 or the scale.
    inline float operator()(uint32_t key, uint32_t column) const {
        return scrambled(column * 0x9E3779B9u + key) < threshold ? 0.0f : scale;
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

int threads_for(int64_t rows, int64_t threads) { return int(std::max<int64_t>(1, std::min(rows, threads))); }

int this_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// There may be fewer than were asked for.
int threads_here() {
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
    float* mine() { return sums.data() + this_thread() * width; }
    template <class T>
    void write(T* out, int64_t offset, int64_t count) const {
        for (int64_t j = 0; j < count; ++j) {
            float sum = 0;
            for (size_t start = 0; start < sums.size(); start += width) sum += sums[start + offset + j];
            store(out[j], sum);
        }
    }
};

inline void gelu(float value, float& result, float& slope) {
    float below, density;
    normal(value, below, density);
    result = value * below;
    slope = std::fma(value, density, below);
}

// Both for each bfloat16 there is, the slope in the upper half: looking up is faster than computing.
std::vector<uint32_t> gelu_of_each_bfloat16() {
    std::vector<uint32_t> table(1 << 16);
    for (uint32_t bits = 0; bits < table.size(); ++bits) {
        float result, slope;
        bfloat16 both[2];
        gelu(bits_to_float(bits << 16), result, slope);
        store(both[0], result);
        store(both[1], slope);
        table[bits] = both[0].bits | uint32_t(both[1].bits) << 16;
    }
    return table;
}

inline void gelu_row(float* x, const float* bias, float* out, int64_t width) {
    for (int64_t j = 0; j < width; ++j) gelu(x[j] + bias[j], out[j], x[j]);
}

inline void gelu_row(bfloat16* x, const bfloat16* bias, bfloat16* out, int64_t width) {
    static const std::vector<uint32_t> table = gelu_of_each_bfloat16();
    const uint32_t* entries = table.data();
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
        bfloat16 value;
        store(value, load(x[j]) + load(bias[j]));
        const uint32_t entry = entries[value.bits];
        out[j].bits = uint16_t(entry);
        x[j].bits = uint16_t(entry >> 16);
    }
}

// out = gelu(x + bias); x becomes the slope there, which is all that the backward pass needs
template <class T>
void gelu_forward(T* x, const T* bias, T* out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) gelu_row(x + i * width, bias, out + i * width, width);
}

// grad_x, and grad_bias = its sum over rows
template <class T>
void gelu_backward(const T* grad, const T* slope, T* grad_x, T* grad_bias, int64_t rows, int64_t width,
                   int64_t threads) {
    threads = threads_for(rows, threads);
    ColumnSums sums(threads, width);
#pragma omp parallel num_threads(threads)
    {
        float* sum = sums.mine();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < width; ++j) {
                float result = load(grad[i * width + j]) * load(slope[i * width + j]);
                store(grad_x[i * width + j], result);
                sum[j] += result;
            }
    }
    sums.write(grad_bias, 0, width);
}

// x becomes residual + dropout(x + bias); out = its layer norm
template <class T>
void norm_forward(T* x, const T* bias, const T* residual, const T* weight, const T* shift, const uint32_t* keys,
                  int64_t site, double probability, double epsilon, T* out, float* means, float* scales, int64_t rows,
                  int64_t width, int64_t threads) {
#pragma omp parallel num_threads(threads_for(rows, threads))
    {
        const Dropout dropout(probability, site);
        std::vector<float> row(width);
        float* sum = row.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            T* xi = x + i * width;
            const T* ri = residual + i * width;
            if (dropout.drops()) {
                const uint32_t key = dropout.key(keys[i]);
#pragma omp simd
                for (int64_t j = 0; j < width; ++j)
                    store(xi[j], load(ri[j]) + (load(xi[j]) + load(bias[j])) * dropout(key, uint32_t(j)));
            } else
                for (int64_t j = 0; j < width; ++j) store(xi[j], load(ri[j]) + load(xi[j]) + load(bias[j]));
            float mean = 0, variance = 0;
            for (int64_t j = 0; j < width; ++j) mean += sum[j] = load(xi[j]);
            mean /= float(width);
            for (int64_t j = 0; j < width; ++j) variance += (sum[j] - mean) * (sum[j] - mean);
            float scale = 1.0f / std::sqrt(variance / float(width) + float(epsilon));
            for (int64_t j = 0; j < width; ++j)
                store(out[i * width + j], std::fma((sum[j] - mean) * scale, load(weight[j]), load(shift[j])));
            means[i] = mean;
            scales[i] = scale;
        }
    }
}

// From the gradient of the norm: that of the residual, of x (through dropout), and the sums for weight, shift and bias
template <class T>
void norm_backward(const T* grad, const T* sum, const float* means, const float* scales, const T* weight,
                   const uint32_t* keys, int64_t site, double probability, T* grad_residual, T* grad_x,
                   T* grad_weight, T* grad_shift, T* grad_bias, int64_t rows, int64_t width, int64_t threads) {
    threads = threads_for(rows, threads);
    ColumnSums sums(threads, 3 * width);
#pragma omp parallel num_threads(threads)
    {
        const Dropout dropout(probability, site);
        float *to_weight = sums.mine(), *to_shift = to_weight + width, *to_bias = to_shift + width;
        std::vector<float> buffer(2 * width);
        float *normed = buffer.data(), *inner = normed + width;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t at = i * width;
            float mean = means[i], scale = scales[i], first = 0, second = 0;
#pragma omp simd reduction(+ : first, second)
            for (int64_t j = 0; j < width; ++j) {
                float g = load(grad[at + j]);
                normed[j] = (load(sum[at + j]) - mean) * scale;
                inner[j] = g * load(weight[j]);
                first += inner[j];
                second += inner[j] * normed[j];
                to_weight[j] += g * normed[j];
                to_shift[j] += g;
            }
            first /= float(width);
            second /= float(width);
            for (int64_t j = 0; j < width; ++j) inner[j] = scale * (inner[j] - first - normed[j] * second);
            for (int64_t j = 0; j < width; ++j) store(grad_residual[at + j], inner[j]);
            if (dropout.drops()) {
                const uint32_t key = dropout.key(keys[i]);
#pragma omp simd
                for (int64_t j = 0; j < width; ++j) inner[j] *= dropout(key, uint32_t(j));
            }
            for (int64_t j = 0; j < width; ++j) {
                store(grad_x[at + j], inner[j]);
                to_bias[j] += inner[j];
            }
        }
    }
    sums.write(grad_weight, 0, width);
    sums.write(grad_shift, width, width);
    sums.write(grad_bias, 2 * width, width);
}

// out = dropout(x); also its own backward pass
template <class T>
void dropout_rows(const T* x, const uint32_t* keys, int64_t site, double probability, T* out, int64_t rows,
                  int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows, threads)) schedule(static)
    for (int64_t i = 0; i < rows; ++i) {
        const Dropout dropout(probability, site);
        const uint32_t key = dropout.key(keys[i]);
#pragma omp simd
        for (int64_t j = 0; j < width; ++j)
            store(out[i * width + j], load(x[i * width + j]) * dropout(key, uint32_t(j)));
    }
}

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

// scores (sequences, heads, length, length) become softmax(scale * scores) over each sequence's own pieces;
// dropped = dropout of it
template <class T>
void softmax_forward(T* scores, const int32_t* starts, const int32_t* lengths, const uint32_t* keys, int64_t site,
                     double probability, double scale, T* dropped, int64_t sequences, int64_t heads, int64_t length,
                     int64_t threads) {
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
                T* to = scores + (b * length + i) * length;
                T* also = dropped + (b * length + i) * length;
                float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
                for (int64_t j = 0; j < n; ++j) {
                    row[j] = factor * load(to[j]);
                    largest = row[j] > largest ? row[j] : largest;
                }
                for (int64_t j = 0; j < n; ++j) sum += row[j] = exponential(row[j] - largest);
                const float share = 1.0f / sum;
                for (int64_t j = 0; j < n; ++j) store(to[j], row[j] *= share);
                if (dropout.drops()) {
                    const uint32_t key = dropout.key(keys[starts[s] + i]);
#pragma omp simd
                    for (int64_t j = 0; j < n; ++j) store(also[j], row[j] * dropout(key, head | uint32_t(j)));
                    std::memset(also + n, 0, (length - n) * sizeof(T));
                }
                std::memset(to + n, 0, (length - n) * sizeof(T));
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
                  double probability, T* dropped, int64_t sequences, int64_t heads, int64_t length, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(sequences* heads, threads)) schedule(static)
    for (int64_t b = 0; b < sequences * heads; ++b) {
        const Dropout dropout(probability, site);
        const int64_t s = b / heads, n = lengths[s];
        const uint32_t head = uint32_t(b % heads) << 16;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = (b * length + i) * length;
            const uint32_t key = dropout.key(keys[starts[s] + i]);
#pragma omp simd
            for (int64_t j = 0; j < n; ++j)
                store(dropped[at + j], load(shares[at + j]) * dropout(key, head | uint32_t(j)));
            std::memset(dropped + at + n, 0, (length - n) * sizeof(T));
        }
        std::memset(dropped + (b * length + n) * length, 0, (length - n) * length * sizeof(T));
    }
}

// grad (of what was kept) becomes the gradient of the scores
template <class T>
void softmax_backward(T* grad, const T* shares, const T* dropped, const int32_t* lengths, double scale,
                      int64_t sequences, int64_t heads, int64_t length, int64_t threads) {
    const float factor = float(scale);
#pragma omp parallel for num_threads(threads_for(sequences* heads, threads)) schedule(static)
    for (int64_t b = 0; b < sequences * heads; ++b) {
        const int64_t n = lengths[b / heads];
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = (b * length + i) * length;
            float inner = 0;
            for (int64_t j = 0; j < n; ++j) inner += load(dropped[at + j]) * load(grad[at + j]);
            for (int64_t j = 0; j < n; ++j)
                store(grad[at + j], factor * (load(dropped[at + j]) * load(grad[at + j]) - load(shares[at + j]) * inner));
            std::memset(grad + at + n, 0, (length - n) * sizeof(T));
        }
        std::memset(grad + (b * length + n) * length, 0, (length - n) * length * sizeof(T));
    }
}

// logits (rows, stride) become softmax - one-hot over the first `width` columns, zero in the others
template <class T>
void cross_entropy(T* logits, const T* bias, const int64_t* labels, float* losses, uint8_t* correct, int64_t rows,
                   int64_t width, int64_t stride, int64_t threads) {
#pragma omp parallel num_threads(threads_for(rows, threads))
    {
        std::vector<float> buffer(width);
        float* row = buffer.data();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; ++i) {
            T* to = logits + i * stride;
            float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
            for (int64_t j = 0; j < width; ++j) {
                row[j] = load(to[j]) + load(bias[j]);
                largest = row[j] > largest ? row[j] : largest;
            }
            const float right = row[labels[i]];  // an answer only if no equal comes before it
            correct[i] = right == largest && std::find(row, row + labels[i], right) == row + labels[i];
            for (int64_t j = 0; j < width; ++j) sum += row[j] = exponential(row[j] - largest);
            losses[i] = std::log(sum) + largest - right;
            const float share = 1.0f / sum;
            row[labels[i]] -= sum;
            for (int64_t j = 0; j < width; ++j) store(to[j], row[j] * share);
            std::memset(to + width, 0, (stride - width) * sizeof(T));
        }
    }
}

// A stretch of a parameter. Moves Adam's moments, and puts the update with decay where the gradient was. squares: the sums
// of weight^2 and update^2, over blocks of a fixed size, so that the number of threads does not matter. Where `move` is not
// 0, the squares are those of a whole parameter, and its weights move by `move` times the trust ratio at once: backwards,
// from what is still in the cache.
void lamb_stretch(float* weight, float* gradient, float* first, float* second, double* squares, int64_t count,
                 double beta1, double beta2, double correction1, double correction2, double epsilon, double decay,
                  double scale, double move, double smallest, double largest, int64_t threads) {
    constexpr int64_t block = 1 << 14, few = 512;  // few enough to add up as float
    const int64_t blocks = (count + block - 1) / block;
    const float keep1 = float(1 - beta1), keep2 = float(1 - beta2), forget2 = float(beta2);
    const float inverse1 = float(1 / correction1), root2 = float(1 / std::sqrt(correction2));
    const float added = float(epsilon), decayed = float(decay), factor = float(scale);
    std::vector<double> sums(2 * blocks);
    float amount = 0;
#pragma omp parallel num_threads(threads_for(blocks, threads))
    {
        const int64_t from = blocks * this_thread() / threads_here(), to = blocks * (this_thread() + 1) / threads_here();
        for (int64_t index = from; index < to; ++index) {
            const int64_t end = std::min(count, (index + 1) * block);
            for (int64_t begin = index * block; begin < end; begin += few) {
                const int64_t stop = std::min(end, begin + few);
                float weights = 0, updates = 0;
#pragma omp simd reduction(+ : weights, updates)
                for (int64_t i = begin; i < stop; ++i) {
                    const float grad = gradient[i] * factor;
                    const float mean = first[i] + keep1 * (grad - first[i]);
                    const float power = forget2 * second[i] + keep2 * grad * grad;
                    const float update = mean * inverse1 / (std::sqrt(power) * root2 + added) + decayed * weight[i];
                    first[i] = mean;
                    second[i] = power;
                    gradient[i] = update;
                    weights += weight[i] * weight[i];
                    updates += update * update;
                }
                sums[2 * index] += weights;
                sums[2 * index + 1] += updates;
            }
        }
#pragma omp barrier
#pragma omp single
        {
            squares[0] = squares[1] = 0;
            for (int64_t index = 0; index < blocks; ++index) {
                squares[0] += sums[2 * index];
                squares[1] += sums[2 * index + 1];
            }
            const bool known = squares[0] > 0 && squares[1] > 0;
            const double ratio = known ? std::min(std::max(std::sqrt(squares[0] / squares[1]), smallest), largest) : 1;
            amount = float(move * ratio);
        }
        if (amount != 0)
            for (int64_t index = to - 1; index >= from; --index) {
                const int64_t end = std::min(count, (index + 1) * block);
#pragma omp simd
                for (int64_t i = index * block; i < end; ++i) weight[i] += amount * gradient[i];
            }
    }
}

// All stretches of a flat tensor, each (offset, length, whether it is a whole parameter); those that are not move only if
// `all_move`.
void lamb_update(float* weight, float* gradient, float* first, float* second, double* squares, const int64_t* stretches,
                 int64_t count, double beta1, double beta2, double correction1, double correction2, double epsilon,
                 double decay, double scale, double move, double smallest, double largest, int64_t all_move,
                 int64_t threads) {
    for (int64_t index = 0; index < count; ++index) {
        const int64_t at = stretches[3 * index], length = stretches[3 * index + 1];
        const bool moves = all_move || stretches[3 * index + 2];
        lamb_stretch(weight + at, gradient + at, first + at, second + at, squares + 2 * index, length, beta1, beta2,
                     correction1, correction2, epsilon, decay, scale, moves ? move : 0, smallest, largest, threads);
    }
}

struct Kernel {
    const char* name;
    void* function;
};

#define KERNEL(name, T, suffix) {#name "_" suffix, reinterpret_cast<void*>(name<T>)}
#define KERNELS_OF(T, suffix)                                                                                        \
    KERNEL(gelu_forward, T, suffix), KERNEL(gelu_backward, T, suffix), KERNEL(norm_forward, T, suffix),               \
        KERNEL(norm_backward, T, suffix), KERNEL(dropout_rows, T, suffix), KERNEL(split_heads, T, suffix),            \
        KERNEL(merge_heads, T, suffix), KERNEL(softmax_forward, T, suffix), KERNEL(redo_dropout, T, suffix),          \
        KERNEL(softmax_backward, T, suffix), KERNEL(cross_entropy, T, suffix)

}  // namespace

// Every parameter is a pointer, an int64_t or a double, so that a caller needs no list of types.
extern "C" const Kernel kernels[] = {KERNELS_OF(float, "float32"), KERNELS_OF(bfloat16, "bfloat16"),
                                  {"lamb_update_float32", reinterpret_cast<void*>(lamb_update)}, {nullptr, nullptr}};
