// The linear family on CUDA: check, guard, allocate, and launch on the current stream. Formulas:
// megacore/ops/linear.py. The products go through cuBLASLt (ways.h decides how), what is left through the kernels of
// launch.h.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/cublaslt.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/ways.h"

namespace megacore::cuda {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

cudaStream_t stream_of(const at::Tensor& t) {
  return c10::cuda::getCurrentCUDAStream(t.get_device()).stream();
}

void zero(const char* op, const at::Tensor& t) {
  if (t.numel() == 0) return;  // its address is null
  check(cudaMemsetAsync(t.data_ptr(), 0, t.numel() * t.element_size(), stream_of(t)), op, "cudaMemsetAsync");
}

bool tf32(Storage s) {
  return s == Storage::f32 && at::globalContext().allowTF32CuBLAS();
}

// The library's GELU is an approximation of some 11 bits: enough below fp32, not for it.
bool library_gelu_serves(Activation a, Storage s, int64_t columns) {
  return a == Activation::gelu_tanh && bytes_of(s) == 2 && aux_fits(columns, columns);
}

void check_weight(const char* op, const at::Tensor& weight, int dim, int64_t size, const char* of) {
  MEGACORE_CHECK(weight.dim() == 2 && weight.size(dim) == size, op, "weight", describe(weight),
                 (dim == 1 ? "[N, " : "[") << size << (dim == 1 ? "], " : ", K], ") << of);
}

// x [..., K], weight [N, K], bias [N] -> y [..., N / parts], pre [..., N]; the same tensor for `none`.
Pair forward(const char* op, const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
             Activation act) {
  check_floating(op, "x", x);
  check_same(op, "weight", weight, "x", x);
  MEGACORE_CHECK(x.dim() >= 1, op, "x", describe(x), "[..., K]");
  const int64_t k = x.size(-1), parts = parts_of(act);
  check_weight(op, weight, 1, k, "the last size of x");
  const int64_t n = weight.size(0);
  MEGACORE_CHECK(n % parts == 0, op, "weight", describe(weight), "an even number of rows: gate, then up");
  if (bias) {
    check_same(op, "bias", *bias, "x", x);
    MEGACORE_CHECK(bias->dim() == 1 && bias->size(0) == n, op, "bias", describe(*bias),
                   "[" << n << "], the rows of weight");
  }
  const c10::cuda::CUDAGuard guard(x.device());
  const Operand xs = operand(as_rows(x)), ws = operand(weight);
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  const void* b_data = bias ? b.data_ptr() : nullptr;
  const Storage s = storage_of(op, x);
  const int64_t rows = xs.matrix.rows, columns = n / parts;
  const at::Tensor pre = at::empty(with_last(x.sizes(), n), x.options());
  const at::Tensor y = act == Activation::none ? pre : at::empty(with_last(x.sizes(), columns), x.options());
  if (pre.numel() == 0) return {y, pre};

  const ForwardPass pass{pre.data_ptr(), nullptr, act == Activation::none ? nullptr : y.data_ptr(), rows, columns};
  ForwardPass with_bias = pass;
  with_bias.bias = b_data;
  if (k == 0) {
    zero(op, pre);
    check(launch_forward(act, s, with_bias, stream_of(x)), op, "its elementwise kernel");
    return {y, pre};
  }
  Gemm product = forward_gemm(xs.matrix, ws.matrix, pre.data_ptr(), s);
  product.tf32 = tf32(s);
  std::vector<Way> ways;
  if (library_gelu_serves(act, s, columns)) {
    Gemm fused = product;
    fused.epilogue = bias ? Epilogue::gelu_aux_bias : Epilogue::gelu_aux;
    fused.d = y.data_ptr(), fused.aux = pre.data_ptr(), fused.aux_ld = n, fused.bias = b_data;
    ways.push_back({Rank::fused, fused, nullptr});
  }
  const auto kernel = [=](const ForwardPass& p) {
    return [=](cudaStream_t t) { return launch_forward(act, s, p, t); };
  };
  Gemm biased = product;
  biased.epilogue = bias ? Epilogue::bias : Epilogue::none, biased.bias = b_data;
  ways.push_back({Rank::unfused, biased, nullptr});
  if (act != Activation::none) ways.back().after = kernel(pass);
  if (bias) ways.push_back({Rank::last, product, kernel(with_bias)});
  run_fastest(op, x.get_device(), ways);
  return {y, pre};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return std::get<0>(forward("linear", x, weight, bias, Activation::none));
}

Pair linear_gelu(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                 c10::string_view approximate) {
  return forward("linear_gelu", x, weight, bias, gelu_named("linear_gelu", approximate));
}

Pair linear_swiglu(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return forward("linear_swiglu", x, weight, bias, Activation::swiglu);
}

struct Scratch {  // partial sums of a bias gradient, and its result
  at::Tensor partial, dbias;
};

Scratch scratch_for(Activation act, Storage s, int64_t rows, int64_t columns, bool bias_grad, const at::Tensor& like) {
  const int64_t bytes = bias_grad ? backward_scratch(act, s, rows, columns) : 0;
  return {at::empty({bytes}, like.options().dtype(at::kByte)),
          at::empty({bias_grad ? parts_of(act) * columns : 0}, like.options())};
}

BackwardPass pass_over(const at::Tensor& rows_of_dy, const at::Tensor& pre, const at::Tensor& dpre,
                       const Scratch& scratch, bool bias_grad) {
  return {rows_of_dy.data_ptr(),
          rows_of_dy.size(0) <= 1 ? rows_of_dy.size(1) : rows_of_dy.stride(0),
          pre.defined() ? pre.data_ptr() : nullptr,
          dpre.defined() ? dpre.data_ptr() : nullptr,
          bias_grad ? scratch.dbias.data_ptr() : nullptr,
          bias_grad ? scratch.partial.data_ptr() : nullptr,
          rows_of_dy.size(0),
          rows_of_dy.size(1)};
}

at::Tensor rows_unit_stride(const at::Tensor& t) {  // rows may lie anywhere, or be one row expanded
  const at::Tensor rows = as_rows(t);
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// dy [..., N / parts] any strides, pre [..., N] -> dpre [..., N], dbias [N] (empty unless asked for).
Pair dpre(const char* op, const at::Tensor& dy, const at::Tensor& pre, bool bias_grad, Activation act) {
  check_floating(op, "pre", pre);
  check_same(op, "dy", dy, "pre", pre);
  const int64_t parts = parts_of(act);
  MEGACORE_CHECK(pre.dim() >= 1 && pre.size(-1) % parts == 0, op, "pre", describe(pre), "[..., gate and up]");
  const int64_t columns = pre.size(-1) / parts;
  const std::vector<int64_t> wanted = with_last(pre.sizes(), columns);
  MEGACORE_CHECK(dy.sizes() == at::IntArrayRef(wanted), op, "dy", describe(dy),
                 at::IntArrayRef(wanted) << ", the shape of y");
  const c10::cuda::CUDAGuard guard(pre.device());
  const Storage s = storage_of(op, pre);
  const at::Tensor g = rows_unit_stride(dy), p = pre.contiguous();
  const at::Tensor out = at::empty(pre.sizes(), pre.options());
  const Scratch scratch = scratch_for(act, s, g.size(0), columns, bias_grad, pre);
  check(launch_backward(act, s, pass_over(g, p, out, scratch, bias_grad), stream_of(pre)), op,
        "its elementwise kernel");
  return {out, scratch.dbias};
}

Pair linear_gelu_dpre(const at::Tensor& dy, const at::Tensor& pre, bool bias_grad, c10::string_view approximate) {
  return dpre("linear_gelu_dpre", dy, pre, bias_grad, gelu_named("linear_gelu_dpre", approximate));
}

Pair linear_swiglu_dpre(const at::Tensor& dy, const at::Tensor& pre, bool bias_grad) {
  return dpre("linear_swiglu_dpre", dy, pre, bias_grad, Activation::swiglu);
}

at::Tensor sum_of_rows(const char* op, const at::Tensor& dpre) {
  const Storage s = storage_of(op, dpre);
  const at::Tensor rows = rows_unit_stride(dpre);
  const Scratch scratch = scratch_for(Activation::none, s, rows.size(0), rows.size(1), true, dpre);
  check(launch_backward(Activation::none, s, pass_over(rows, {}, {}, scratch, true), stream_of(dpre)), op,
        "its elementwise kernel");
  return scratch.dbias;
}

at::Tensor linear_dbias(const at::Tensor& dpre) {
  constexpr const char* op = "linear_dbias";
  check_floating(op, "dpre", dpre);
  MEGACORE_CHECK(dpre.dim() >= 1, op, "dpre", describe(dpre), "[..., N]");
  const c10::cuda::CUDAGuard guard(dpre.device());
  return sum_of_rows(op, dpre);
}

// dx [..., K] = dpre [..., N] weight [N, K]; null where there is nothing to sum.
struct InputGradient {
  Operand dpre, weight;
  at::Tensor dx;
  Gemm product;
};

InputGradient input_gradient(const char* op, const at::Tensor& dpre, const at::Tensor& weight) {
  const Operand d = operand(as_rows(dpre)), w = operand(weight);
  const at::Tensor dx = at::empty(with_last(dpre.sizes(), weight.size(1)), dpre.options());
  const Storage s = storage_of(op, dpre);
  Gemm product = dgrad_gemm(d.matrix, w.matrix, dx.data_ptr(), s);
  product.tf32 = tf32(s);
  return {d, w, dx, product};
}

void check_dgrad(const char* op, const at::Tensor& dpre, const at::Tensor& weight) {
  check_floating(op, "dpre", dpre);
  check_same(op, "weight", weight, "dpre", dpre);
  MEGACORE_CHECK(dpre.dim() >= 1, op, "dpre", describe(dpre), "[..., N]");
  check_weight(op, weight, 0, dpre.size(-1), "the last size of dpre");
}

at::Tensor linear_dgrad(const at::Tensor& dpre, const at::Tensor& weight) {
  constexpr const char* op = "linear_dgrad";
  check_dgrad(op, dpre, weight);
  const c10::cuda::CUDAGuard guard(dpre.device());
  const InputGradient g = input_gradient(op, dpre, weight);
  if (g.dx.numel() == 0) return g.dx;
  if (g.product.k == 0)
    zero(op, g.dx);
  else
    run_fastest(op, dpre.get_device(), {{Rank::unfused, g.product, nullptr}});
  return g.dx;
}

// The gradient of a linear layer's input through the GELU that made it:  dpre_below = gelu'(pre) * (dpre weight).
// dpre [..., N], weight [N, K], pre [..., K] -> dpre_below [..., K], dbias [K] (empty unless asked for).
Pair linear_gelu_dgrad(const at::Tensor& dpre, const at::Tensor& weight, const at::Tensor& pre, bool bias_grad,
                       c10::string_view approximate) {
  constexpr const char* op = "linear_gelu_dgrad";
  const Activation act = gelu_named(op, approximate);
  check_dgrad(op, dpre, weight);
  check_same(op, "pre", pre, "dpre", dpre);
  check_rows(op, "pre", pre, "dpre", dpre);
  const int64_t columns = weight.size(1);
  MEGACORE_CHECK(pre.size(-1) == columns, op, "pre", describe(pre), "[..., " << columns << "], the columns of weight");
  const c10::cuda::CUDAGuard guard(dpre.device());
  const InputGradient g = input_gradient(op, dpre, weight);
  const at::Tensor p = pre.contiguous(), dx = as_rows(g.dx);
  const Storage s = storage_of(op, dpre);
  const Scratch scratch = scratch_for(act, s, dx.size(0), columns, bias_grad, pre);
  const BackwardPass pass = pass_over(dx, p, dx, scratch, bias_grad);  // in place
  const auto kernel = [=](cudaStream_t t) { return launch_backward(act, s, pass, t); };
  if (dx.numel() == 0 || g.product.k == 0) {
    zero(op, dx);
    check(kernel(stream_of(dx)), op, "its elementwise kernel");
    return {g.dx, scratch.dbias};
  }
  std::vector<Way> ways;
  if (library_gelu_serves(act, s, columns)) {
    Gemm fused = g.product;
    fused.epilogue = bias_grad ? Epilogue::dgelu_bgrad : Epilogue::dgelu;
    fused.aux = p.data_ptr(), fused.aux_ld = columns, fused.bias_grad = pass.dbias;
    ways.push_back({Rank::fused, fused, nullptr});
  }
  ways.push_back({Rank::unfused, g.product, kernel});
  run_fastest(op, dpre.get_device(), ways);
  return {g.dx, scratch.dbias};
}

struct WeightGradient {
  Operand dpre, x;
  Storage s;
};

WeightGradient weight_gradient(const char* op, const at::Tensor& dpre, const at::Tensor& x) {
  check_floating(op, "dpre", dpre);
  check_same(op, "x", x, "dpre", dpre);
  check_rows(op, "x", x, "dpre", dpre);
  return {operand(as_rows(dpre)), operand(as_rows(x)), storage_of(op, x)};
}

// dW [N, K] = dpre^T x, and with_bias: dbias [N].
Pair new_weight_gradient(const char* op, const at::Tensor& dpre, const at::Tensor& x, bool with_bias) {
  const WeightGradient g = weight_gradient(op, dpre, x);
  const c10::cuda::CUDAGuard guard(dpre.device());
  const int64_t n = dpre.size(-1), k = x.size(-1);
  const at::Tensor dw = at::empty({n, k}, x.options()), dbias = at::empty({with_bias ? n : 0}, x.options());
  if (dw.numel() == 0 || g.x.matrix.rows == 0) {
    zero(op, dw);
    return {dw, with_bias ? sum_of_rows(op, dpre) : dbias};
  }
  Gemm product = wgrad_gemm(g.dpre.matrix, g.x.matrix, dw.data_ptr(), k, g.s, g.s);
  product.tf32 = tf32(g.s);
  std::vector<Way> ways;
  if (with_bias && bytes_of(g.s) == 2) {  // of fp32 the library might sum rounded factors
    Gemm fused = product;
    fused.epilogue = Epilogue::bgradb, fused.bias_grad = dbias.data_ptr();
    ways.push_back({Rank::fused, fused, nullptr});
  }
  ways.push_back({Rank::unfused, product, nullptr});
  const at::Tensor rows = with_bias ? rows_unit_stride(dpre) : at::Tensor();
  const Scratch scratch = scratch_for(Activation::none, g.s, g.dpre.matrix.rows, n, with_bias, dpre);
  if (with_bias) {
    BackwardPass pass = pass_over(rows, {}, {}, scratch, true);
    pass.dbias = dbias.data_ptr();
    ways.back().after = [=](cudaStream_t t) { return launch_backward(Activation::none, g.s, pass, t); };
  }
  run_fastest(op, dpre.get_device(), ways);
  return {dw, dbias};
}

at::Tensor linear_wgrad(const at::Tensor& dpre, const at::Tensor& x) {
  return std::get<0>(new_weight_gradient("linear_wgrad", dpre, x, false));
}

Pair linear_wgrad_dbias(const at::Tensor& dpre, const at::Tensor& x) {
  return new_weight_gradient("linear_wgrad_dbias", dpre, x, true);
}

void linear_wgrad_(const at::Tensor& dpre, const at::Tensor& x, at::Tensor& main_grad) {
  constexpr const char* op = "linear_wgrad_";
  const WeightGradient g = weight_gradient(op, dpre, x);
  const int64_t n = dpre.size(-1), k = x.size(-1);
  const auto wanted = g.s == Storage::f64 ? at::kDouble : at::kFloat;
  MEGACORE_CHECK(main_grad.device() == x.device() && main_grad.scalar_type() == wanted, op, "main_grad",
                 describe(main_grad), wanted << " on " << x.device());
  MEGACORE_CHECK(main_grad.dim() == 2 && main_grad.size(0) == n && main_grad.size(1) == k, op, "main_grad",
                 describe(main_grad), "[" << n << ", " << k << "], the shape of the weight");
  const c10::cuda::CUDAGuard guard(dpre.device());
  const bool rows_whole = (k <= 1 || main_grad.stride(1) == 1) && (n <= 1 || main_grad.stride(0) >= k);
  MEGACORE_CHECK(rows_whole, op, "main_grad", describe(main_grad) << " with strides " << main_grad.strides(),
                 "rows that are contiguous");
  if (main_grad.numel() == 0 || g.x.matrix.rows == 0) return;
  const int64_t ld = n <= 1 ? k : main_grad.stride(0);
  Gemm product = wgrad_gemm(g.dpre.matrix, g.x.matrix, main_grad.data_ptr(), ld, g.s,
                            g.s == Storage::f64 ? Storage::f64 : Storage::f32);
  product.tf32 = tf32(g.s), product.accumulate = true;
  run_fastest(op, dpre.get_device(), {{Rank::unfused, product, nullptr}});
}

}  // namespace

TORCH_LIBRARY_IMPL(megacore, CUDA, m) {
  m.impl("linear", linear);
  m.impl("linear_gelu", linear_gelu);
  m.impl("linear_swiglu", linear_swiglu);
  m.impl("linear_gelu_dpre", linear_gelu_dpre);
  m.impl("linear_swiglu_dpre", linear_swiglu_dpre);
  m.impl("linear_dgrad", linear_dgrad);
  m.impl("linear_gelu_dgrad", linear_gelu_dgrad);
  m.impl("linear_wgrad", linear_wgrad);
  m.impl("linear_wgrad_", linear_wgrad_);
  m.impl("linear_wgrad_dbias", linear_wgrad_dbias);
  m.impl("linear_dbias", linear_dbias);
}

}  // namespace megacore::cuda
