// From tensors to the words of gemm.h and launch.h, and the checks that all CUDA operators of the linear family share.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "check.h"
#include "cuda/gemm.h"

namespace megacore::cuda {

inline Storage storage_of(const char* op, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return Storage::f32;
    case at::kDouble:
      return Storage::f64;
    case at::kBFloat16:
      return Storage::bf16;
    case at::kHalf:
      return Storage::f16;
    default:
      TORCH_CHECK_VALUE(false, op, ": dtype ", t.scalar_type(),
                        " is not served; wanted Float, Double, BFloat16 or Half");
  }
}

inline Activation gelu_named(const char* op, c10::string_view approximate) {
  MEGACORE_CHECK(approximate == "tanh" || approximate == "none", op, "approximate", "'" << approximate << "'",
                 "'tanh' or 'none' (erf)");
  return approximate == "tanh" ? Activation::gelu_tanh : Activation::gelu_erf;
}

// [..., C] -> [R, C]: a view where the strides allow it.
inline at::Tensor as_rows(const at::Tensor& t) {
  if (t.dim() == 2) return t;
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return t.reshape({rows, t.size(-1)});
}

// A 2-d tensor that the library reads as it lies, transposed or not; a copy only where neither way fits.
struct Operand {
  at::Tensor tensor;
  Matrix matrix;
};

inline Operand operand(const at::Tensor& t) {
  const int64_t rows = t.size(0), cols = t.size(1), down = t.stride(0), along = t.stride(1);
  // a stride along a size of one says nothing
  if ((cols <= 1 || along == 1) && (rows <= 1 || down >= cols))
    return {t, {t.data_ptr(), rows, cols, rows <= 1 ? std::max<int64_t>(cols, 1) : down, true}};
  if ((rows <= 1 || down == 1) && (cols <= 1 || along >= rows))
    return {t, {t.data_ptr(), rows, cols, cols <= 1 ? std::max<int64_t>(rows, 1) : along, false}};
  const at::Tensor copy = t.contiguous();
  return {copy, {copy.data_ptr(), rows, cols, std::max<int64_t>(cols, 1), true}};
}

// `shape` with another last size.
inline std::vector<int64_t> with_last(at::IntArrayRef shape, int64_t last) {
  std::vector<int64_t> out = shape.vec();
  out.back() = last;
  return out;
}

// dpre [..., N] beside x [..., K]: the same rows.
inline void check_rows(const char* op, const char* name, const at::Tensor& t, const char* like_name,
                       const at::Tensor& like) {
  const bool fits =
      t.dim() == like.dim() && t.dim() >= 1 && t.sizes().slice(0, t.dim() - 1) == like.sizes().slice(0, like.dim() - 1);
  MEGACORE_CHECK(fits, op, name, describe(t), "the sizes of " << like_name << " " << like.sizes() << " but the last");
}

}  // namespace megacore::cuda
