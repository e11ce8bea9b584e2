// The words that kernels, products and the torch side share.
#pragma once
#include <cstdint>

namespace megacore::cuda {

enum class Activation { none, gelu_tanh, gelu_erf, swiglu };
enum class Storage { f32, f64, bf16, f16 };

inline int64_t parts_of(Activation a) {
  return a == Activation::swiglu ? 2 : 1;
}
inline int64_t bytes_of(Storage s) {
  return s == Storage::f64 ? 8 : s == Storage::f32 ? 4 : 2;
}

}  // namespace megacore::cuda
