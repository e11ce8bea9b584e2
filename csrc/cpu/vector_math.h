// exp as straight-line code that the compiler vectorises (simd.h); doubles call libm.
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

// e^v for v <= 0, relative error below 1e-7; 0 below -87, where e^v leaves the normal numbers; keeps NaN.
MEGACORE_INLINE float exp_of(float v) {
  // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits; 127 more, and they are an exponent field.
  constexpr float round = 12582912.f + 127.f;
  const float shifted = v * 1.44269504f + round, whole = shifted - round;
  const float r = (v - whole * 0.693145752f) - whole * 1.42860677e-6f;  // ln 2 in two parts; |r| <= ln(2)/2
  float p = 0.00138145395f;                                             // minimax of degree 6: relative error 4e-9
  p = p * r + 0.00836874545f;
  p = p * r + 0.0416683890f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const float e = p * bits_as<float>(bits_as<int32_t>(shifted) << 23);
  return v < -87.f ? 0.f : e;
}
MEGACORE_INLINE double exp_of(double v) {
  return std::exp(v);
}

}  // namespace megacore
