// Python sees operators through torch.ops.megacore (ops.cpp); only what is not an operator is bound here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/native.h"
#include "cpu/simd.h"
#ifdef MEGACORE_CUDA
#include "cuda/ways.h"
#endif

PYBIND11_MODULE(_C, m) {
  m.def("cpu_path", &megacore::cpu_path, "The instruction set the CPU kernels run on: 'avx512', 'avx2' or 'portable'.");
  m.def("set_cpu_path", &megacore::set_cpu_path, pybind11::arg("name"),
        "For tests and benchmarks, process-wide: run on that instruction set ('': the best there is). False if this "
        "machine lacks it.");
  m.def("own_product", &megacore::multiplies_faster, "Whether large fp32 matrix products are ours on this path.");
  m.def(
      "set_own_product", &megacore::set_own_product, pybind11::arg("on"),
      "For tests: large fp32 products by ours (True), by the library (False), or as this CPU is (None). Process-wide.");
  m.def(
      "native_bf16", [] { return megacore::native(c10::kBFloat16); }, "Whether this CPU multiplies matrices in bf16.");
  m.def("native_fp16", [] { return megacore::native(c10::kHalf); }, "Whether this CPU multiplies matrices in fp16.");
  m.def(
      "set_native_16bit", &megacore::set_native_16bit, pybind11::arg("on"),
      "For tests and benchmarks: matrix products of bf16 and fp16 as on a CPU that has arithmetic of them (True), that "
      "has not (False), or as this CPU is (None). Process-wide.");
#ifdef MEGACORE_CUDA
  m.attr("built_with_cuda") = true;
  m.def("set_linear_mode", &megacore::cuda::set_linear_mode, pybind11::arg("name"),
        "How CUDA products choose: 'measured' (default), 'first' (the library's proposal) or 'unfused'. Process-wide.");
  m.def("linear_choices", &megacore::cuda::linear_choices, "What CUDA products chose so far, a line each.");
#else
  m.attr("built_with_cuda") = false;
#endif
}
