// From a tensor's dtype to the storage types of simd.h.
#pragma once
#include <ATen/core/Tensor.h>

#include "cpu/simd.h"

namespace megacore {

// f(T{}) with T = float, double, bf16 or fp16.
template <class F>
void dispatch_storage(at::ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kBFloat16:
      return f(bf16{});
    case at::kHalf:
      return f(fp16{});
    default:
      TORCH_CHECK_VALUE(false, op, ": dtype ", dtype, " is not served; wanted Float, Double, BFloat16 or Half");
  }
}

// The first element (storage offset included); `T` has been chosen by the tensor's own dtype.
template <class T>
T* data(const at::Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

}  // namespace megacore
