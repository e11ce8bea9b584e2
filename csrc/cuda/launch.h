// The elementwise kernels of the linear family, as host code calls them: pointers, int64 sizes, a stream. No torch.
//
//   M rows, N columns of y, parts = 2 for swiglu, else 1; T the storage type, A = float, double for double.
//   pre [M, parts * N] contiguous: swiglu's gate columns come first, then its up columns.
//   Arithmetic in A. Every 16 bytes are one access where addresses, N and strides allow it, else elements one by one,
//   with the same bits. No atomics: a result depends on shapes and values only.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/kinds.h"

namespace megacore::cuda {

// pre += bias (where bias is given; written back), y = activation(pre). Reads M * parts * N elements, writes M * N, and
// with a bias M * parts * N more. y is null for `none`.
struct ForwardPass {
  void* pre;
  const void* bias;  // [parts * N] or null
  void* y;           // [M, N] or null
  int64_t rows, columns;
};
cudaError_t launch_forward(Activation, Storage, const ForwardPass&, cudaStream_t);

// dpre = dy * activation'(pre); dbias = sum of dpre over its rows, before dpre is rounded, where dbias is given.
// `none` writes no dpre: it is the bias gradient alone, of dy. Sums: rows of a block of rows in A, blocks in double, in
// an order that (M, N, T) alone decide. dpre may be dy itself, where the strides agree.
struct BackwardPass {
  const void* dy;     // [M, N], the rows dy_stride elements apart: 0 is one row for all
  int64_t dy_stride;  //
  const void* pre;    // [M, parts * N]; null for `none`
  void* dpre;         // [M, parts * N]; null for `none`
  void* dbias;        // [parts * N] or null
  void* scratch;      // backward_scratch bytes, 16-byte aligned; null without dbias
  int64_t rows, columns;
};
int64_t backward_scratch(Activation, Storage, int64_t rows, int64_t columns);
cudaError_t launch_backward(Activation, Storage, const BackwardPass&, cudaStream_t);

}  // namespace megacore::cuda
