// Matrix products of 16-bit numbers on a CPU without arithmetic of them (native.h): panels are widened into fp32
// scratch and multiplied by the library's fp32 GEMM; what is stored is rounded once.
//
// The scratch is bounded: at most 16 MB of rows of `a` and 8 MB of `b` unless 128 rows or 64 columns alone are more,
// and their product. Panels have one layout whatever that of the arguments is, so a view gives the bits of its copy,
// and costs none.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace megacore {

// c [h, w] fp32 holds rows `row`.. and columns `col`.. of the product; c is overwritten after the call.
using Consume = c10::function_ref<void(const at::Tensor& c, int64_t row, int64_t col)>;

// a [M, K] b^T, b [halves * F, K]: c [h, halves * w] has columns col.. of each half of the product, side by side.
void widened_abt(const at::Tensor& a, const at::Tensor& b, int64_t halves, Consume consume);

// a [M, K] b, b [K, N].
void widened_ab(const at::Tensor& a, const at::Tensor& b, Consume consume);

// out [N, K] fp32 += a^T b, a [M, N], b [M, K].
void add_widened_atb(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

}  // namespace megacore
