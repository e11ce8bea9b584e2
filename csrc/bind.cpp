// Python sees operators through torch.ops.megacore (ops.cpp); only what is not an operator is bound here.
#include <pybind11/pybind11.h>

#include "cpu/simd.h"
#ifdef MEGACORE_CUDA
#include "cuda/ways.h"
#endif

PYBIND11_MODULE(_C, m) {
  m.def("cpu_path", &megacore::cpu_path, "The instruction set the CPU kernels run on: 'avx512', 'avx2' or 'portable'.");
  m.def("set_cpu_path", &megacore::set_cpu_path, pybind11::arg("name"),
        "For tests and benchmarks, process-wide: run on that instruction set ('': the best there is). False if this "
        "machine lacks it.");
  m.def("set_portable", [](bool on) { megacore::set_cpu_path(on ? "portable" : ""); });
#ifdef MEGACORE_CUDA
  m.attr("built_with_cuda") = true;
  m.def("set_linear_mode", &megacore::cuda::set_linear_mode, pybind11::arg("name"),
        "How CUDA products choose: 'measured' (default), 'first' (the library's proposal) or 'unfused'. Process-wide.");
  m.def("linear_choices", &megacore::cuda::linear_choices, "What CUDA products chose so far, a line each.");
#else
  m.attr("built_with_cuda") = false;
#endif
}
