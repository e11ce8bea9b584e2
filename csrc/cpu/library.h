// The library's matrix products for fp32 and wider, and for 16 bits where they are native: MKL behind at::mm, or
// oneDNN.
//
// MKL keeps its AVX-512 kernels to Intel's CPUs. On another CPU that has AVX-512, oneDNN's fp32 product is faster by an
// eighth (Zen 4: 103 of 114 GFLOP/s a core, MKL 91), but not for dW, where it would first transpose both operands. The
// rule depends on the CPU and the sizes alone, so every rank and every run of one machine gets the same bits.
#pragma once
#include <ATen/core/Tensor.h>

namespace megacore {

// True if multiply_abt takes this product [m, k] x [n, k]^T to oneDNN, which adds a bias for nothing.
bool by_onednn(const at::Tensor& a, int64_t n);

// a [M, K] b^T + bias, b [N, K], bias [N] or none; contiguous operands.
at::Tensor multiply_abt(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias);

// a [M, N] b, b [N, K]; contiguous operands.
at::Tensor multiply_ab(const at::Tensor& a, const at::Tensor& b);

}  // namespace megacore
