// The activations of the linear family and their derivatives, one source for nvcc and for g++ (tests/test_cuda_build.py
// runs it on the CPU against fp64). The forms of cpu/gelu.h and cpu/silu.h, whose loops are written for vectorisers and
// whose polynomial of erfc is a shorter one.
//
// An activation maps kParts pre-activations of one column to y, and dy to kParts gradients. A is float or double.
// No torch and no CUDA header.
#pragma once
#include <cmath>

#if defined(__CUDACC__)
#define MEGACORE_BOTH __host__ __device__ __forceinline__
#else
#define MEGACORE_BOTH inline
#endif

namespace megacore::activation {

template <class A>
MEGACORE_BOTH A clamp(A v, A lo, A hi) {  // keeps NaN
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}

MEGACORE_BOTH float exp_of(float v) {
  return ::expf(v);
}
MEGACORE_BOTH double exp_of(double v) {
  return ::exp(v);
}

MEGACORE_BOTH float inverse(float v) {  // v in [1, 9]
#if defined(__CUDA_ARCH__)
  return __fdividef(1.f, v);  // one instruction, below 2 ulp; the exact quotient costs more than all the rest of tanh
#else
  return 1.f / v;
#endif
}
MEGACORE_BOTH double inverse(double v) {
  return 1. / v;
}

// sigmoid(z) and 1 - sigmoid(z), both without cancellation.
template <class A>
struct Sigmoid {
  A s, rest;
};
template <class A>
MEGACORE_BOTH Sigmoid<A> sigmoid(A z) {
  const A e = exp_of(z < A(0) ? z : -z), d = inverse(A(1) + e), less = e * d;
  return z < A(0) ? Sigmoid<A>{less, d} : Sigmoid<A>{d, less};
}

// gelu(x) = x * s(x), s in [0, 1]; gelu'(x) = s(x) + x * s'(x).
template <class A>
struct Gate {
  A s, ds;
};

// s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form without its cancellation.
struct TanhGate {
  template <class A>
  MEGACORE_BOTH static Gate<A> at(A x) {
    constexpr A k = A(1.5957691216057308), kc = A(1.5957691216057308 * 0.044715);
    const A limit = sizeof(A) == 4 ? A(11) : A(22);  // beyond it s is 0 or 1 to the last bit, and x^3 cannot overflow
    const A v = clamp(x, -limit, limit), square = v * v;
    const Sigmoid<A> g = sigmoid(v * (k + kc * square));
    return {g.s, g.s * g.rest * (k + 3 * kc * square)};
  }
};

// s = Phi(x) = erfc(-x / sqrt 2) / 2, s' = exp(-x^2 / 2) / sqrt(2 pi).
struct ErfGate {
  MEGACORE_BOTH static Gate<double> at(double x) {
    return {0.5 * ::erfc(-x * 0.70710678118654752), 0.39894228040143268 * ::exp(-0.5 * x * x)};
  }
  MEGACORE_BOTH static Gate<float> at(float x) {
    const float v = clamp(x, -15.f, 15.f);
    const float bell = exp_of(-0.5f * v * v);
    // erfc(a) = exp(-a^2) t P(t), t = 1 / (1 + a/2), a = |x| / sqrt 2: P by least squares, relative error 5e-9
    const float t = inverse(1.f + 0.35355339f * (v < 0.f ? -v : v));
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
    // near 0 the tail's relative error would cost a digit: Phi(v) = 1/2 + v R(v^2), relative error 7e-10 to |v| = 1
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

struct Identity {
  static constexpr int kParts = 1;
  template <class A>
  MEGACORE_BOTH static A value(const A (&pre)[1]) {
    return pre[0];
  }
  template <class A>
  MEGACORE_BOTH static void gradient(A dy, const A (&)[1], A (&d)[1]) {
    d[0] = dy;
  }
};

template <class G>
struct Gelu {
  static constexpr int kParts = 1;
  template <class A>
  MEGACORE_BOTH static A value(const A (&pre)[1]) {
    return pre[0] * G::at(pre[0]).s;
  }
  template <class A>
  MEGACORE_BOTH static void gradient(A dy, const A (&pre)[1], A (&d)[1]) {
    const Gate<A> g = G::at(pre[0]);
    d[0] = dy * (g.s + clamp(pre[0], A(-40), A(40)) * g.ds);  // the clamp keeps inf * 0 out; s' is 0 there
  }
};

// pre = (gate, up): y = gate * sigmoid(gate) * up.
struct Swiglu {
  static constexpr int kParts = 2;
  template <class A>
  MEGACORE_BOTH static A value(const A (&pre)[2]) {
    return pre[0] * sigmoid(pre[0]).s * pre[1];
  }
  template <class A>
  MEGACORE_BOTH static void gradient(A dy, const A (&pre)[2], A (&d)[2]) {
    const Sigmoid<A> g = sigmoid(pre[0]);
    const A limit = sizeof(A) == 4 ? A(110) : A(750);                             // beyond it s or 1 - s is 0
    d[0] = dy * pre[1] * (g.s * (A(1) + clamp(pre[0], -limit, limit) * g.rest));  // s + x s' would cancel
    d[1] = dy * (pre[0] * g.s);
  }
};

}  // namespace megacore::activation
