// cuBLASLt behind two calls: what algorithms it has for a Gemm, and run one. Formulas and shapes: gemm.h.
#pragma once
#include <ATen/core/Tensor.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/gemm.h"

namespace megacore::cuda {

// What a call needs on one stream of one device. The workspace belongs to the stream, since two products at once may
// not share one: 32 MiB from compute capability 9.0 on, 4 MiB before (NVIDIA's advice for cublasSetWorkspace), and
// 256-byte aligned as cublasLtMatmul asks.
struct Session {
  int device;
  cudaStream_t stream;
  bool capturing;
  cublasLtHandle_t handle;
  at::Tensor workspace;
};

// The session of the current stream of `device`, which must be the current device. Under stream capture the workspace
// is the graph's own, so that a replay never shares one with other work.
Session current_session(const char* op, int device);

// Up to `count` algorithms for `g`, the library's favourite first; none where it has none. Split-K is left out: every
// sum has one order, and no partial sum is rounded to 16 bits. A failure is a RuntimeError that names `op` and the
// problem.
std::vector<cublasLtMatmulAlgo_t> algorithms(const char* op, const Gemm& g, const Session& session, int count);

// Launches `g`; the status is the library's.
cublasStatus_t run(const Gemm& g, const cublasLtMatmulAlgo_t& algorithm, const Session& session);

// "m=3072 n=2048 k=768 A^T lda=768 B ldb=768 ldd=3072 bf16 -> bf16, epilogue gelu_aux_bias"
std::string in_words(const Gemm& g);

void check(cublasStatus_t status, const char* op, const char* call, const Gemm& g);
void check(cudaError_t status, const char* op, const char* call);

}  // namespace megacore::cuda
