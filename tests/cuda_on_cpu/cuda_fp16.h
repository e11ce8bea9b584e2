// Stands in for CUDA's header: see cuda_runtime_api.h beside it. By the definition of the format, not fast.
#pragma once
#include <cmath>
#include <cstdint>

struct __half {
  uint16_t bits;
};
inline float __half2float(__half v) {
  const int exponent = (v.bits >> 10) & 31, fraction = v.bits & 1023;
  const float sign = v.bits & 0x8000 ? -1 : 1;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24));
}
inline __half __float2half_rn(float v) {
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  if (v != v) return {0x7e00};
  const float size = std::fabs(v);
  if (size >= 65520) return {uint16_t(sign | 0x7c00)};
  int exponent = 0;
  std::frexp(size, &exponent);
  if (exponent < -13) exponent = -13;  // subnormal: the spacing of 2^-14
  const int steps = int(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return {uint16_t(sign | (steps < 1024 ? steps : ((exponent + 14) << 10) + steps - 1024))};
}
