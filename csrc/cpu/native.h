// Whether this CPU multiplies matrices of a dtype in that dtype. Where it does not, torch's GEMM of 16-bit numbers is
// many times slower than its GEMM of floats (docs/benchmarks.md), and ours widens panels to fp32 instead (gemm.h).
#pragma once
#include <c10/core/ScalarType.h>

#include <optional>

namespace megacore {

// fp32 and fp64 always; bf16 with AVX512_BF16 or AMX-BF16, fp16 with AVX512_FP16 or AMX-FP16. On other architectures
// the library's 16-bit GEMM is of unknown speed and the widened one never very slow, so 16 bits are not native there.
bool native(c10::ScalarType dtype);

// For tests and benchmarks: both 16-bit dtypes are native (or not), whatever the CPU; nothing: as the CPU says.
void set_native_16bit(std::optional<bool> on);

}  // namespace megacore
