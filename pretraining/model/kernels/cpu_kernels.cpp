// Fused operations of an encoder on a CPU: what lies between the matrix products, each in one pass over memory.
//
// Numbers are stored as float or bfloat16 and computed as float. Rows are divided over OpenMP threads; each result is
// written by one thread, and sums over rows are taken in a fixed order, so that the same input gives the same bits.
// This file lists the operations, for cpu_kernels.py to find them by name.

#include "adam.h"
#include "answers.h"
#include "attention.h"
#include "attention_by_heads.h"
#include "elementwise.h"
#include "gradients.h"
#include "lamb.h"
#include "loss.h"
#include "quantised.h"
#include "turning.h"

namespace {

struct Kernel {
    const char* name;
    void* function;
};

#define KERNEL(name, T, suffix) {#name "_" suffix, reinterpret_cast<void*>(name<T>)}
#define KERNELS_OF(T, suffix)                                                                                        \
    KERNEL(gelu_forward, T, suffix), KERNEL(gelu_tanh_forward, T, suffix), KERNEL(gelu_backward, T, suffix),          \
        KERNEL(geglu_forward, T, suffix), KERNEL(geglu_backward, T, suffix), KERNEL(rotate, T, suffix),               \
        KERNEL(norm_forward, T, suffix),                                                                              \
        KERNEL(norm_backward, T, suffix), KERNEL(dropout_rows, T, suffix), KERNEL(split_heads, T, suffix),            \
        KERNEL(merge_heads, T, suffix), KERNEL(softmax_forward, T, suffix), KERNEL(redo_dropout, T, suffix),          \
        KERNEL(softmax_backward, T, suffix), KERNEL(cross_entropy, T, suffix), KERNEL(add_gradient, T, suffix),       \
        KERNEL(add_fixed, T, suffix), KERNEL(adamw, T, suffix),                                                       \
        KERNEL(quantise_rows, T, suffix), KERNEL(rescale_rows, T, suffix)

}  // namespace

// Every parameter is a pointer, an int64_t or a double, so that a caller needs no list of types.
extern "C" const Kernel kernels[] = {KERNELS_OF(float, "float32"), KERNELS_OF(bfloat16, "bfloat16"),
                                  {"lamb_update_float32", reinterpret_cast<void*>(lamb_update)},
                                  {"lamb_blocks_float32", reinterpret_cast<void*>(lamb_blocks)},
                                  {"lamb_move_float32", reinterpret_cast<void*>(lamb_move)},
                                  {"add_squares_float32", reinterpret_cast<void*>(add_squares)},
                                  {"add_block_squares_float32", reinterpret_cast<void*>(add_block_squares)},
                                  {"take_fixed_float32", reinterpret_cast<void*>(take_fixed)},
#if defined(__AVX512F__)  // sums of as many lanes round alike
                                  {"vectors_of_512", reinterpret_cast<void*>(add_squares)},
#elif defined(__AVX2__)
                                  {"vectors_of_256", reinterpret_cast<void*>(add_squares)},
#endif
                                  {"turn_bfloat16", reinterpret_cast<void*>(turn)},
                                  {"answer_float32", reinterpret_cast<void*>(answer<Floats>)},
                                  {"pack_floats_float32", reinterpret_cast<void*>(pack_floats)},
#ifdef CLOZE_HALVES
                                  {"answer_in_halves_float32", reinterpret_cast<void*>(answer<Halves>)},
                                  {"pack_halves_bfloat16", reinterpret_cast<void*>(pack_halves)},
                                  {"attention_by_lanes_bfloat16", reinterpret_cast<void*>(attention<Lanes>)},
                                  {"attention_by_lanes_backward_bfloat16",
                                   reinterpret_cast<void*>(attention_backward<Lanes>)},
#endif
#ifdef CLOZE_BYTES
                                  {"answer_in_bytes_float32", reinterpret_cast<void*>(answer<Bytes>)},
                                  {"pack_bytes_float32", reinterpret_cast<void*>(pack_bytes)},
#endif
#ifdef CLOZE_TILES
                                  {"attention_by_tiles_bfloat16", reinterpret_cast<void*>(attention<Tiles>)},
                                  {"attention_by_tiles_backward_bfloat16",
                                   reinterpret_cast<void*>(attention_backward<Tiles>)},
#endif
                                  {nullptr, nullptr}};
