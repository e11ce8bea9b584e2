#include "cpu/simd.h"

#include <optional>
#include <string>

namespace megacore {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

bool supported(Isa isa) {
  if (isa == Isa::portable) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

Isa best() {
  return supported(Isa::avx512) ? Isa::avx512 : supported(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

Isa now = best();
std::optional<bool> forced;

}  // namespace

Isa isa() {
  return now;
}
const char* cpu_path() {
  return kNames[int(now)];
}
bool multiplies_faster() {
#if defined(__x86_64__)
  return now == Isa::avx512 && forced.value_or(!__builtin_cpu_is("intel"));
#else
  return false;
#endif
}
void set_own_product(std::optional<bool> on) {
  forced = on;
}
bool set_cpu_path(const char* name) {
  if (*name == 0) return now = best(), true;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
    if (std::string(name) == kNames[int(isa)] && supported(isa)) return now = isa, true;
  return false;
}

}  // namespace megacore
