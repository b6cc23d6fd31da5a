// A step of LAMB on the stretches of a flat tensor.

#pragma once

#include "adam.h"

namespace {

// A few weights, beginning with the first given. Moves Adam's moments, puts the update with decay where the gradient was,
// and adds weight^2 and update^2 to two sums.
inline void lamb_few(float* weight, float* gradient, float* first, float* second, double* sums, int64_t count,
                     const Adam& adam, float decayed, float factor) {
    float weights = 0, updates = 0;
#pragma omp simd reduction(+ : weights, updates)
    for (int64_t i = 0; i < count; ++i) {
        const float update = adam(gradient[i] * factor, first[i], second[i]) + decayed * weight[i];
        gradient[i] = update;
        weights += weight[i] * weight[i];
        updates += update * update;
    }
    sums[0] += weights;
    sums[1] += updates;
}

constexpr int64_t few = 512;  // few enough to add up as float

// A stretch of a parameter. Moves Adam's moments, and puts the update with decay where the gradient was. squares: the sums
// of weight^2 and update^2, over blocks of a fixed size, so that the number of threads does not matter. Where `move` is not
// 0, the squares are those of a whole parameter, and its weights move by `move` times the trust ratio at once: backwards,
// from what is still in the cache.
void lamb_stretch(float* weight, float* gradient, float* first, float* second, double* squares, int64_t count,
                 double beta1, double beta2, double correction1, double correction2, double epsilon, double decay,
                  double scale, double move, bool adapts, int64_t threads) {
    constexpr int64_t block = 1 << 14;
    const int64_t blocks = (count + block - 1) / block;
    const Adam adam(beta1, beta2, correction1, correction2, epsilon);
    const float decayed = float(decay), factor = float(scale);
    std::vector<double> sums(2 * blocks);
    float amount = 0;
#pragma omp parallel num_threads(limit_threads(blocks, threads))
    {
        const int64_t from = blocks * find_thread() / count_threads(), to = blocks * (find_thread() + 1) / count_threads();
        for (int64_t index = from; index < to; ++index) {
            const int64_t end = std::min(count, (index + 1) * block);
            for (int64_t at = index * block; at < end; at += few)
                lamb_few(weight + at, gradient + at, first + at, second + at, sums.data() + 2 * index,
                         std::min(few, end - at), adam, decayed, factor);
        }
#pragma omp barrier
#pragma omp single
        {
            squares[0] = squares[1] = 0;
            for (int64_t index = 0; index < blocks; ++index) {
                squares[0] += sums[2 * index];
                squares[1] += sums[2 * index + 1];
            }
            const bool known = adapts && squares[0] > 0 && squares[1] > 0;
            amount = float(move * (known ? std::sqrt(squares[0] / squares[1]) : 1));
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
                 double decay, double scale, double move, int64_t adapts, int64_t threads) {
    for (int64_t index = 0; index < count; ++index) {
        const int64_t at = stretches[3 * index], length = stretches[3 * index + 1];
        const bool moves = !adapts || stretches[3 * index + 2];
        lamb_stretch(weight + at, gradient + at, first + at, second + at, squares + 2 * index, length, beta1, beta2,
                     correction1, correction2, epsilon, decay, scale, moves ? move : 0, adapts, threads);
    }
}

// Blocks of parameters, each (offset, length, -): as above, but weights stay, and the squares are those of each block.
void lamb_blocks(float* weight, float* gradient, float* first, float* second, double* squares, const int64_t* blocks,
                 int64_t count, double beta1, double beta2, double correction1, double correction2, double epsilon,
                 double decay, double scale, int64_t threads) {
    const Adam adam(beta1, beta2, correction1, correction2, epsilon);
#pragma omp parallel for num_threads(limit_threads(count, threads)) schedule(static)
    for (int64_t index = 0; index < count; ++index) {
        squares[2 * index] = squares[2 * index + 1] = 0;
        for (int64_t begin = 0; begin < blocks[3 * index + 1]; begin += few) {
            const int64_t at = blocks[3 * index] + begin;
            lamb_few(weight + at, gradient + at, first + at, second + at, squares + 2 * index,
                     std::min(few, blocks[3 * index + 1] - begin), adam, float(decay), float(scale));
        }
    }
}

// Moves the weights of such blocks by their updates, each block times an amount of its own.
void lamb_move(float* weight, const float* update, const int64_t* blocks, const double* amounts, int64_t count,
               int64_t threads) {
#pragma omp parallel for num_threads(limit_threads(count, threads)) schedule(static)
    for (int64_t index = 0; index < count; ++index) {
        const float amount = float(amounts[index]);
        const int64_t begin = blocks[3 * index], end = begin + blocks[3 * index + 1];
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) weight[i] += amount * update[i];
    }
}

}  // namespace
