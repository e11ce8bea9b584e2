"""Builds megacore._C from csrc/. Metadata lives in pyproject.toml.

No -march: the code runs on any x86-64 and builds for arm64; wider instructions are target attributes (csrc/cpu/simd.h).
OpenMP is compiled in but not linked: GOMP_parallel then resolves through libtorch_cpu to the very runtime torch uses,
whatever its file name is in this wheel, so there is one pool of threads and not two.
"""

import os
import sys
from glob import glob
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

# A file of ATen headers takes about 1 GB to compile: two at a time.
os.environ["MAX_JOBS"] = str(min(2, int(os.environ.get("MAX_JOBS", "2"))))
CXX = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]


class Build(BuildExtension):
    """Keeps its objects where the next build finds them (an editable install would give it a temporary directory)."""

    def finalize_options(self) -> None:
        super().finalize_options()
        python = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
        self.build_temp = str(Path("build") / python)  # another torch is another build


def extension():
    sources = ["csrc/ops.cpp", "csrc/bind.cpp", *sorted(glob("csrc/cpu/*.cpp") + glob("csrc/comm/*.cpp"))]
    headers = sorted(glob("csrc/*.h") + glob("csrc/*/*.h"))  # named so that a changed header is seen as a change
    cuda = sorted(glob("csrc/cuda/*.cu") + glob("csrc/cuda/*.cpp"))
    args = dict(name="megacore._C", include_dirs=[str(Path("csrc").resolve())], depends=headers)
    if cuda and torch.version.cuda and CUDA_HOME:  # what the compiler needs; whether a GPU is visible does not matter
        return CUDAExtension(sources=sources + cuda, extra_compile_args={"cxx": CXX, "nvcc": ["-O3"]}, **args)
    return CppExtension(sources=sources, extra_compile_args={"cxx": CXX}, **args)


setup(
    packages=[*find_packages(include=["megacore", "megacore.*"]), "megacore.triton_kernels"],
    # `triton_kernels` is the name of another package on PyPI; ours is only ever imported as megacore.triton_kernels
    package_dir={"megacore.triton_kernels": "triton_kernels"},
    ext_modules=[extension()],
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
)
