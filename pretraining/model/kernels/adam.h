// A step of Adam on flat tensors.

#pragma once

#include "sixteen.h"

namespace {

// Moves the moments of one weight, and returns the update that they make.
class Adam {
    const float keep1, keep2, forget2, inverse1, root2, epsilon;

   public:
    Adam(double beta1, double beta2, double correction1, double correction2, double epsilon)
        : keep1(float(1 - beta1)),
          keep2(float(1 - beta2)),
          forget2(float(beta2)),
          inverse1(float(1 / correction1)),
          root2(float(1 / std::sqrt(correction2))),
          epsilon(float(epsilon)) {}

    inline float operator()(float gradient, float& first, float& second) const {
        const float mean = std::fma(keep1, gradient - first, first);
        const float power = std::fma(keep2 * gradient, gradient, forget2 * second);
        first = mean;
        second = power;
        return mean * inverse1 / std::fma(std::sqrt(power), root2, epsilon);
    }
};

// Moves weights by Adam with decoupled decay: they are multiplied by `kept`, and the update by `rate`. `rounded` has them
// afterwards in its own type, while they are in the cache. It may be `weight` itself.
template <class T>
void adamw(T* rounded, float* weight, const float* gradient, float* first, float* second, int64_t count, double beta1,
           double beta2, double correction1, double correction2, double epsilon, double scale, double kept, double rate,
           int64_t threads) {
    constexpr int64_t block = 1 << 10;
    const int64_t blocks = (count + block - 1) / block;
    const Adam adam(beta1, beta2, correction1, correction2, epsilon);
    const float factor = float(scale), left = float(kept), step = float(rate);
#pragma omp parallel for num_threads(limit_threads(blocks, threads)) schedule(static)
    for (int64_t index = 0; index < blocks; ++index) {
        const int64_t begin = index * block, end = std::min(count, begin + block);
#pragma omp simd
        for (int64_t i = begin; i < end; ++i)
            weight[i] = std::fma(-step, adam(gradient[i] * factor, first[i], second[i]), left * weight[i]);
        store_row(weight + begin, 1.0f, rounded + begin, end - begin);
    }
}

}  // namespace
