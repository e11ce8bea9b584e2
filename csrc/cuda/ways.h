// Runs a product in the fastest of several ways. The rules: choice.h.
#pragma once
#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "cuda/choice.h"

namespace megacore::cuda {

// One way to compute an operator: a product, then perhaps a kernel. Every way writes the same outputs.
struct Way {
  Rank rank;
  Gemm gemm;
  std::function<cudaError_t(cudaStream_t)> after;  // null: the product is all
};

// Runs one of `ways` on the current stream of `device` (the current device). In mode `measured` the first call of a
// problem times the top algorithms of each, five rounds in turn after one to warm up, with the caller's own data, and
// waits for the GPU; where a product adds to its output the timing adds to a copy (as much memory, for that call).
// Errors: RuntimeError that names `op` and the problem.
void run_fastest(const char* op, int device, const std::vector<Way>& ways);

// "measured" (the default), "first" or "unfused", for the whole process; ValueError for another name.
void set_linear_mode(const std::string& name);
// What was chosen so far, a line each: operator, way, problem, times.
std::string linear_choices();

}  // namespace megacore::cuda
