// fp32 matrix products: our own where the library's is slow, the library's elsewhere.
//
// MKL keeps its AVX-512 kernels to Intel's CPUs. On others that have AVX-512 ours is faster, and oneDNN's is too, but
// oneDNN sums all of K in one chain, with twice MKL's error from K = 256 on. The rule depends on the CPU and the sizes
// alone, so every rank and every run of one machine gets the same bits.
//
// Ours (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008): panels of a and b are
// packed, a tile of c stays in registers. The order of the sums of an element depends on K alone: kChain products in
// one register, then chains, then blocks of kDepth. So the bits depend neither on the layout of the operands, which may
// have any strides and are never copied whole, nor on M, N, or the number of threads.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <optional>

namespace megacore {

// Elements [row .. row + rows) x [column .. column + columns) of the product are complete and near in the cache.
using Done = c10::function_ref<void(int64_t row, int64_t column, int64_t rows, int64_t columns)>;

// Whether a product of this type and size is ours; c must then have rows of neighbouring elements.
bool is_ours(at::ScalarType dtype, int64_t m, int64_t n, int64_t k);

// c [M, N] (+)= a [M, K] b [K, N], fp32, any strides of a and b. `done` runs on the thread that made the elements.
void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, bool add, Done done);
void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, bool add = false);

// a b by whichever serves; where it is the library, operands are copied to be contiguous as `a_t` and `b_t` say
// (transposed or not), because its bits depend on their layout.
at::Tensor product(const at::Tensor& a, bool a_t, const at::Tensor& b, bool b_t);

}  // namespace megacore
