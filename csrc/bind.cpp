// Python sees operators through torch.ops.megacore (ops.cpp); only what is not an operator is bound here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/native.h"
#include "cpu/simd.h"

PYBIND11_MODULE(_C, m) {
  m.def("cpu_path", &megacore::cpu_path, "The instruction set the CPU kernels run on: 'avx2' or 'portable'.");
  m.def("set_portable", &megacore::set_portable, pybind11::arg("on"),
        "For tests: run the CPU kernels on the portable path although AVX2 is there. Process-wide.");
  m.def(
      "native_bf16", [] { return megacore::native(c10::kBFloat16); }, "Whether this CPU multiplies matrices in bf16.");
  m.def("native_fp16", [] { return megacore::native(c10::kHalf); }, "Whether this CPU multiplies matrices in fp16.");
  m.def(
      "set_native_16bit", &megacore::set_native_16bit, pybind11::arg("on"),
      "For tests and benchmarks: matrix products of bf16 and fp16 as on a CPU that has arithmetic of them (True), that "
      "has not (False), or as this CPU is (None). Process-wide.");
}
