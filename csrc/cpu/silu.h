// SiLU, s(x) = x sigmoid(x), and its derivative; fp32 (vectorised) and fp64.
#pragma once
#include "cpu/vector_math.h"

namespace megacore {

// sigmoid(x) and 1 - sigmoid(x), neither by cancellation.
template <class A>
struct Sigmoid {
  A s, rest;
};

template <class A>
MEGACORE_INLINE Sigmoid<A> sigmoid(A x) {
  const A e = exp_of(x < A(0) ? x : -x), d = A(1) / (A(1) + e), less = e * d;
  return {x < A(0) ? less : d, x < A(0) ? d : less};
}

template <class A>
MEGACORE_INLINE A silu(A x) {
  return x * sigmoid(x).s;
}

template <class A>
MEGACORE_INLINE A silu_derivative(A x) {
  const Sigmoid<A> g = sigmoid(x);
  return g.s * (A(1) + clamp(x, A(-750), A(750)) * g.rest);  // the clamp keeps inf * 0 out; one factor is 0 there
}

}  // namespace megacore
