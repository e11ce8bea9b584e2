// Checks that name the operator, the argument, what it got and what it wanted, in one line. They raise ValueError.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <sstream>
#include <string>

namespace megacore {

// `got` and `wanted` may be chains: a << b. They are evaluated only when the condition fails.
#define MEGACORE_CHECK(condition, op, argument, got, wanted)                       \
  do {                                                                             \
    if (C10_UNLIKELY(!(condition))) {                                              \
      std::ostringstream message;                                                  \
      message << op << ": " << argument << " is " << got << "; wanted " << wanted; \
      TORCH_CHECK_VALUE(false, message.str());                                     \
    }                                                                              \
  } while (false)

// "[2, 3] Float on cpu"
inline std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  out << t.sizes() << ' ' << t.scalar_type() << " on " << t.device();
  return out.str();
}

// `t` lives where `like` does and has its dtype; `like_name` says in the message what that is.
inline void check_same(const char* op, const char* name, const at::Tensor& t, const char* like_name,
                       const at::Tensor& like) {
  MEGACORE_CHECK(t.device() == like.device(), op, name, describe(t), "device " << like.device() << " as " << like_name);
  MEGACORE_CHECK(t.scalar_type() == like.scalar_type(), op, name, describe(t),
                 "dtype " << like.scalar_type() << " as " << like_name);
}

inline void check_floating(const char* op, const char* name, const at::Tensor& t) {
  const auto d = t.scalar_type();
  MEGACORE_CHECK(d == at::kFloat || d == at::kDouble || d == at::kBFloat16 || d == at::kHalf, op, name, describe(t),
                 "dtype Float, Double, BFloat16 or Half");
}

}  // namespace megacore
