#include "cuda/ways.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <iomanip>
#include <sstream>

#include "cuda/cublaslt.h"

namespace megacore::cuda {
namespace {

constexpr int kPerWay = 4, kRounds = 5;

struct Plan {
  size_t way;
  cublasLtMatmulAlgo_t algorithm;
  std::string told;  // for linear_choices()
};

std::atomic<Mode> mode{Mode::measured};

Choices<Plan>& choices() {
  static auto& kept = *new Choices<Plan>;
  return kept;
}

std::vector<Plan> candidates(const char* op, const std::vector<Way>& ways, Mode mode, const Session& session) {
  std::vector<Plan> plans;
  bool unfused_found = false;
  for (size_t w = 0; w < ways.size(); ++w) {
    if (!considered(ways[w].rank, mode, unfused_found)) continue;
    for (const auto& algorithm : algorithms(op, ways[w].gemm, session, mode == Mode::measured ? kPerWay : 1)) {
      plans.push_back({w, algorithm, ""});
      unfused_found |= ways[w].rank == Rank::unfused;
    }
  }
  return plans;
}

void launch(const char* op, const Way& way, const Plan& plan, const Session& session) {
  check(run(way.gemm, plan.algorithm, session), op, "cublasLtMatmul", way.gemm);
  if (way.after) check(way.after(session.stream), op, "its elementwise kernel");
}

class Events {  // a pair of times on a stream, in milliseconds
 public:
  explicit Events(const char* op) : op_(op) {
    for (cudaEvent_t& e : events_) check(cudaEventCreate(&e), op, "cudaEventCreate");
  }
  ~Events() {
    for (cudaEvent_t e : events_) static_cast<void>(cudaEventDestroy(e));
  }
  Events(const Events&) = delete;
  void record(int i, cudaStream_t stream) { check(cudaEventRecord(events_[i], stream), op_, "cudaEventRecord"); }
  float elapsed() {
    float ms = 0;
    check(cudaEventSynchronize(events_[1]), op_, "cudaEventSynchronize");
    check(cudaEventElapsedTime(&ms, events_[0], events_[1]), op_, "cudaEventElapsedTime");
    return ms;
  }

 private:
  const char* op_;
  cudaEvent_t events_[2] = {};
};

// Times of each plan, none for one that the library refuses to run.
std::vector<std::vector<float>> measure(const char* op, const std::vector<Way>& ways, const std::vector<Plan>& plans,
                                        const Session& session) {
  std::vector<std::vector<float>> times(plans.size());
  std::vector<bool> runs(plans.size());
  for (size_t i = 0; i < plans.size(); ++i)  // loads the kernel, too
    runs[i] = run(ways[plans[i].way].gemm, plans[i].algorithm, session) == CUBLAS_STATUS_SUCCESS;
  Events events(op);
  for (int round = 0; round < kRounds; ++round)
    for (size_t i = 0; i < plans.size(); ++i) {
      if (!runs[i]) continue;
      events.record(0, session.stream);
      launch(op, ways[plans[i].way], plans[i], session);
      events.record(1, session.stream);
      times[i].push_back(events.elapsed());
    }
  return times;
}

// The ways with an output of their own in place of one that they would add to.
std::vector<Way> harmless(const std::vector<Way>& ways, int device, at::Tensor& scratch) {
  std::vector<Way> copies = ways;
  for (Way& way : copies) {
    Gemm& g = way.gemm;
    if (!g.accumulate) continue;
    if (!scratch.defined())
      scratch = at::zeros({g.ldd * g.n * bytes_of(g.out)},
                          at::TensorOptions().dtype(at::kByte).device(at::kCUDA, c10::DeviceIndex(device)));
    g.d = scratch.data_ptr();
  }
  return copies;
}

std::string tell(const char* op, const std::vector<Way>& ways, const std::vector<Plan>& plans, size_t chosen,
                 const std::vector<std::vector<float>>& times) {
  constexpr const char* names[] = {"fused", "unfused", "unfused, bias in the kernel"};
  std::ostringstream out;
  out << op << ": " << names[int(ways[plans[chosen].way].rank)] << " for " << in_words(ways[plans[chosen].way].gemm);
  out << std::fixed << std::setprecision(1);
  for (size_t i = 0; i < times.size(); ++i)
    out << (i ? ", " : "; us: ") << names[int(ways[plans[i].way].rank)] << (i == chosen ? "* " : " ")
        << median(times[i]) * 1e3f;
  return out.str();
}

Plan choose(const char* op, const Key& key, const std::vector<Way>& ways, Mode mode, const Session& session) {
  std::vector<Plan> plans = candidates(op, ways, mode, session);
  TORCH_CHECK(!plans.empty(), op, ": cuBLASLt has no algorithm without split-K for ", in_words(ways.back().gemm));
  std::vector<std::vector<float>> times;
  size_t chosen = 0;
  if (mode == Mode::measured && plans.size() > 1) {
    at::Tensor scratch;
    std::vector<Way> copies;
    try {
      copies = harmless(ways, session.device, scratch);
    } catch (const c10::OutOfMemoryError&) {
      return plans[0];  // not kept: a later call may have the room
    }
    times = measure(op, copies, plans, session);
    const auto found = fastest(times);
    TORCH_CHECK(found.has_value(), op, ": cublasLtMatmul runs none of the ", plans.size(), " proposals for ",
                in_words(ways.back().gemm));
    chosen = *found;
  }
  plans[chosen].told = tell(op, ways, plans, chosen, times);
  return choices().keep(key, plans[chosen]);
}

}  // namespace

void run_fastest(const char* op, int device, const std::vector<Way>& ways) {
  const Session session = current_session(op, device);
  const bool deterministic = at::globalContext().deterministicAlgorithms();
  const Mode now = effective(mode, session.capturing, deterministic);
  const auto key_of = [&](Mode m) {
    Key key{device, int64_t(m)};
    for (const Way& way : ways) append(key, way.gemm), key.push_back(int64_t(way.rank));
    return key;
  };
  // Under capture a choice that an earlier call measured holds too: a graph computes what its warm-up did.
  if (now != mode && !deterministic)
    if (const auto plan = choices().find(key_of(Mode::measured))) return launch(op, ways[plan->way], *plan, session);
  const Key key = key_of(now);
  auto plan = choices().find(key);
  if (!plan) plan = choose(op, key, ways, now, session);
  launch(op, ways[plan->way], *plan, session);
}

void set_linear_mode(const std::string& name) {
  const auto wanted = mode_named(name);
  TORCH_CHECK_VALUE(wanted.has_value(), "set_linear_mode: name is '", name,
                    "'; wanted 'measured', 'first' or 'unfused'");
  mode = *wanted;
}

std::string linear_choices() {
  std::string lines;
  choices().each([&](const Plan& plan) { lines += plan.told + "\n"; });
  return lines;
}

}  // namespace megacore::cuda
