"""Builds megacore._C from csrc/. Metadata lives in pyproject.toml, but for what depends on the torch it is built with.

No -march: the code runs on any x86-64 and builds for arm64; wider instructions are target attributes (csrc/cpu/simd.h).
OpenMP is compiled in but not linked: GOMP_parallel then resolves through libtorch_cpu to the very runtime torch uses,
whatever its file name is in this wheel, so there is one pool of threads and not two.

csrc/cuda is added where torch is a CUDA build and nvcc is found; no GPU is needed. docs/building.md has the details.

torch has no stable C++ interface: an extension loads beside the release it was built with. So the wheel requires that
release, and a .json beside the extension says which it is to whoever imports megacore beside another one. Without torch
only an sdist can be made; tools/backend.py finds the torch of the Python that pip installs into.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
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

from setuptools import Extension, find_packages, setup  # noqa: E402
from setuptools.command.build import build  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

try:
    import torch
except ModuleNotFoundError:
    torch = None
else:
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

os.environ.setdefault("MAX_JOBS", "2")  # a file of ATen headers takes about 1 GB to compile
WITH_CUDA = os.environ.get("MEGACORE_CUDA") != "0"  # 0: the CPU extension, beside a CUDA torch too
CXX = ["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]
NVCC = ["-O3", "-DNDEBUG", "-std=c++17"]
ARCHITECTURES = "8.0+PTX;9.0a"  # A100, H100 and H200; later ones compile sm_80's PTX when they load it


NAMED = f"{sys.implementation.cache_tag}-torch{torch.__version__}" if torch else ""  # another torch is another build
BUILT_LIB = str(Path("build") / f"lib-{NAMED}")


class Build(build):
    """Gathers a wheel's files in a folder of this torch, emptied first: neither another torch's extension, which
    build_ext would take for up to date, nor a module that is gone gets into a wheel."""

    def finalize_options(self) -> None:
        self.build_lib = self.build_lib or BUILT_LIB
        super().finalize_options()

    def run(self) -> None:
        if self.build_lib == BUILT_LIB:
            shutil.rmtree(BUILT_LIB, ignore_errors=True)
        super().run()


if torch:

    class BuildExt(BuildExtension):
        """Keeps its objects where the next build finds them (an editable install would give it a temporary directory),
        and writes beside the library what it was built with."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(Path("build") / NAMED)

        def run(self) -> None:
            super().run()
            (built,) = self.extensions
            kind = {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cuda": torch.version.cuda if ("MEGACORE_CUDA", None) in built.define_macros else None,
            }
            Path(self.record()).write_text(json.dumps(kind) + "\n")

        def record(self) -> str:
            """_C.<tag>.json beside the library _C.<tag>.so, wherever this command was told to put that."""
            return str(Path(self.get_ext_fullpath("megacore._C")).with_suffix(".json"))

        def get_outputs(self) -> list[str]:
            return [*super().get_outputs(), self.record()]

else:

    class BuildExt(build_ext):
        """No extension without torch: a wheel that cannot be imported is none."""

        def run(self) -> None:
            raise SystemExit(f"setup.py: no torch for {sys.executable} to build against; install torch>=2.11 first")


def torch_requirement() -> str:
    """What the wheel asks for: this very release. A release is named by its public version, which the CPU and the CUDA
    build share; a build from source (2.13.0a0+git1234567) by all of it, because no two of them need be alike."""
    if torch is None:
        return "torch>=2.11"  # of an sdist, which no one has built yet
    try:
        version = importlib.metadata.version("torch")  # what pip calls it: torch.__version__ may have +cu130 behind
    except importlib.metadata.PackageNotFoundError:
        version = str(torch.__version__)
    public, _, _ = version.partition("+")
    return f"torch=={public if re.fullmatch(r'[0-9.]+', public) else version}"


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


def check_nvcc() -> None:
    """nvcc and torch of one major release of CUDA, or one line that says what to do."""
    said = subprocess.run([str(Path(CUDA_HOME) / "bin" / "nvcc"), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)", said)
    if found and found[1] != torch.version.cuda.split(".")[0]:
        raise SystemExit(
            f"setup.py: nvcc of {CUDA_HOME} is CUDA {found[1]}, torch's is {torch.version.cuda}; put that nvcc first "
            "in PATH, or build without CUDA kernels: MEGACORE_CUDA=0"
        )


def cuda_arguments() -> dict:
    check_nvcc()
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
    if torch is None:
        return Extension("megacore._C", sources)
    # what the compiler needs; whether a GPU is visible does not matter
    if WITH_CUDA and cuda and torch.version.cuda and CUDA_HOME:
        return CUDAExtension(sources=sources + cuda, **cuda_arguments(), **args)
    return CppExtension(sources=sources, extra_compile_args={"cxx": CXX}, **args)


setup(
    packages=[*find_packages(include=["megacore", "megacore.*"]), "megacore.triton_kernels", "megacore.configs"],
    # `triton_kernels` is the name of another package on PyPI; ours is only ever imported as megacore.triton_kernels
    package_dir={"megacore.triton_kernels": "triton_kernels", "megacore.configs": "configs"},
    package_data={"megacore.configs": ["*.toml"]},
    include_package_data=False,  # MANIFEST.in is for the sdist
    install_requires=[torch_requirement(), "numpy"],
    ext_modules=[extension()],
    cmdclass={"build": Build, "build_ext": BuildExt.with_options(use_ninja=True) if torch else BuildExt},
)
