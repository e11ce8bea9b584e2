// One source, three instruction sets. A kernel body is a struct with a static always-inline `run` in plain scalar
// loops; run_on_cpu<Body>(args...) calls it inside a function compiled for AVX-512, for AVX2+FMA+F16C, or for the
// baseline, and the compiler vectorises each. The rest of the file, and every ATen header, stays at the baseline.
#pragma once
#include <cstdint>
#include <cstring>
#include <optional>

#define MEGACORE_INLINE inline __attribute__((always_inline))
#define MEGACORE_LAMBDA __attribute__((always_inline))

namespace megacore {

enum class Isa { portable, avx2, avx512 };

Isa isa();                            // decided when the library is loaded
const char* cpu_path();               // its name
bool set_cpu_path(const char* name);  // tests and benchmarks; "": the best; false: not there

bool multiplies_faster();                      // than the library, see product.h
void set_own_product(std::optional<bool> on);  // tests: as if it were so on AVX-512, or not; nothing: as it is

#if defined(__x86_64__)
template <class Body, class... Args>
__attribute__((target("avx2,fma,f16c"), noinline)) void run_avx2(Args... args) {
  Body::run(args...);
}
template <class Body, class... Args>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"), noinline)) void
run_avx512(Args... args) {
  Body::run(args...);
}
#endif

template <class Body, class... Args>
__attribute__((noinline)) void run_portable(Args... args) {
  Body::run(args...);
}

// Arguments go by value: pointers and sizes.
template <class Body, class... Args>
inline void run_on_cpu(Args... args) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return run_avx512<Body>(args...);
  if (isa() == Isa::avx2) return run_avx2<Body>(args...);
#endif
  run_portable<Body>(args...);
}

// ---- storage types: what a pointer points to; arithmetic is in acc_t ----
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class T>
struct acc {
  using type = float;
};
template <>
struct acc<double> {
  using type = double;
};
template <class T>
using acc_t = typename acc<T>::type;

template <class To, class From>
MEGACORE_INLINE To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

MEGACORE_INLINE float widen(float v) {
  return v;
}
MEGACORE_INLINE double widen(double v) {
  return v;
}
MEGACORE_INLINE float widen(bf16 v) {
  return bits_as<float>(uint32_t(v.bits) << 16);
}
MEGACORE_INLINE float widen(fp16 v) {
  // Shift exponent and fraction into place and correct the bias by a product, which is exact for subnormals too.
  const uint32_t magnitude = uint32_t(v.bits & 0x7fff) << 13;
  const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  const uint32_t special = (v.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // inf and NaN keep the largest exponent
  return bits_as<float>(scaled | special | uint32_t(v.bits & 0x8000) << 16);
}

// To storage, rounding to nearest even.
template <class T>
MEGACORE_INLINE T narrow(acc_t<T> v) {
  return v;
}
template <>
MEGACORE_INLINE bf16 narrow<bf16>(float v) {
  const uint32_t u = bits_as<uint32_t>(v);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bf16{uint16_t(v != v ? 0x7fc0u : rounded)};
}
template <>
MEGACORE_INLINE fp16 narrow<fp16>(float v) {
  const uint32_t u = bits_as<uint32_t>(v), sign = (u >> 16) & 0x8000u, m = u & 0x7fffffffu;
  const uint32_t normal = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
  // Below 2^-14 the spacing is 2^-24, which is that of floats in [0.5, 1): adding 0.5 rounds there.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(m) + 0.5f) - bits_as<uint32_t>(0.5f);
  const uint32_t finite = m < 0x38800000u ? subnormal : normal;
  const uint32_t large = m > 0x7f800000u ? 0x7e00u : 0x7c00u;  // NaN, else infinity
  return fp16{uint16_t((m >= 0x47800000u ? large : finite) | sign)};
}

}  // namespace megacore
