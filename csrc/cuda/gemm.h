// The three products of a linear layer in the library's terms. Pure C++: tests/cuda_on_cpu runs it with plain loops.
//
// cuBLASLt stores by columns. A row-major [R, C] with row stride ld is, to it, the column-major [C, R] with that ld. So
// each product is written down transposed, and no tensor is copied to be transposed:
//   y  [M, N] = x W^T        ->  y^T  [N, M] = W      x^T
//   dx [M, K] = dpre W       ->  dx^T [K, M] = W^T    dpre^T
//   dW [N, K] = dpre^T x     ->  dW^T [K, N] = x^T    dpre
#pragma once
#include <cstdint>

#include "cuda/kinds.h"

namespace megacore::cuda {

// A matrix [rows, cols] of a tensor: the rows lie ld elements apart, or the columns where it is not row_major.
struct Matrix {
  const void* data;
  int64_t rows, cols, ld;
  bool row_major;
};

// A factor as stored, [rows, cols] by columns; the product takes its transpose where `transposed`.
struct Side {
  const void* data;
  int64_t rows, cols, ld;
  bool transposed;
};

// What the library does to op(A) op(B) before it stores D. `aux` is the pre-activation [m, n]: written by gelu_*, read
// by dgelu*. GELU is the tanh form. Nothing else is stored before the activation.
enum class Epilogue {
  none,
  bias,           // D = v + bias[m]
  gelu_aux,       // aux = v; D = gelu(v)
  gelu_aux_bias,  // aux = v + bias[m]; D = gelu(aux)
  dgelu,          // D = v * gelu'(aux)
  dgelu_bgrad,    // the same, and bias_grad[m] = sum of D over its columns
  bgradb          // D = v, and bias_grad[n] = sum of op(B) over k
};

// D [m, n] by columns = op(A) [m, k] op(B) [k, n], + D where `accumulate`. Sums in fp32 (fp64 for f64).
struct Gemm {
  int64_t m, n, k;
  Side a, b;
  void* d;
  int64_t ldd;
  Storage in, out;
  bool accumulate = false;
  bool tf32 = false;  // fp32 factors may be rounded to 10 bits, as torch.backends.cuda.matmul.allow_tf32 says
  Epilogue epilogue = Epilogue::none;
  const void* bias = nullptr;
  void* bias_grad = nullptr;
  void* aux = nullptr;
  int64_t aux_ld = 0;
};

inline Side as_is(const Matrix& t) {
  return t.row_major ? Side{t.data, t.cols, t.rows, t.ld, true} : Side{t.data, t.rows, t.cols, t.ld, false};
}
inline Side flipped(const Matrix& t) {
  return t.row_major ? Side{t.data, t.cols, t.rows, t.ld, false} : Side{t.data, t.rows, t.cols, t.ld, true};
}

// x [M, K], w [N, K] -> y [M, N] contiguous.
inline Gemm forward_gemm(const Matrix& x, const Matrix& w, void* y, Storage s) {
  return {w.rows, x.rows, x.cols, as_is(w), flipped(x), y, w.rows, s, s};
}
// dpre [M, N], w [N, K] -> dx [M, K] contiguous.
inline Gemm dgrad_gemm(const Matrix& dpre, const Matrix& w, void* dx, Storage s) {
  return {w.cols, dpre.rows, w.rows, flipped(w), flipped(dpre), dx, w.cols, s, s};
}
// dpre [M, N], x [M, K] -> dw [N, K], its rows ld apart, of dtype `out`.
inline Gemm wgrad_gemm(const Matrix& dpre, const Matrix& x, void* dw, int64_t ld, Storage in, Storage out) {
  return {x.cols, dpre.cols, dpre.rows, flipped(x), as_is(dpre), dw, ld, in, out};
}

// The library's rule for the leading dimension of `aux` (cublasLt.h, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD).
inline bool aux_fits(int64_t m, int64_t ld) {
  return ld >= m && ld % 8 == 0;
}

}  // namespace megacore::cuda
