// Every operator of megacore, one line each. Formula, fake and gradient: megacore/ops/<operator>.py.
//
// Kernels of linear, linear_gelu, linear_swiglu and their parts: cpu/linear.cpp, cpu/linear_backward.cpp; where built
// with CUDA, cuda/register.cpp. Of dropout and cross_entropy_*: cpu/dropout.cpp, cpu/cross_entropy.cpp. Of *_triton:
// triton_kernels/, called from megacore/ops. cross_entropy and linear_cross_entropy are made of these, in megacore/ops.
#include <torch/library.h>

// clang-format off: a schema is one line
TORCH_LIBRARY(megacore, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linear_gelu(Tensor x, Tensor weight, Tensor? bias, str approximate) -> (Tensor y, Tensor pre)");
  m.def("linear_swiglu(Tensor x, Tensor weight, Tensor? bias) -> (Tensor y, Tensor pre)");
  m.def("linear_gelu_dpre(Tensor dy, Tensor pre, bool bias_grad, str approximate) -> (Tensor dpre, Tensor dbias)");
  m.def("linear_swiglu_dpre(Tensor dy, Tensor pre, bool bias_grad) -> (Tensor dpre, Tensor dbias)");
  m.def("linear_dgrad(Tensor dpre, Tensor weight) -> Tensor");
  m.def("linear_gelu_dgrad(Tensor dpre, Tensor weight, Tensor pre, bool bias_grad, str approximate) -> (Tensor dpre_below, Tensor dbias)");
  m.def("linear_wgrad(Tensor dpre, Tensor x) -> Tensor");
  m.def("linear_wgrad_(Tensor dpre, Tensor x, Tensor(a!) main_grad) -> ()");
  m.def("linear_wgrad_dbias(Tensor dpre, Tensor x) -> (Tensor dw, Tensor dbias)");
  m.def("linear_dbias(Tensor dpre) -> Tensor");
  m.def("matmul_into(Tensor a, Tensor b, Tensor(a!) out, bool add) -> ()");
  m.def("linear_triton(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linear_gelu_triton(Tensor x, Tensor weight, Tensor? bias, str approximate) -> (Tensor y, Tensor pre)");
  m.def("linear_swiglu_triton(Tensor x, Tensor weight, Tensor? bias) -> (Tensor y, Tensor pre)");
  m.def("linear_gelu_dpre_triton(Tensor dy, Tensor pre, bool bias_grad, str approximate) -> (Tensor dpre, Tensor dbias)");
  m.def("linear_swiglu_dpre_triton(Tensor dy, Tensor pre, bool bias_grad) -> (Tensor dpre, Tensor dbias)");
  m.def("dropout(Tensor x, float p, SymInt key, Tensor sample, Tensor position, SymInt feature_start, SymInt features, SymInt group_start) -> Tensor");
  m.def("dropout_triton(Tensor x, float p, SymInt key, Tensor sample, Tensor position, SymInt feature_start, SymInt features, SymInt group_start) -> Tensor");
  m.def("cross_entropy(Tensor logits, Tensor target, SymInt vocab_start, SymInt vocab_size, str group, int ignore_index, float label_smoothing, float z_loss, bool inplace_backward, str impl) -> (Tensor loss, Tensor norm)");
  m.def("cross_entropy_stats(Tensor logits, Tensor target, SymInt vocab_start, SymInt vocab_size, int ignore_index) -> Tensor");
  m.def("cross_entropy_merge(Tensor stats, Tensor target, int ranks, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> (Tensor loss, Tensor norm)");
  m.def("cross_entropy_bwd(Tensor grad, Tensor logits, Tensor target, Tensor norm, SymInt vocab_start, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor");
  m.def("cross_entropy_bwd_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor norm, SymInt vocab_start, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> ()");
  m.def("cross_entropy_stats_triton(Tensor logits, Tensor target, SymInt vocab_start, SymInt vocab_size, int ignore_index) -> Tensor");
  m.def("cross_entropy_merge_triton(Tensor stats, Tensor target, int ranks, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> (Tensor loss, Tensor norm)");
  m.def("cross_entropy_bwd_triton(Tensor grad, Tensor logits, Tensor target, Tensor norm, SymInt vocab_start, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> Tensor");
  m.def("cross_entropy_bwd_triton_(Tensor grad, Tensor(a!) logits, Tensor target, Tensor norm, SymInt vocab_start, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss) -> ()");
  m.def("linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, SymInt vocab_start, SymInt vocab_size, str group, int ignore_index, float label_smoothing, float z_loss, str reduction, float scale, SymInt chunk_rows, bool x_grad, bool weight_grad, bool bias_grad, str impl) -> (Tensor loss, Tensor norm, Tensor dx, Tensor dweight, Tensor dbias)");
  m.def("linear_cross_entropy_bwd(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor norm, SymInt vocab_start, SymInt vocab_size, int ignore_index, float label_smoothing, float z_loss, SymInt chunk_rows, bool x_grad, bool weight_grad, bool bias_grad, str impl) -> (Tensor dx, Tensor dweight, Tensor dbias)");
}
