// Every operator of megacore, one line each. Kernels: cpu/<operator>.cpp. Formula, fake, gradient: megacore/ops/<operator>.py.
#include <torch/library.h>

TORCH_LIBRARY(megacore, m) {
  m.def("linear_gelu(Tensor x, Tensor weight, Tensor? bias, str approximate) -> (Tensor y, Tensor pre)");
  m.def("linear_gelu_dpre(Tensor dy, Tensor pre, bool bias_grad, str approximate) -> (Tensor dpre, Tensor dbias)");
  m.def("dropout(Tensor x, float p, SymInt key, Tensor sample, Tensor position, SymInt feature_start, SymInt features, SymInt group_start) -> Tensor");
}
