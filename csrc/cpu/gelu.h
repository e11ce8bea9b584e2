// GELU and its derivative, in the tanh and the erf form; fp32 (vectorised) and fp64.
#pragma once
#include "cpu/vector_math.h"

namespace megacore {

// gelu(x) = x * s(x), s in [0, 1]; gelu'(x) = s(x) + x * s'(x).
template <class A>
struct Gate {
  A s, ds;
};

// tanh form: s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).  One formula for forward, backward and every device.
struct TanhForm {
  template <class A>
  MEGACORE_INLINE static Gate<A> gate(A x) {
    constexpr A k = A(1.5957691216057308), kc = A(1.5957691216057308 * 0.044715);
    const A limit = sizeof(A) == 4 ? A(11) : A(22);  // beyond it s is 0 or 1 to the last bit, and x^3 cannot overflow
    const A v = clamp(x, -limit, limit);
    const A square = v * v;
    const A z = v * (k + kc * square), e = exp_of(z < A(0) ? z : -z), d = A(1) / (A(1) + e);
    const A less = e * d;  // the smaller of s and 1 - s, with no cancellation; their product is s'(2u)
    return {z < A(0) ? less : d, d * less * (k + 3 * kc * square)};
  }
};

// erf form: s = Phi(x) = erfc(-x / sqrt 2) / 2, s' = exp(-x^2 / 2) / sqrt(2 pi).
struct ErfForm {
  MEGACORE_INLINE static Gate<double> gate(double x) {
    return {0.5 * std::erfc(-x * 0.70710678118654752), 0.39894228040143268 * std::exp(-0.5 * x * x)};
  }
  MEGACORE_INLINE static Gate<float> gate(float x) {
    const float v = clamp(x, -15.f, 15.f);
    const float bell = exp_of(-0.5f * v * v);
    // erfc(a) = exp(-a^2) t P(t), t = 1 / (1 + a/2), a = |x| / sqrt 2: P by weighted least squares, relative error 5e-9
    const float t = 1.f / (1.f + 0.35355339f * (v < 0.f ? -v : v));
    float p = 0.0399780529f;
    p = p * t - 0.215728647f;
    p = p * t + 0.444796852f;
    p = p * t - 0.383087456f;
    p = p * t + 0.0656013075f;
    p = p * t - 0.0188323357f;
    p = p * t + 0.0773132144f;
    p = p * t + 0.179494628f;
    p = p * t + 0.246219578f;
    p = p * t + 0.282152154f;
    p = p * t + 0.282092656f;
    const float tail = 0.5f * bell * t * p;
    // Phi(v) = 1/2 + v R(v^2) near 0, where the tail's relative error would cost a digit: relative error 7e-10 to |v| =
    // 1
    const float q = v * v;
    float near = -7.65419684e-6f;
    near = near * q + 0.000113486343f;
    near = near * q - 0.00118632992f;
    near = near * q + 0.0099733234f;
    near = near * q - 0.0664903599f;
    near = near * q + 0.39894228f;
    const float far = v < 0.f ? tail : 1.f - tail;
    return {q < 1.f ? 0.5f + v * near : far, 0.39894228f * bell};
  }
};

template <class Form, class A>
MEGACORE_INLINE A gelu(A x) {
  return x * Form::gate(x).s;
}

template <class Form, class A>
MEGACORE_INLINE A gelu_derivative(A x) {
  const Gate<A> g = Form::gate(x);
  return g.s + clamp(x, A(-30), A(30)) * g.ds;  // the clamp keeps inf * 0 out; s' is 0 there
}

}  // namespace megacore
