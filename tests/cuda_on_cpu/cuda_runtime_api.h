// Stands in for CUDA's header so that g++ compiles csrc/cuda/*.cu and runs them: a block's threads are fibers that take
// turns at __syncthreads, blocks run one after another. It shows indices, masks, orders of sums and barriers to be
// right; nothing about speed, and nothing that needs two threads at once.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time
#define MEGACORE_LAUNCH(kernel, blocks, threads, stream, ...) \
  cuda_on_cpu::launch(blocks, threads, [&] { (kernel)(__VA_ARGS__); })

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
struct alignas(16) int4 {
  int x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1;
  dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
};
template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
inline dim3 threadIdx, blockIdx, blockDim;

namespace cuda_on_cpu {

inline ucontext_t scheduler, *current;
inline std::function<void()> body;
inline std::vector<char> finished;

inline void fiber(int i) {
  body();
  finished[i] = 1;  // and on to the scheduler, uc_link
}

inline void launch(int64_t blocks, dim3 threads, std::function<void()> kernel) {
  constexpr size_t kStack = 128 << 10;
  const int count = threads.x * threads.y;
  static std::vector<char> stacks(1024 * kStack);
  std::vector<ucontext_t> fibers(count);
  body = kernel;
  blockDim = threads;
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx = dim3(unsigned(b));
    finished.assign(count, 0);
    for (int i = 0; i < count; ++i) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks.data() + i * kStack;
      fibers[i].uc_stack.ss_size = kStack;
      fibers[i].uc_link = &scheduler;
      makecontext(&fibers[i], reinterpret_cast<void (*)()>(fiber), 1, i);
    }
    for (bool any = true; any;) {
      any = false;
      for (int i = 0; i < count; ++i) {
        if (finished[i]) continue;
        any = true;
        threadIdx = dim3(i % threads.x, i / threads.x);
        current = &fibers[i];
        swapcontext(&scheduler, current);
      }
    }
  }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() {
  swapcontext(cuda_on_cpu::current, &cuda_on_cpu::scheduler);
}
