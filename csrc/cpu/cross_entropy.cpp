// Cross-entropy over a vocabulary shard: row statistics, their merge over ranks, the gradient.
// R rows, W columns of this shard of which C are true (the rest is padding), V true vocabulary, t ranks.
// A row is read once by the statistics and read and written once by the gradient, in blocks that stay in L1, so memory
// bandwidth is the bound in fp32 and exp in the 16-bit types. Formulas: megacore/ops/cross_entropy.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "check.h"
#include "cpu/fresh.h"
#include "cpu/storage.h"
#include "cpu/vector_math.h"

namespace megacore {
namespace {

constexpr int64_t kBlock = 1024;     // columns that the second reading of a block still finds in L1
constexpr int64_t kDigit = 1 << 20;  // a column number travels as two digits, each exact in fp32
constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

// Sums and maxima run in independent lanes, or the order of the sum would forbid vectors; kLanes is the same for every
// instruction set, and so is the order of the sum.
constexpr int kLanes = 64;

struct Nothing {
  MEGACORE_INLINE void operator()(int64_t) const {}
};

// f(lane, i) for i in [0, n), in turn over the lanes; before(i) each time that the lanes begin again.
template <class F, class G = Nothing>
MEGACORE_INLINE void for_lanes(int64_t n, F&& f, G&& before = {}) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes, before(i))
    for (int l = 0; l < kLanes; ++l) f(l, i + l);
  for (int l = 0; i + l < n; ++l) f(l, i + l);
}

// lane[0] = all lanes joined by f, as a tree.
template <class A, class F>
MEGACORE_INLINE A join(A* lane, F&& f) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lane[l] = f(lane[l], lane[l + width]);
  return lane[0];
}

// out = (max, sum exp(x - max), x[local target] or 0, sum (x - max)) of each row.
template <class T>
struct Stats {
  using A = acc_t<T>;
  MEGACORE_INLINE static void run(const T* x, int64_t stride, int64_t columns, const int64_t* target,
                                  int64_t vocab_start, int64_t ignore_index, A* out, int64_t begin, int64_t end) {
    constexpr A lowest = -std::numeric_limits<A>::infinity();
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * stride;
      A peak = lowest;
      double total = 0, below = 0;
      for (int64_t at = 0; at < columns; at += kBlock) {
        const int64_t n = columns - at < kBlock ? columns - at : kBlock;
        const A higher = max_of(row + at, n, peak);
        const A origin = higher == lowest ? A(0) : higher;  // -inf - -inf would be NaN
        const A shift = peak == lowest ? A(0) : peak - origin;
        A sums[kLanes] = {}, exps[kLanes] = {};
        const T* next = row + at + kBlock;  // the sums are as long as a block takes to arrive
        for_lanes(
            n,
            [&](int l, int64_t i) MEGACORE_LAMBDA {
              const A d = widen(row[at + i]) - origin;
              sums[l] += d;
              exps[l] += exp_of(d);
            },
            [&](int64_t i) MEGACORE_LAMBDA {
              for (int64_t k = 0; k < kLanes; k += 64 / int64_t(sizeof(T))) __builtin_prefetch(next + i + k);
            });
        const auto add = [](A a, A b) MEGACORE_LAMBDA { return a + b; };
        below += double(at) * shift + join(sums, add);
        total = (shift == 0 ? total : total * std::exp(double(shift))) + join(exps, add);
        peak = higher;
      }
      const int64_t y = target[r], local = y - vocab_start;
      const bool owned = y != ignore_index && local >= 0 && local < columns;
      out[4 * r] = peak;
      out[4 * r + 1] = A(total);
      out[4 * r + 2] = owned ? A(widen(row[local])) : A(0);
      out[4 * r + 3] = A(below);
    }
  }

  MEGACORE_INLINE static A max_of(const T* v, int64_t n, A start) {
    const auto larger = [](A a, A b) MEGACORE_LAMBDA { return b > a ? b : a; };
    A lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = start;
    for_lanes(n, [&](int l, int64_t i) MEGACORE_LAMBDA { lane[l] = larger(lane[l], widen(v[i])); });
    return join(lane, larger);
  }
};

struct Loss {
  int64_t vocab_size, ignore_index;
  double smoothing, z_loss;
};

// Statistics of every rank in rank order -> loss and (max, log sum exp(x - max)) of each row.
template <class A>
void merge_rows(const A* stats, const int64_t* target, int64_t rows, int64_t ranks, Loss how, A* loss, A* norm,
                int64_t begin, int64_t end) {
  constexpr double lowest = -std::numeric_limits<double>::infinity();
  const int64_t block = (rows + 1) * 4;
  for (int64_t r = begin; r < end; ++r) {
    double peak = lowest, total = 0, picked = 0, below = 0;
    for (int64_t k = 0; k < ranks; ++k) {
      const double mine = stats[k * block + 4 * r];
      peak = mine > peak ? mine : peak;
    }
    for (int64_t k = 0; k < ranks; ++k) {
      const A *at = stats + k * block + 4 * r, *header = stats + (k + 1) * block - 4;
      const double columns = double(header[2]) * kDigit + double(header[3]);
      const double shift = at[0] == lowest ? 0.0 : double(at[0]) - peak;
      total += at[1] * std::exp(shift);
      picked += at[2];
      below += at[3] + columns * shift;
    }
    const double rest = std::log(total);
    double value = peak - picked + rest;
    if (how.smoothing != 0)
      value = (1 - how.smoothing) * value + how.smoothing * (rest - below / double(how.vocab_size));
    value += how.z_loss == 0 ? 0.0 : how.z_loss * (peak + rest) * (peak + rest);
    loss[r] = target[r] == how.ignore_index ? A(0) : A(value);
    norm[2 * r] = A(peak);
    norm[2 * r + 1] = A(rest);
  }
}

// dx = g * ((1 + 2 z lse) p - eps/V - (1 - eps) [column is the target]); dx may be x.
template <class T>
struct Backward {
  using A = acc_t<T>;
  MEGACORE_INLINE static void run(const A* grad, int64_t grad_stride, const T* x, int64_t x_stride, T* dx,
                                  int64_t dx_stride, int64_t columns, int64_t width, const int64_t* target,
                                  const A* norm, int64_t vocab_start, Loss how, int64_t begin, int64_t end) {
    const A spread = A(how.smoothing / double(how.vocab_size)), share = A(1 - how.smoothing);
    for (int64_t r = end - 1; r >= begin; --r) {  // what the statistics read last is still in the cache
      const T* row = x + r * x_stride;
      T* out = dx + r * dx_stride;
      const bool counted = target[r] != how.ignore_index;
      const int64_t real = counted ? columns : 0, hit = target[r] - vocab_start;
      const A g = grad[r * grad_stride], peak = norm[2 * r], rest = norm[2 * r + 1];
      const A extra = A(2 * how.z_loss * (double(peak) + double(rest)));
      const bool owned = hit >= 0 && hit < real;
      const A picked = owned ? A(widen(row[hit])) : A(0);  // before dx, which may be x, is written
#pragma GCC ivdep
      for (int64_t i = 0; i < real; ++i) {
        const A p = exp_of((A(widen(row[i])) - peak) - rest);
        out[i] = narrow<T>(g * ((p - spread) + extra * p));
      }
      if (owned) {  // p - 1 first: near p = 1 that difference is exact, (1 + 2 z lse) p - 1 is not
        const A p = exp_of((picked - peak) - rest);
        out[hit] = narrow<T>(g * (((p - share) - spread) + extra * p));
      }
      for (int64_t i = real; i < width; ++i) out[i] = narrow<T>(A(0));
    }
  }
};

// ---- the torch side ----
at::ScalarType acc_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
int64_t grain(int64_t width) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
}
at::Tensor dense_columns(const at::Tensor& x) {
  return x.stride(1) == 1 ? x : x.contiguous();
}
int64_t true_columns(int64_t width, int64_t vocab_start, int64_t vocab_size) {
  return std::clamp<int64_t>(vocab_size - vocab_start, 0, width);
}

void check_rows(const char* op, const at::Tensor& logits, const at::Tensor& target) {
  check_floating(op, "logits", logits);
  MEGACORE_CHECK(logits.dim() == 2, op, "logits", describe(logits), "2 dimensions, rows x columns");
  MEGACORE_CHECK(target.scalar_type() == at::kLong && target.dim() == 1 && target.size(0) == logits.size(0), op,
                 "target", describe(target), "[" << logits.size(0) << "] Long, one id for each row of logits");
}

at::Tensor cross_entropy_stats(const at::Tensor& logits, const at::Tensor& target, int64_t vocab_start,
                               int64_t vocab_size, int64_t ignore_index) {
  const char* op = "cross_entropy_stats";
  check_rows(op, logits, target);
  const at::Tensor x = dense_columns(logits), y = target.contiguous();
  const int64_t rows = x.size(0), columns = true_columns(x.size(1), vocab_start, vocab_size);
  at::Tensor out = at::empty({rows + 1, 4}, x.options().dtype(acc_type(x)));
  dispatch_storage(x.scalar_type(), op, [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    A* to = out.mutable_data_ptr<A>();
    const T* from = static_cast<const T*>(x.const_data_ptr());
    const int64_t* ids = y.const_data_ptr<int64_t>();
    const int64_t stride = x.stride(0);
    at::parallel_for(0, rows, grain(columns), [=](int64_t begin, int64_t end) {
      run_on_cpu<Stats<T>>(from, stride, columns, ids, vocab_start, ignore_index, to, begin, end);
    });
    const int64_t digits[4] = {vocab_start / kDigit, vocab_start % kDigit, columns / kDigit, columns % kDigit};
    for (int i = 0; i < 4; ++i) to[4 * rows + i] = A(digits[i]);
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> cross_entropy_merge(const at::Tensor& stats, const at::Tensor& target, int64_t ranks,
                                                       int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                                                       double z_loss) {
  const char* op = "cross_entropy_merge";
  const int64_t rows = target.numel();
  MEGACORE_CHECK(stats.scalar_type() == at::kFloat || stats.scalar_type() == at::kDouble, op, "stats", describe(stats),
                 "dtype Float or Double");
  MEGACORE_CHECK(ranks > 0 && stats.dim() == 2 && stats.size(0) == ranks * (rows + 1) && stats.size(1) == 4, op,
                 "stats", describe(stats),
                 "[" << ranks << " * (" << rows << " + 1), 4], the statistics of each rank in turn");
  const at::Tensor all = stats.contiguous(), y = target.contiguous();
  at::Tensor loss = at::empty({rows}, stats.options()), norm = at::empty({rows, 2}, stats.options());
  const Loss how{vocab_size, ignore_index, label_smoothing, z_loss};
  const auto merge = [&](auto kind) {
    using A = decltype(kind);
    const A* from = all.const_data_ptr<A>();
    const int64_t* ids = y.const_data_ptr<int64_t>();
    A *losses = loss.mutable_data_ptr<A>(), *norms = norm.mutable_data_ptr<A>();
    at::parallel_for(0, rows, grain(16 * ranks), [=](int64_t begin, int64_t end) {
      merge_rows(from, ids, rows, ranks, how, losses, norms, begin, end);
    });
  };
  stats.scalar_type() == at::kDouble ? merge(double()) : merge(float());
  return {loss, norm};
}

void write_gradient(const char* op, const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                    const at::Tensor& norm, at::Tensor dx, int64_t vocab_start, Loss how) {
  check_rows(op, logits, target);
  const int64_t rows = logits.size(0), width = logits.size(1),
                columns = true_columns(width, vocab_start, how.vocab_size);
  MEGACORE_CHECK(grad.scalar_type() == acc_type(logits) && grad.dim() == 1 && grad.size(0) == rows, op, "grad",
                 describe(grad), "[" << rows << "] " << acc_type(logits) << ", one for each row of logits");
  MEGACORE_CHECK(norm.scalar_type() == acc_type(logits) && norm.numel() == 2 * rows, op, "norm", describe(norm),
                 "[" << rows << ", 2] " << acc_type(logits) << ", as cross_entropy_merge gives it");
  const at::Tensor x = dense_columns(logits), y = target.contiguous(), scale = norm.contiguous();
  dispatch_storage(x.scalar_type(), op, [&](auto kind) {
    using T = decltype(kind);
    using A = acc_t<T>;
    const A *g = grad.const_data_ptr<A>(), *n = scale.const_data_ptr<A>();
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(dx.mutable_data_ptr());
    const int64_t* ids = y.const_data_ptr<int64_t>();
    const int64_t g_stride = grad.stride(0), x_stride = x.stride(0), dx_stride = dx.stride(0);
    at::parallel_for(0, rows, grain(width), [=](int64_t begin, int64_t end) {
      run_on_cpu<Backward<T>>(g, g_stride, from, x_stride, to, dx_stride, columns, width, ids, n, vocab_start, how,
                              begin, end);
    });
  });
}

at::Tensor cross_entropy_bwd(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& target,
                             const at::Tensor& norm, int64_t vocab_start, int64_t vocab_size, int64_t ignore_index,
                             double label_smoothing, double z_loss) {
  at::Tensor dx = fresh(logits.sizes(), logits.options());
  write_gradient("cross_entropy_bwd", grad, logits, target, norm, dx, vocab_start,
                 {vocab_size, ignore_index, label_smoothing, z_loss});
  return dx;
}

void cross_entropy_bwd_(const at::Tensor& grad, at::Tensor& logits, const at::Tensor& target, const at::Tensor& norm,
                        int64_t vocab_start, int64_t vocab_size, int64_t ignore_index, double label_smoothing,
                        double z_loss) {
  const char* op = "cross_entropy_bwd_";
  MEGACORE_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.stride(0) >= logits.size(1), op, "logits",
                 describe(logits) << " with strides " << logits.strides(), "rows that are dense and do not overlap");
  write_gradient(op, grad, logits, target, norm, logits, vocab_start,
                 {vocab_size, ignore_index, label_smoothing, z_loss});
}

}  // namespace

TORCH_LIBRARY_IMPL(megacore, CPU, m) {
  m.impl("cross_entropy_stats", &cross_entropy_stats);
  m.impl("cross_entropy_merge", &cross_entropy_merge);
  m.impl("cross_entropy_bwd", &cross_entropy_bwd);
  m.impl("cross_entropy_bwd_", &cross_entropy_bwd_);
}

}  // namespace megacore
