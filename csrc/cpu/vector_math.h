// exp and the two GELUs as straight-line code that the compiler vectorises (simd.h); doubles call libm.
#pragma once
#include <cmath>

#include "cpu/simd.h"

namespace megacore {

MEGACORE_INLINE float clamp(float v, float lo, float hi) {  // keeps NaN
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}
MEGACORE_INLINE double clamp(double v, double lo, double hi) {
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}

// e^v, relative error below 1.5 ulp; overflows to inf, underflows through the subnormals to 0, keeps NaN.
MEGACORE_INLINE float exp_of(float v) {
  v = clamp(v, -105.f, 89.f);
  constexpr float round = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const float shifted = v * 1.44269504f + round;
  const int32_t n = bits_as<int32_t>(shifted) - bits_as<int32_t>(round);
  const float whole = shifted - round;
  const float r = (v - whole * 0.693145752f) - whole * 1.42860677e-6f;  // ln 2 in two parts; |r| <= ln(2)/2
  float p = 1.f / 5040;                                                 // Taylor to r^7: the rest is below 6e-9
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const int32_t half = n >> 1;  // 2^n in two factors, so that neither leaves the range of exponents
  return p * bits_as<float>((half + 127) << 23) * bits_as<float>((n - half + 127) << 23);
}
MEGACORE_INLINE double exp_of(double v) {
  return std::exp(v);
}

}  // namespace megacore
