// Dropout keyed by coordinates. Philox4x32-10 (Salmon et al., SC11).
//
// Element (b, g, s, f) of x has the index  e = (group_start + g) * features + feature_start + f  within its sample and
// position, and its draw is word  e % 4  of Philox(counter, key) with
//     counter = { low 32 bits of e / 4,  low 32 bits of position,  low 32 bits of sample,  high 32 bits of sample }
//     key     = { low 32 bits of key,  high 32 bits of key }.
// It is kept when  draw >= floor(p * 2^32)  (unsigned), and is then x * (1 / (1 - p)): the factor is rounded to the
// accumulation type (fp32; fp64 for fp64), the product to the storage type. A dropped element is +0, whatever x was.
// Every implementation must give these bits: a mask does not depend on the layout, the device or the order of the work.
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/storage.h"

namespace megacore {
namespace {

constexpr int64_t kBlocks = 32,
                  kDraws = 4 * kBlocks;  // counters per batch; with fewer GCC unrolls before it vectorises

// draws[4 * i + w] = word w of Philox({block + i, position, sample lo, sample hi}, key), i < kBlocks
MEGACORE_INLINE void philox(uint32_t* __restrict draws, uint32_t block, uint32_t position, uint64_t sample,
                            uint64_t key) {
  constexpr uint64_t word = 0xFFFFFFFFu;  // words lie in the low halves of 64-bit lanes, where their products fit
  uint64_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (int i = 0; i < kBlocks; ++i) {
    c0[i] = uint32_t(block + uint32_t(i));
    c1[i] = position;
    c2[i] = sample & word;
    c3[i] = sample >> 32;
  }
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t a = (c0[i] & word) * 0xD2511F53u, b = (c2[i] & word) * 0xCD9E8D57u;
      c0[i] = (b >> 32) ^ c1[i] ^ k0;
      c2[i] = (a >> 32) ^ c3[i] ^ k1;
      c1[i] = b;
      c3[i] = a;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kBlocks; ++i) {
    draws[4 * i] = uint32_t(c0[i]);
    draws[4 * i + 1] = uint32_t(c1[i]);
    draws[4 * i + 2] = uint32_t(c2[i]);
    draws[4 * i + 3] = uint32_t(c3[i]);
  }
}

template <class T>
struct Row {  // one (b, g, s): features e .. e + count - 1
  MEGACORE_INLINE static void run(const T* x, int64_t xs, T* y, int64_t ys, int64_t count, uint64_t e,
                                  uint32_t position, uint64_t sample, uint64_t key, uint32_t threshold,
                                  acc_t<T> scale) {
    uint32_t draws[kDraws];
    for (int64_t done = 0; done < count;) {
      const int64_t lane = int64_t(e % 4), n = std::min<int64_t>(kDraws - lane, count - done);
      philox(draws, uint32_t(e / 4), position, sample, key);
      const T* from = x + done * xs;
      T* to = y + done * ys;
      if (xs == 1 && ys == 1)
        for (int64_t i = 0; i < n; ++i) to[i] = draws[lane + i] >= threshold ? narrow<T>(widen(from[i]) * scale) : T{};
      else
        for (int64_t i = 0; i < n; ++i)
          to[i * ys] = draws[lane + i] >= threshold ? narrow<T>(widen(from[i * xs]) * scale) : T{};
      done += n;
      e += uint64_t(n);
    }
  }
};

void check(const at::Tensor& x, double p, const at::Tensor& sample, const at::Tensor& position, int64_t feature_start,
           int64_t features, int64_t group_start) {
  constexpr const char* op = "dropout";
  check_floating(op, "x", x);
  MEGACORE_CHECK(x.dim() == 3 || x.dim() == 4, op, "x", describe(x), "[B, S, F] or [B, G, S, F]");
  MEGACORE_CHECK(p >= 0 && p < 1, op, "p", p, "0 <= p < 1");
  const int64_t b = x.size(0), s = x.size(-2), f = x.size(-1), g = x.dim() == 4 ? x.size(1) : 1;
  const auto same = sample.device() == x.device() && position.device() == x.device();
  MEGACORE_CHECK(same, op, "sample and position", sample.device() << " and " << position.device(),
                 "device " << x.device() << " as x");
  MEGACORE_CHECK(sample.scalar_type() == at::kLong && sample.dim() == 1 && sample.size(0) == b, op, "sample",
                 describe(sample), "[" << b << "] Long, one per batch row of x");
  const bool fits = (position.dim() == 1 || (position.dim() == 2 && position.size(0) == b)) && position.size(-1) == s;
  MEGACORE_CHECK(position.scalar_type() == at::kLong && fits, op, "position", describe(position),
                 "[" << s << "] or [" << b << ", " << s << "] Long");
  MEGACORE_CHECK(group_start >= 0, op, "group_start", group_start, "0 or more");
  MEGACORE_CHECK(feature_start >= 0 && feature_start + f <= features, op, "feature_start", feature_start,
                 "a slice of " << f << " features inside features=" << features);
  // the counter's first word holds e / 4
  MEGACORE_CHECK(features == 0 || group_start + g <= (int64_t(1) << 34) / features, op, "features", features,
                 "(group_start + groups) * features of at most 2^34");
}

at::Tensor dropout(const at::Tensor& x, double p, int64_t key, const at::Tensor& sample, const at::Tensor& position,
                   int64_t feature_start, int64_t features, int64_t group_start) {
  check(x, p, sample, position, feature_start, features, group_start);
  const at::Tensor y = at::empty_like(x);
  const at::Tensor x4 = x.dim() == 4 ? x : x.unsqueeze(1), y4 = y.dim() == 4 ? y : y.unsqueeze(1);
  const int64_t groups = x4.size(1), seq = x4.size(2), count = x4.size(3);
  const int64_t ps = position.stride(-1), pb = position.dim() == 2 ? position.stride(0) : 0, ss = sample.stride(0);
  const int64_t *samples = data<int64_t>(sample), *positions = data<int64_t>(position);
  const uint32_t threshold = uint32_t(std::floor(p * 4294967296.0));
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(count, 1));

  dispatch_storage(x.scalar_type(), "dropout", [&](auto zero) {
    using T = decltype(zero);
    const T* in = data<T>(x4);
    T* out = data<T>(y4);
    const auto scale = acc_t<T>(1.0 / (1.0 - p));
    at::parallel_for(0, x4.size(0) * groups * seq, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t s = i % seq, g = i / seq % groups, b = i / seq / groups;
        run_on_cpu<Row<T>>(in + b * x4.stride(0) + g * x4.stride(1) + s * x4.stride(2), x4.stride(3),
                           out + b * y4.stride(0) + g * y4.stride(1) + s * y4.stride(2), y4.stride(3), count,
                           uint64_t((group_start + g) * features + feature_start), uint32_t(positions[b * pb + s * ps]),
                           uint64_t(samples[b * ss]), uint64_t(key), threshold, scale);
      }
    });
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(megacore, CPU, m) {
  m.impl("dropout", dropout);
}

}  // namespace megacore
