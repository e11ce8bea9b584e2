// Runs the parts of csrc/cuda that need no GPU: main PART with PART one of activation, kernels, gemm, choice.
// Prints a line for each fault; the exit code says whether there was one. tests/test_cuda_build.py compiles and calls
// it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "cuda/choice.h"
#include "cuda/linear.cu"
#include "cuda/linear_grad.cu"

using namespace megacore::cuda;
namespace act = megacore::activation;

int faults = 0;
template <class... V>
void fault(const char* text, V... v) {
  if (++faults < 20) std::printf(text, v...), std::printf("\n");
}
#define EXPECT(condition) \
  if (!(condition)) fault("line %d: %s", __LINE__, #condition)

// ---- the activations in long double, by their textbook formulas ----
using Real = long double;
Real tanh_gate(Real x) {
  return 1 / (1 + std::exp(-2 * std::sqrt(2 / std::acos(Real(-1))) * (x + Real(0.044715L) * x * x * x)));
}
Real erf_gate(Real x) {
  return std::erfc(-x / std::sqrt(Real(2))) / 2;
}
struct Truth {
  Real y, d[2], scale, argument;  // scale: the size of the terms of d[0]; argument: the exponent that was raised
};
Truth truth(Activation a, Real dy, Real p, Real up) {
  const Real pi = std::acos(Real(-1)), c = std::sqrt(2 / pi);
  if (a == Activation::none) return {p, {dy, 0}, std::fabs(dy), 0};
  if (a == Activation::swiglu) {
    const Real s = 1 / (1 + std::exp(-p)), rest = 1 / (1 + std::exp(p));
    return {
        p * s * up, {dy * up * (s + p * s * rest), dy * p * s}, std::fabs(dy * up) * (s + std::fabs(p) * s * rest), p};
  }
  const bool tanh = a == Activation::gelu_tanh;
  const Real s = tanh ? tanh_gate(p) : erf_gate(p);
  const Real ds =
      tanh ? s * tanh_gate(-p) * 2 * c * (1 + 3 * Real(0.044715L) * p * p) : std::exp(-p * p / 2) / std::sqrt(2 * pi);
  return {p * s,
          {dy * (s + p * ds), 0},
          std::fabs(dy) * (s + std::fabs(p) * ds),
          tanh ? 2 * c * (p + 0.044715L * p * p * p) : p * p / 2};
}

template <class Act, class A>
void check_activation(Activation a, const char* name) {
  const Real eps = std::numeric_limits<A>::epsilon(), tiny = std::numeric_limits<A>::min() * 8;
  for (int i = -60000; i <= 60000; ++i) {
    const A x = i / A(4000), up = A(0.75), dy = A(-1.25);  // |x| <= 15
    A in[Act::kParts], d[Act::kParts];
    for (int h = 0; h < Act::kParts; ++h) in[h] = h ? up : x;
    const A y = Act::value(in);
    Act::gradient(dy, in, d);
    const Truth t = truth(a, dy, x, up);
    const Real unit = eps * (4 + 3 * std::fabs(t.argument));
    if (!(std::fabs(y - t.y) <= unit * std::fabs(t.y) + tiny))
      return fault("%s(%g) = %.9g, wanted %.9Lg", name, double(x), double(y), t.y);
    for (int h = 0; h < Act::kParts; ++h)
      if (!(std::fabs(d[h] - t.d[h]) <= unit * (h ? std::fabs(t.d[h]) : t.scale) + 4 * tiny))
        return fault("%s'[%d](%g) = %.9g, wanted %.9Lg", name, h, double(x), double(d[h]), t.d[h]);
  }
  for (const A x : {A(1e4), A(-1e4), A(INFINITY), A(-INFINITY), A(NAN)}) {  // gradients 1 and 0, never NaN of their own
    A in[Act::kParts], d[Act::kParts];
    for (int h = 0; h < Act::kParts; ++h) in[h] = h ? A(1) : x;
    Act::gradient(A(1), in, d);
    if (a == Activation::none) continue;
    EXPECT(std::isnan(x) ? std::isnan(d[0]) : d[0] == (x > 0 ? 1 : 0));
    EXPECT(std::isinf(x) || (std::isnan(x) ? std::isnan(Act::value(in)) : Act::value(in) == (x > 0 ? x : 0)));
  }
}

void activations() {
  check_activation<act::Gelu<act::TanhGate>, float>(Activation::gelu_tanh, "gelu tanh fp32");
  check_activation<act::Gelu<act::TanhGate>, double>(Activation::gelu_tanh, "gelu tanh fp64");
  check_activation<act::Gelu<act::ErfGate>, float>(Activation::gelu_erf, "gelu erf fp32");
  check_activation<act::Gelu<act::ErfGate>, double>(Activation::gelu_erf, "gelu erf fp64");
  check_activation<act::Swiglu, float>(Activation::swiglu, "swiglu fp32");
  check_activation<act::Swiglu, double>(Activation::swiglu, "swiglu fp64");
  check_activation<act::Identity, float>(Activation::none, "identity");
}

// ---- the kernels, in every storage type, aligned and not ----
constexpr int kGuard = 64;  // elements on each side that no kernel may touch

template <class T>
struct Buffer {
  std::vector<T> all;
  int64_t start, count;
  Buffer(int64_t count, int offset) : start(kGuard + offset), count(count) {
    T filler;
    narrow(acc_t<T>(7), filler);
    all.assign(count + 2 * kGuard + 16, filler);
    while (reinterpret_cast<uintptr_t>(all.data() + start - offset) % 16) ++start;
  }
  T* data() { return all.data() + start; }
  acc_t<T> at(int64_t i) const { return widen(all[start + i]); }
  void set(int64_t i, double v) { narrow(acc_t<T>(v), all[start + i]); }
  bool intact() const {
    for (int64_t i = 0; i < int64_t(all.size()); ++i)
      if ((i < start || i >= start + count) && widen(all[i]) != 7) return false;
    return true;
  }
};

template <class T>
constexpr double unit = sizeof(T) == 8                   ? 1e-15
                        : sizeof(T) == 4                 ? 2e-7
                        : std::is_same<T, __half>::value ? 1e-3
                                                         : 8e-3;

struct Case {
  int64_t rows, columns, dy_stride;  // dy_stride < 0: columns - dy_stride
  bool bias, in_place;
};

template <class T>
std::vector<double> check_kernels(Activation a, Storage s, const Case& c, int offset) {
  const int64_t parts = parts_of(a), wide = parts * c.columns;
  const int64_t stride = c.dy_stride < 0 ? c.columns - c.dy_stride : c.in_place ? c.columns : c.dy_stride;
  std::mt19937_64 random(c.rows * 1000 + c.columns);
  std::normal_distribution<double> normal(0, 2);
  Buffer<T> pre(c.rows * wide, offset), bias(wide, offset), y(c.rows * c.columns, offset), dpre(c.rows * wide, offset),
      dy(stride * (c.rows - 1) + c.columns, offset), dbias(wide, offset);
  for (auto* b : {&pre, &bias, &dy})
    for (int64_t i = 0; i < b->count; ++i) b->set(i, normal(random));
  for (auto* b : {&y, &dpre, &dbias})
    for (int64_t i = 0; i < b->count; ++i) b->set(i, NAN);  // what must be overwritten

  const Buffer<T> before = pre, dy_before = dy;
  const bool none = a == Activation::none;
  EXPECT(launch_forward(a, s,
                        {pre.data(), c.bias ? bias.data() : nullptr, none ? nullptr : y.data(), c.rows, c.columns},
                        nullptr) == cudaSuccess);
  std::vector<char> scratch(backward_scratch(a, s, c.rows, c.columns) + 16);
  void* aligned_scratch = scratch.data() + (16 - reinterpret_cast<uintptr_t>(scratch.data()) % 16) % 16;
  T* out = none ? nullptr : c.in_place ? dy.data() : dpre.data();
  EXPECT(launch_backward(
             a, s,
             {dy.data(), stride, none ? nullptr : pre.data(), out, dbias.data(), aligned_scratch, c.rows, c.columns},
             nullptr) == cudaSuccess);

  const Buffer<T>& d = c.in_place ? dy : dpre;
  std::vector<double> bits, sums(wide), sizes(wide);
  for (int64_t r = 0; r < c.rows; ++r)
    for (int64_t i = 0; i < c.columns; ++i) {
      double p[2];
      for (int64_t h = 0; h < parts; ++h) {
        const int64_t at = (r * parts + h) * c.columns + i;
        T rounded;
        narrow(before.at(at) + bias.at(h * c.columns + i), rounded);
        p[h] = pre.at(at);
        if (p[h] != (c.bias ? widen(rounded) : before.at(at))) return fault("pre[%ld, %ld]", long(r), long(i)), bits;
      }
      const Truth t = truth(a, dy_before.at(r * stride + i), p[0], p[1]);
      const double got = none ? 0 : y.at(r * c.columns + i);
      if (!none && !(std::fabs(got - t.y) <= unit<T> * std::fabs(t.y) + 1e-7))
        return fault("y[%ld, %ld] = %g, wanted %Lg", long(r), long(i), got, t.y), bits;
      bits.push_back(got);
      for (int64_t h = 0; h < parts; ++h) {
        const double g = none ? 0 : d.at((r * parts + h) * c.columns + i);
        if (!none && !(std::fabs(g - t.d[h]) <= unit<T> * std::fabs(t.d[h]) + 1e-6))
          return fault("dpre[%ld, %ld, part %ld] = %g, wanted %Lg", long(r), long(i), long(h), g, t.d[h]), bits;
        bits.push_back(g);
        sums[h * c.columns + i] += t.d[h], sizes[h * c.columns + i] += h ? std::fabs(t.d[h]) : t.scale;
      }
    }
  for (int64_t i = 0; i < wide; ++i) {
    const double got = dbias.at(i);
    if (!(std::fabs(got - sums[i]) <= unit<T> * std::fabs(sums[i]) + 1e-6 * sizes[i] + 1e-7))
      return fault("dbias[%ld] = %g, wanted %g", long(i), got, sums[i]), bits;
    bits.push_back(got);
  }
  EXPECT(pre.intact() && bias.intact() && y.intact() && dpre.intact() && dy.intact() && dbias.intact());
  return bits;
}

template <class T>
void kernels_of(Storage s) {
  const Case cases[] = {{1, 1, -0, true, false},     {7, 3, -5, true, false},   {65, 8, 8, false, false},
                        {130, 24, 0, true, false},   {70, 17, 17, true, false}, {3, 2056, -8, true, false},
                        {33, 264, 264, false, false}};
  for (const Activation a : {Activation::none, Activation::gelu_tanh, Activation::gelu_erf, Activation::swiglu})
    for (Case c : cases) {
      const int before = faults;
      const auto bits = check_kernels<T>(a, s, c, 0), shifted = check_kernels<T>(a, s, c, 1);
      EXPECT(faults != before || std::memcmp(bits.data(), shifted.data(), bits.size() * 8) == 0);  // one order of sums
      c.in_place = true, c.dy_stride = c.columns;
      if (parts_of(a) == 1 && a != Activation::none) check_kernels<T>(a, s, c, 0);
      if (faults != before)
        fault("  activation %d storage %d rows %ld columns %ld", int(a), int(s), long(c.rows), long(c.columns));
    }
  Buffer<T> dbias(5, 0);  // no rows: the bias gradient is 0
  EXPECT(backward_scratch(Activation::none, s, 0, 5) == 0);
  launch_backward(Activation::none, s, {nullptr, 5, nullptr, nullptr, dbias.data(), nullptr, 0, 5}, nullptr);
  for (int i = 0; i < 5; ++i) EXPECT(dbias.at(i) == 0);
}

void kernels() {
  kernels_of<float>(Storage::f32);
  kernels_of<double>(Storage::f64);
  kernels_of<__nv_bfloat16>(Storage::bf16);
  kernels_of<__half>(Storage::f16);
}

// ---- the products as the library would read them ----
double element(const Side& s, int64_t r, int64_t c) {  // of op(A)
  return static_cast<const double*>(s.data)[s.transposed ? c + r * s.ld : r + c * s.ld];
}

void interpret(const Gemm& g) {
  EXPECT((g.a.transposed ? g.a.cols : g.a.rows) == g.m && (g.a.transposed ? g.a.rows : g.a.cols) == g.k);
  EXPECT((g.b.transposed ? g.b.cols : g.b.rows) == g.k && (g.b.transposed ? g.b.rows : g.b.cols) == g.n);
  EXPECT(g.a.ld >= g.a.rows && g.b.ld >= g.b.rows && g.ldd >= g.m);
  for (int64_t j = 0; j < g.n; ++j)
    for (int64_t i = 0; i < g.m; ++i) {
      double sum = 0;
      for (int64_t q = 0; q < g.k; ++q) sum += element(g.a, i, q) * element(g.b, q, j);
      double& d = static_cast<double*>(g.d)[i + j * g.ldd];
      d = sum + (g.bias ? static_cast<const double*>(g.bias)[i] : 0) + (g.accumulate ? d : 0);
    }
}

struct Stored {  // a [rows, cols] matrix with a padded leading dimension, by rows or by columns
  std::vector<double> data;
  Matrix m;
  Stored(int64_t rows, int64_t cols, bool row_major, int seed) : data(rows * cols + 99 + 3 * (rows + cols)) {
    std::mt19937 random(seed);
    for (double& v : data) v = double(random() % 1000) / 100 - 5;
    m = {data.data(), rows, cols, (row_major ? cols : rows) + 3, row_major};
  }
  double at(int64_t r, int64_t c) const { return data[m.row_major ? r * m.ld + c : r + c * m.ld]; }
};

void products() {
  const int64_t M = 5, N = 3, K = 4, ld = K + 2;
  for (int layout = 0; layout < 8; ++layout) {
    const Stored x(M, K, layout & 1, 1), w(N, K, layout & 2, 2), dpre(M, N, layout & 4, 3);
    std::vector<double> y(M * N), dx(M * K), dw(N * ld, 0.5), bias{1, 2, 3};
    Gemm forward = forward_gemm(x.m, w.m, y.data(), Storage::f64);
    forward.epilogue = Epilogue::bias, forward.bias = bias.data();
    interpret(forward);
    interpret(dgrad_gemm(dpre.m, w.m, dx.data(), Storage::f64));
    Gemm wgrad = wgrad_gemm(dpre.m, x.m, dw.data(), ld, Storage::f64, Storage::f64);
    wgrad.accumulate = true;
    interpret(wgrad);
    for (int64_t r = 0; r < M; ++r)
      for (int64_t c = 0; c < N; ++c) {
        double want = bias[c];
        for (int64_t k = 0; k < K; ++k) want += x.at(r, k) * w.at(c, k);
        EXPECT(std::fabs(y[r * N + c] - want) < 1e-12);
      }
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t r = 0; r < M; ++r) {
        double want = 0;
        for (int64_t c = 0; c < N; ++c) want += dpre.at(r, c) * w.at(c, k);
        EXPECT(std::fabs(dx[r * K + k] - want) < 1e-12);
      }
      for (int64_t c = 0; c < N; ++c) {
        double want = 0.5;
        for (int64_t r = 0; r < M; ++r) want += dpre.at(r, c) * x.at(r, k);
        EXPECT(std::fabs(dw[c * ld + k] - want) < 1e-12);
      }
    }
  }
  EXPECT(aux_fits(8, 8) && aux_fits(3, 8) && !aux_fits(9, 8) && !aux_fits(12, 12));
}

// ---- the rules of choice ----
void rules() {
  using Times = std::vector<std::vector<float>>;
  EXPECT(fastest(Times{{3, 1, 2}, {1, 1, 9}, {5}}) == 1u);  // medians 2, 1, 5: one slow round does not count
  EXPECT(fastest(Times{{1.005f}, {1.f}}) == 0u);            // within the margin: the earlier
  EXPECT(fastest(Times{{1.02f}, {1.f}}) == 1u);
  EXPECT(fastest(Times{{}, {4}}) == 1u);  // the first could not run
  EXPECT(!fastest(Times{{}, {}}) && !fastest(Times{}));

  EXPECT(considered(Rank::fused, Mode::measured, false) && considered(Rank::fused, Mode::first, true));
  EXPECT(!considered(Rank::fused, Mode::unfused, false) && considered(Rank::unfused, Mode::unfused, false));
  EXPECT(considered(Rank::last, Mode::measured, false) && !considered(Rank::last, Mode::measured, true));
  EXPECT(effective(Mode::measured, true, false) == Mode::first &&
         effective(Mode::measured, false, true) == Mode::first);
  EXPECT(effective(Mode::measured, false, false) == Mode::measured &&
         effective(Mode::unfused, true, true) == Mode::unfused);
  EXPECT(mode_named("first") == Mode::first && !mode_named("fast"));

  const auto address = [](uintptr_t a) { return alignment(reinterpret_cast<void*>(a)); };
  EXPECT(address(0) == 256 && address(1024) == 256 && address(48) == 16 && address(2) == 2 && address(7) == 1);

  Gemm g = forward_gemm({nullptr, 5, 4, 4, true}, {nullptr, 3, 4, 4, true}, nullptr, Storage::bf16);
  const auto key_of = [](const Gemm& g) {
    Key key;
    append(key, g);
    return key;
  };
  const Key key = key_of(g);
  Choices<int> kept;
  EXPECT(!kept.find(key) && kept.keep(key, 1) == 1 && kept.keep(key, 2) == 1 &&
         kept.find(key) == 1);  // the first stays
  g.b.ld = 8;
  EXPECT(!kept.find(key_of(g)));
  g.b.ld = 4, g.aux = reinterpret_cast<void*>(8);
  EXPECT(!kept.find(key_of(g)));
  EXPECT(alignment_of_outputs(g) == 8);  // of aux; D and the others are null here
  g.bias = reinterpret_cast<void*>(2);   // a view that starts at an odd element of bf16
  EXPECT(alignment_of_outputs(g) == 2);
}

int main(int, char** argv) {
  const std::string part = argv[1];
  part == "activation" ? activations() : part == "kernels" ? kernels() : part == "gemm" ? products() : rules();
  std::printf("%s: %d faults\n", part.c_str(), faults);
  return faults ? EXIT_FAILURE : EXIT_SUCCESS;
}
