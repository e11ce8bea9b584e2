"""What csrc/cuda can show without a GPU: its kernels and rules run on the CPU, and the gate on ptxas closes."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIM = ROOT / "tests" / "cuda_on_cpu"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")

SPILLING = """
__global__ void __launch_bounds__(1024) keeps(float* x) {  // 64 registers a thread, 256 values alive at once
  float v[256], sum = 0;
  for (int i = 0; i < 256; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 256; ++i) sum += v[i] * v[i];
  for (int i = 0; i < 256; ++i) x[i * 1024 + threadIdx.x] = v[i] / sum;
}
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("kernels_tool_cuda", ROOT / "tools" / "kernels.py")
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool  # its dataclass looks itself up there
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    out = tmp_path_factory.mktemp("cuda_on_cpu") / "main"
    # the sanitizer stops at a 16-byte access that is not aligned, at an index past an array, at an overflow
    flags = ["-std=c++20", "-O1", "-Wall", "-Wno-unknown-pragmas"]
    flags += ["-fsanitize=alignment,bounds,shift", "-fno-sanitize-recover=all"]
    command = ["g++", *flags, f"-I{SHIM}", f"-I{ROOT / 'csrc'}", str(SHIM / "main.cpp"), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("part", ["activation", "kernels", "gemm", "choice"])
def test_on_the_cpu(program, part):
    """activation: formulas against long double. kernels: every storage type, layout and edge, with guarded and poisoned
    buffers. gemm: the products in the library's terms, read by plain loops. choice: the rules."""
    done = subprocess.run([str(program), part], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvcc
def test_a_kernel_that_spills_fails(tool, tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(SPILLING)
    with pytest.raises(RuntimeError, match="stack frame [1-9]"):
        tool.compile_cuda(source, "80")


@needs_nvcc
def test_a_kernel_that_does_not_compile_says_where(tool, tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void f(float* x) { x[0] = nothing; }\n")
    with pytest.raises(RuntimeError, match=r'"nothing" is undefined'):
        tool.compile_cuda(source, "80")


def test_every_cuda_source_is_free_of_torch():
    for path in [*ROOT.glob("csrc/cuda/*.cu"), *ROOT.glob("csrc/cuda/*.cuh"), ROOT / "csrc/cuda/launch.h"]:
        included = [line for line in path.read_text().splitlines() if line.startswith("#include")]
        assert not [line for line in included if any(word in line for word in ("ATen", "c10", "torch"))], path
