"""Builds megacore._C from csrc/. Metadata lives in pyproject.toml.

No -march: the code runs on any x86-64 and builds for arm64; wider instructions are target attributes (csrc/cpu/simd.h).
OpenMP is compiled in but not linked: GOMP_parallel then resolves through libtorch_cpu to the very runtime torch uses,
whatever its file name is in this wheel, so there is one pool of threads and not two.

csrc/cuda is added where torch is a CUDA build and nvcc is found; no GPU is needed. docs/building.md has the details.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path


def cuda_home() -> str | None:
    """Where nvcc's own headers and libraries are. torch takes the folder above nvcc's, which is wrong for a wrapper
    script; nvcc says it itself."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return None
    said = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", said.stdout + said.stderr, re.M)
    return str(Path(top[1].strip()).resolve()) if top else None


if "CUDA_HOME" not in os.environ and (found := cuda_home()):
    os.environ["CUDA_HOME"] = found  # before cpp_extension is imported, which reads it once

import torch  # noqa: E402
from setuptools import find_packages, setup  # noqa: E402
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension  # noqa: E402

os.environ.setdefault("MAX_JOBS", "2")  # a file of ATen headers takes about 1 GB to compile
WITH_CUDA = os.environ.get("MEGACORE_CUDA") != "0"  # 0: the CPU extension, beside a CUDA torch too
CXX = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]
NVCC = ["-O3", "-DNDEBUG", "-std=c++17"]
ARCHITECTURES = "8.0+PTX;9.0a"  # A100, H100 and H200; later ones compile sm_80's PTX when they load it


class Build(BuildExtension):
    """Keeps its objects where the next build finds them (an editable install would give it a temporary directory)."""

    def finalize_options(self) -> None:
        super().finalize_options()
        python = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
        self.build_temp = str(Path("build") / python)  # another torch is another build


def toolkit(name: str, folder: str) -> Path:
    """A file of the CUDA toolkit: in CUDA_HOME, or in the nvidia-* packages that torch's wheels depend on.

    They lie in nvidia/cu13/{include,lib} for CUDA 13 and in nvidia/<library>/{include,lib} for CUDA 12.
    """
    packages = getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or []
    roots = [Path(CUDA_HOME), *sorted(path for package in packages for path in Path(package).glob("*"))]
    places = [root / sub for root in roots for sub in ((folder, "lib64") if folder == "lib" else (folder,))]
    for place in places:
        if matches := sorted(place.glob(name)):
            return matches[0]
    raise SystemExit(f"setup.py: {name} of the CUDA toolkit is in none of {', '.join(map(str, places))}")


def cuda_arguments() -> dict:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    # cublasLt.h may come from a package: searched after nvcc's own headers, and by the host compiler alone
    headers = toolkit("cublasLt.h", "include").parent
    return dict(
        define_macros=[("MEGACORE_CUDA", None)],
        library_dirs=[str(toolkit("libcudart.so", "lib").parent)],
        # by its file: packages have no libcublasLt.so for -l. Torch has loaded this very library by the time we are
        extra_link_args=[str(toolkit("libcublasLt.so*", "lib"))],
        extra_compile_args={"cxx": [*CXX, "-idirafter", str(headers)], "nvcc": NVCC},
    )


def extension():
    sources = ["csrc/ops.cpp", "csrc/bind.cpp", *sorted(glob("csrc/cpu/*.cpp") + glob("csrc/comm/*.cpp"))]
    headers = sorted(glob("csrc/*.h") + glob("csrc/*/*.h") + glob("csrc/*/*.cuh"))  # a changed header is a change
    cuda = sorted(glob("csrc/cuda/*.cu") + glob("csrc/cuda/*.cpp"))
    args = dict(name="megacore._C", include_dirs=[str(Path("csrc").resolve())], depends=headers)
    if (
        WITH_CUDA and cuda and torch.version.cuda and CUDA_HOME
    ):  # what the compiler needs; whether a GPU is visible does not matter
        return CUDAExtension(sources=sources + cuda, **cuda_arguments(), **args)
    return CppExtension(sources=sources, extra_compile_args={"cxx": CXX}, **args)


setup(
    packages=[*find_packages(include=["megacore", "megacore.*"]), "megacore.triton_kernels"],
    # `triton_kernels` is the name of another package on PyPI; ours is only ever imported as megacore.triton_kernels
    package_dir={"megacore.triton_kernels": "triton_kernels"},
    ext_modules=[extension()],
    cmdclass={"build_ext": Build.with_options(use_ninja=True)},
)
