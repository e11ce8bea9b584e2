// Which of several ways computes a product: the rules, without CUDA. tests/cuda_on_cpu runs them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda/gemm.h"

namespace megacore::cuda {

// measured: the fastest of all, timed at the first call of a problem and kept while the process lives.
// first: the library's first proposal, fused where it has one. Nothing is timed, so every process chooses the same.
// unfused: the same without fused epilogues; the activation is a kernel of its own.
enum class Mode { measured, first, unfused };

inline std::optional<Mode> mode_named(const std::string& name) {
  if (name == "measured") return Mode::measured;
  if (name == "first") return Mode::first;
  if (name == "unfused") return Mode::unfused;
  return std::nullopt;
}

// fused: the activation in the GEMM's epilogue. unfused: GEMM (and bias), then one kernel. last: for problems whose
// unfused way the library does not have, such as a bias epilogue in fp64.
enum class Rank { fused, unfused, last };

inline bool considered(Rank rank, Mode mode, bool unfused_found) {
  if (rank == Rank::fused) return mode != Mode::unfused;
  return rank == Rank::unfused || !unfused_found;
}

// Timing waits for the GPU, which a stream under capture forbids; without it the mode is `first`.
inline Mode effective(Mode mode, bool capturing, bool deterministic) {
  return mode == Mode::measured && (capturing || deterministic) ? Mode::first : mode;
}

inline float median(std::vector<float> times) {
  if (times.empty()) return std::numeric_limits<float>::infinity();
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// The first candidate within `margin` of the smallest median: noise alone does not prefer a later one. A candidate
// without times could not run. nullopt where none could.
inline std::optional<size_t> fastest(const std::vector<std::vector<float>>& times, float margin = 0.01f) {
  std::vector<float> medians;
  for (const auto& t : times) medians.push_back(median(t));
  const auto best = std::min_element(medians.begin(), medians.end());
  if (best == medians.end() || *best == std::numeric_limits<float>::infinity()) return std::nullopt;
  const float bound = *best * (1 + margin);
  return std::find_if(medians.begin(), medians.end(), [&](float m) { return m <= bound; }) - medians.begin();
}

// The largest power of two up to 256 that divides an address: which vector accesses an algorithm may use.
inline int64_t alignment(const void* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  int64_t bytes = 256;
  while (address % bytes != 0) bytes /= 2;
  return bytes;
}

// The least alignment of D and of what the epilogue reads and writes beside it; a null pointer is aligned.
inline int64_t alignment_of_outputs(const Gemm& g) {
  return std::min({alignment(g.d), alignment(g.bias), alignment(g.bias_grad), alignment(g.aux)});
}

// Everything that an algorithm's speed or admissibility depends on, as numbers.
using Key = std::vector<int64_t>;

inline void append(Key& key, const Gemm& g) {
  key.insert(key.end(), {g.m,
                         g.n,
                         g.k,
                         g.a.ld,
                         g.a.transposed,
                         g.b.ld,
                         g.b.transposed,
                         g.ldd,
                         int64_t(g.in),
                         int64_t(g.out),
                         g.accumulate,
                         g.tf32,
                         int64_t(g.epilogue),
                         g.aux_ld,
                         alignment(g.a.data),
                         alignment(g.b.data),
                         alignment(g.d),
                         alignment(g.bias),
                         alignment(g.bias_grad),
                         alignment(g.aux)});
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (const int64_t v : key) {
      h = (h ^ uint64_t(v)) * 0xff51afd7ed558ccdu;
      h ^= h >> 32;
    }
    return size_t(h);
  }
};

// Plans that were chosen. The first that is kept for a key stays: threads that chose at the same time go on alike.
template <class Plan>
class Choices {
 public:
  std::optional<Plan> find(const Key& key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = plans_.find(key);
    return it == plans_.end() ? std::nullopt : std::optional<Plan>(it->second);
  }
  Plan keep(const Key& key, const Plan& plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return plans_.emplace(key, plan).first->second;
  }
  void each(const std::function<void(const Plan&)>& f) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, plan] : plans_) f(plan);
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    plans_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<Key, Plan, KeyHash> plans_;
};

}  // namespace megacore::cuda
