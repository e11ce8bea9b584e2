#include "cpu/simd.h"

namespace megacore {
namespace {

bool supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool avx2 = supported();

}  // namespace

bool use_avx2() {
  return avx2;
}
const char* cpu_path() {
  return avx2 ? "avx2" : "portable";
}
void set_portable(bool on) {
  avx2 = !on && supported();
}

}  // namespace megacore
