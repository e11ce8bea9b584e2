#include "cpu/native.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace megacore {
namespace {

struct Arithmetic {
  bool bf16, fp16;
};

Arithmetic detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0, first = 0, second = 0;
  // AVX512_BF16 and the rest come on top of AVX-512, and this one asks whether the system saves its registers too.
  if (!__builtin_cpu_supports("avx512f") || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {false, false};
  first = d;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) second = a;
  const bool avx512_bf16 = second >> 5 & 1, amx_fp16 = second >> 21 & 1;
  const bool amx_bf16 = first >> 22 & 1, avx512_fp16 = first >> 23 & 1;
  return {avx512_bf16 || amx_bf16, avx512_fp16 || amx_fp16};
#else
  return {false, false};
#endif
}

const Arithmetic found = detect();
Arithmetic used = found;

}  // namespace

bool native(c10::ScalarType dtype) {
  return dtype == c10::kBFloat16 ? used.bf16 : dtype == c10::kHalf ? used.fp16 : true;
}

void set_native_16bit(std::optional<bool> on) {
  used = on ? Arithmetic{*on, *on} : found;
}

}  // namespace megacore
