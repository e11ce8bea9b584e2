#include "cpu/fresh.h"

#include <ATen/ops/empty.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace megacore {
namespace {

constexpr uintptr_t kHuge = uintptr_t(2) << 20;
constexpr size_t kWorth = 8 << 20;  // from here on glibc maps anew whatever was freed before, and few pages are in part

}  // namespace

at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor out = at::empty(sizes, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (out.nbytes() >= kWorth) {
    const auto begin = reinterpret_cast<uintptr_t>(out.data_ptr());
    const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = (begin + out.nbytes()) / kHuge * kHuge;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice: may fail
  }
#endif
  return out;
}

}  // namespace megacore
