// Memory for results.
#pragma once
#include <ATen/core/Tensor.h>

namespace megacore {

// An uninitialised tensor. A large one asks the kernel for huge pages: the C library maps it anew for each call, and
// its first write otherwise takes a page fault every 4 KiB, which costs several times the write itself. Where the
// system has none (transparent_hugepage = never, not Linux) nothing changes.
at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace megacore
