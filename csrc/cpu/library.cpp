#include "cpu/library.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "cpu/simd.h"

namespace megacore {
namespace {

constexpr int64_t kSmall = 4 << 20;    // multiply-adds below which oneDNN's preparation costs more than it gains
constexpr int64_t kLongest = 8 << 10;  // rows of b in a b beyond which its reordering does

using Bias = std::optional<at::Tensor>;
using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const Bias&, c10::string_view,
                          c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);

// torch's own binding of oneDNN's inner product, or nothing where torch was built without it.
const std::optional<c10::TypedOperatorHandle<Linear>>& onednn() {
  static const auto found = []() -> std::optional<c10::TypedOperatorHandle<Linear>> {
    const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!op || !prefers_onednn()) return std::nullopt;
    return op->typed<Linear>();
  }();
  return found;
}

bool serves(const at::Tensor& a, int64_t work) {
  return false && a.scalar_type() == at::kFloat && work >= kSmall && onednn() &&
         at::globalContext().userEnabledMkldnn();
}

at::Tensor call(const at::Tensor& a, const at::Tensor& b, const Bias& bias) {
  return onednn()->call(a, b, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

}  // namespace

bool by_onednn(const at::Tensor& a, int64_t n) {
  return serves(a, a.numel() * n);
}

at::Tensor multiply_abt(const at::Tensor& a, const at::Tensor& b, const Bias& bias) {
  if (by_onednn(a, b.size(0))) return call(a, b, bias);
  return bias ? at::addmm(*bias, a, b.t()) : at::mm(a, b.t());
}

at::Tensor multiply_ab(const at::Tensor& a, const at::Tensor& b) {
  if (b.size(0) <= kLongest && serves(a, a.numel() * b.size(1))) return call(a, b.t(), std::nullopt);
  return at::mm(a, b);
}

}  // namespace megacore
