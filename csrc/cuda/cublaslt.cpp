#include "cuda/cublaslt.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "cuda/choice.h"

namespace megacore::cuda {
namespace {

cudaDataType_t type_of(Storage s) {
  switch (s) {
    case Storage::f32:
      return CUDA_R_32F;
    case Storage::f64:
      return CUDA_R_64F;
    case Storage::bf16:
      return CUDA_R_16BF;
    case Storage::f16:
      return CUDA_R_16F;
  }
  return CUDA_R_32F;
}

cublasLtEpilogue_t library_name(Epilogue e) {
  switch (e) {
    case Epilogue::none:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::gelu_aux:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_aux_bias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::dgelu:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::dgelu_bgrad:
      return CUBLASLT_EPILOGUE_DGELU_BGRAD;
    case Epilogue::bgradb:
      return CUBLASLT_EPILOGUE_BGRADB;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

const char* name_of(Storage s) {
  return s == Storage::f32 ? "fp32" : s == Storage::f64 ? "fp64" : s == Storage::bf16 ? "bf16" : "fp16";
}

const char* name_of(Epilogue e) {
  constexpr const char* names[] = {"none", "bias", "gelu_aux", "gelu_aux_bias", "dgelu", "dgelu_bgrad", "bgradb"};
  return names[int(e)];
}

// The descriptors of a call. They are plain memory: made anew each time, with nothing to free.
struct Described {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, d;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

  explicit Described(const Gemm& g) {
    const bool wide = g.in == Storage::f64;
    const cublasComputeType_t compute = wide     ? CUBLAS_COMPUTE_64F
                                        : g.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                 : CUBLAS_COMPUTE_32F;
    keep(cublasLtMatmulDescInit(&product, compute, wide ? CUDA_R_64F : CUDA_R_32F));
    keep(cublasLtMatrixLayoutInit(&a, type_of(g.in), g.a.rows, g.a.cols, g.a.ld));
    keep(cublasLtMatrixLayoutInit(&b, type_of(g.in), g.b.rows, g.b.cols, g.b.ld));
    keep(cublasLtMatrixLayoutInit(&d, type_of(g.out), g.m, g.n, g.ldd));
    set(CUBLASLT_MATMUL_DESC_TRANSA, g.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, g.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, library_name(g.epilogue));
    // one attribute for both: a bias is read, a bias gradient written
    if (const void* vector = g.bias != nullptr ? g.bias : g.bias_grad) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
    if (g.aux != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.aux_ld);
    }
  }

 private:
  void keep(cublasStatus_t s) {
    if (status == CUBLAS_STATUS_SUCCESS) status = s;
  }
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, V value) {
    keep(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value));
  }
};

struct Preference {
  cublasLtMatmulPreferenceOpaque_t value;
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;

  Preference(const Gemm& g, uint64_t workspace) {
    status = cublasLtMatmulPreferenceInit(&value);
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(alignment(g.a.data)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(alignment(g.b.data)));
    // the epilogue's vectors have no preference of their own: what D may be assumed to be, they must be
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(alignment(g.d)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(alignment_of_outputs(g)));
  }

 private:
  template <class V>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, V v) {
    if (status == CUBLAS_STATUS_SUCCESS) status = cublasLtMatmulPreferenceSetAttribute(&value, attribute, &v, sizeof v);
  }
};

at::Tensor new_workspace(const char* op, int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op, "cudaDeviceGetAttribute");
  const int64_t bytes = int64_t(major >= 9 ? 32 : 4) << 20;
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA, c10::DeviceIndex(device)));
}

}  // namespace

Session current_session(const char* op, int device) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(c10::DeviceIndex(device)).stream();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), op, "cudaStreamIsCapturing");
  const bool capturing = capture != cudaStreamCaptureStatusNone;

  // Never destroyed: at exit the driver may be gone before a destructor here would run.
  static std::mutex& mutex = *new std::mutex;
  static auto& handles = *new std::map<int, cublasLtHandle_t>;  // the library allows a handle to many threads
  static auto& workspaces = *new std::map<std::pair<int, cudaStream_t>, at::Tensor>;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) {
    const cublasStatus_t status = cublasLtCreate(&handle);
    TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, op, ": cublasLtCreate failed with ", cublasLtGetStatusName(status),
                " on device ", device);
  }
  if (capturing) return {device, stream, true, handle, new_workspace(op, device)};
  at::Tensor& workspace = workspaces[{device, stream}];
  if (!workspace.defined()) workspace = new_workspace(op, device);
  return {device, stream, false, handle, workspace};
}

std::vector<cublasLtMatmulAlgo_t> algorithms(const char* op, const Gemm& g, const Session& session, int count) {
  Described described(g);
  check(described.status, op, "the description", g);
  Preference preference(g, session.workspace.numel());
  check(preference.status, op, "the preference", g);
  std::vector<cublasLtMatmulHeuristicResult_t> results(count);
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(session.handle, &described.product, &described.a, &described.b, &described.d,
                                     &described.d, &preference.value, count, results.data(), &found);
  // "nothing for this problem" is an answer; the library gives it in either of two words
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
  check(status, op, "cublasLtMatmulAlgoGetHeuristic", g);
  std::vector<cublasLtMatmulAlgo_t> usable;
  for (int i = 0; i < found; ++i)
    if (results[i].state == CUBLAS_STATUS_SUCCESS) usable.push_back(results[i].algo);
  return usable;
}

cublasStatus_t run(const Gemm& g, const cublasLtMatmulAlgo_t& algorithm, const Session& session) {
  Described described(g);
  if (described.status != CUBLAS_STATUS_SUCCESS) return described.status;
  const float one = 1, beta = g.accumulate ? 1 : 0;
  const double one64 = 1, beta64 = g.accumulate ? 1 : 0;
  const bool wide = g.in == Storage::f64;
  return cublasLtMatmul(session.handle, &described.product, wide ? static_cast<const void*>(&one64) : &one, g.a.data,
                        &described.a, g.b.data, &described.b, wide ? static_cast<const void*>(&beta64) : &beta, g.d,
                        &described.d, g.d, &described.d, &algorithm, session.workspace.data_ptr(),
                        session.workspace.numel(), session.stream);
}

std::string in_words(const Gemm& g) {
  std::ostringstream out;
  out << "m=" << g.m << " n=" << g.n << " k=" << g.k << (g.a.transposed ? " A^T" : " A") << " lda=" << g.a.ld
      << (g.b.transposed ? " B^T" : " B") << " ldb=" << g.b.ld << " ldd=" << g.ldd << ' ' << name_of(g.in) << " -> "
      << name_of(g.out) << (g.accumulate ? " added" : "") << (g.tf32 ? " tf32" : "") << ", epilogue "
      << name_of(g.epilogue);
  return out.str();
}

void check(cublasStatus_t status, const char* op, const char* call, const Gemm& g) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, op, ": ", call, " failed with ", cublasLtGetStatusName(status), " for ",
              in_words(g));
}

void check(cudaError_t status, const char* op, const char* call) {
  TORCH_CHECK(status == cudaSuccess, op, ": ", call, " failed with ", cudaGetErrorName(status), " (",
              cudaGetErrorString(status), ")");
}

}  // namespace megacore::cuda
