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
  static constexpr A k = A(1.5957691216057308);
  template <class A>
  static constexpr A kc = A(1.5957691216057308 * 0.044715);

  template <class A>
  MEGACORE_INLINE static A share(A x) {
    constexpr A most = sizeof(A) == 4 ? A(87) : A(700);  // beyond it e^z overflows, and s is 0
    const A z = -x * (k<A> + kc<A> * x * x);
    const A s = A(1) / (A(1) + exp_of(z > most ? most : z));
    return z > most ? A(0) : s;
  }
  template <class A>
  MEGACORE_INLINE static Gate<A> gate(A x) {
    const A limit = sizeof(A) == 4 ? A(9.9) : A(19.5);  // beyond it s is 0 or 1; e^z is still finite
    const A v = clamp(x, -limit, limit), square = v * v;
    const A e = exp_of(-v * (k<A> + kc<A> * square)), s = A(1) / (A(1) + e);
    const Gate<A> found = {s, e * s * s * (k<A> + 3 * kc<A> * square)};  // 1 - s = e s, with no cancellation
    return {x < -limit ? A(0) : found.s, x < -limit ? A(0) : found.ds};
  }
};

// erf form: s = Phi(x) = erfc(-x / sqrt 2) / 2, s' = exp(-x^2 / 2) / sqrt(2 pi).
struct ErfForm {
  template <class A>
  MEGACORE_INLINE static A share(A x) {
    return gate(x).s;
  }
  MEGACORE_INLINE static Gate<double> gate(double x) {
    return {0.5 * std::erfc(-x * 0.70710678118654752), 0.39894228040143268 * std::exp(-0.5 * x * x)};
  }
  MEGACORE_INLINE static Gate<float> gate(float x) {
    const float v = clamp(x, -15.f, 15.f);
    const float bell = exp_of(-0.5f * v * v);
    // erfc(a) / 2 = exp(-a^2) t P(t), t = 1 / (1 + 0.3 a), a = |x| / sqrt 2: P minimax, relative error 2e-8
    const float t = 1.f / (1.f + 0.212132034f * (v < 0.f ? -v : v));
    float p = -0.0646698497f;
    p = p * t + 0.242299836f;
    p = p * t - 0.255052522f;
    p = p * t + 0.272489553f;
    p = p * t - 0.046269532f;
    p = p * t + 0.106955025f;
    p = p * t + 0.0743184337f;
    p = p * t + 0.0853333638f;
    p = p * t + 0.0845956823f;
    const float tail = bell * t * p;
    // Phi(v) = 1/2 + v R(v^2) near 0, where the tail's relative error would cost a digit: relative error 7e-10
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
  return x * Form::share(x);
}

template <class Form, class A>
MEGACORE_INLINE A gelu_derivative(A x) {
  const Gate<A> g = Form::gate(x);
  return g.s + clamp(x, A(-30), A(30)) * g.ds;  // the clamp keeps inf * 0 out; s' is 0 there
}

}  // namespace megacore
