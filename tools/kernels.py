"""Compiles every kernel for machines that are not here: `make kernels`.

1. csrc/cuda/*.cu by nvcc alone for sm_80 and sm_90a. Fails on register spills, stack frames, C7508 (setmaxnreg ignored)
   and C7510 (wgmma serialised). Without nvcc: skipped, and says so.
2. Every Triton kernel ahead of time for sm_80 and sm_90, from the table AOT beside it (kernel -> [(signature,
   constexprs, options)]; a type that ends with :16 says that the address or number is a multiple of 16, as the launch
   finds out). Fails on a spill, on more shared memory than a block may have, on a kernel without entry, and where the
   machine code of a kernel with a matrix product of 16 bits has none of the matrix instructions (HGMMA, HMMA).
3. csrc/*.cpp and csrc/cpu/*.cpp for arm64 by aarch64-linux-gnu-g++ with the flags of setup.py, against torch's headers.

One row an item; the exit code is non-zero when a row failed. Nothing here runs a kernel.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NVCC_TARGETS = ("80", "90a")
TRITON_TARGETS = {
    80: 163 * 1024,
    90: 227 * 1024,
}  # shared memory a block may have, bytes (CUDA C guide, table of capabilities)
COMPILER = "aarch64-linux-gnu-g++"
PROBE = "__global__ void probe(float* x) { x[threadIdx.x] *= 2.f; }\n"


@dataclass(frozen=True)
class Row:
    item: str
    target: str
    state: str  # "ok", "FAILED", "skipped"
    detail: str = ""


def timed(item: str, target: str, work: Callable[[], str]) -> Row:
    """The row of one compilation: `work` returns a detail or raises RuntimeError with the reason."""
    start = time.perf_counter()
    try:
        state, detail = "ok", work()
    except RuntimeError as error:
        state, detail = "FAILED", str(error)
    return Row(item, target, state, f"{detail} [{time.perf_counter() - start:.1f} s]")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("\n".join((done.stderr or done.stdout).strip().splitlines()[-12:]))
    return done.stdout + done.stderr


# ---- CUDA C++ ----


def ptxas_faults(text: str) -> list[str]:
    """What `ptxas -v` said that must not be: spilled bytes, a stack frame, a warning that costs the fast path."""
    found = re.findall(r"C75(?:08|10)[^\n]*", text)
    for stack, stores, loads in re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text
    ):
        if any(map(int, (stack, stores, loads))):
            found.append(f"stack frame {stack} B, spill stores {stores} B, spill loads {loads} B")
    return found


def compile_cuda(source: Path, arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-O3", "-DNDEBUG", "-std=c++17", "-Icsrc", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        text = run([*command, "-Xptxas", "-v", "-c", str(source), "-o", f"{folder}/out.o"])
    if faults := ptxas_faults(text):
        raise RuntimeError("; ".join(faults))
    return "registers " + "/".join(re.findall(r"Used (\d+) registers", text))


def cuda_rows() -> Iterator[Row]:
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    if not shutil.which("nvcc"):
        yield Row(f"{len(sources)} .cu files", "sm_80 sm_90a", "skipped", "no nvcc on this machine")
        return
    with tempfile.TemporaryDirectory() as folder:
        items = {str(path.relative_to(ROOT)): path for path in sources}
        if not items:
            probe = Path(folder) / "probe.cu"
            probe.write_text(PROBE)
            items = {"0 .cu files; a probe": probe}
        for name, path in items.items():
            for arch in NVCC_TARGETS:
                yield timed(name, f"sm_{arch}", lambda p=path, a=arch: compile_cuda(p, a))


# ---- Triton ----


def load_kernels(folder: Path) -> dict[str, object]:
    """The modules of the package in `folder`, loaded by path: no build is needed, the bare name never imported."""
    alias = "megacore_kernels_ahead_of_time"
    spec = importlib.util.spec_from_file_location(
        alias, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[alias] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return {name: importlib.import_module(f"{alias}.{name}") for name in names}


def compile_triton(kernel: object, entry: tuple[dict, dict, dict], capability: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constexprs, options = entry
    if missing := [name for name in kernel.arg_names if name not in types and name not in constexprs]:
        raise RuntimeError(f"its AOT entry has no type for {', '.join(missing)}")
    signature = {name: "constexpr" if name in constexprs else types[name].split(":")[0] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if name not in constexprs and types[name].endswith(":16")]
    source = ASTSource(kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    try:
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage, code = run([tool, "--dump-resource-usage", file.name]), run([tool, "-sass", file.name])
    registers, stack, local = (int(re.search(rf"\b{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK", "LOCAL"))
    if stack or local:
        raise RuntimeError(
            f"spills: stack {stack} B, local {local} B a thread at {registers} registers; shrink the tile or add warps"
        )
    if built.metadata.shared > TRITON_TARGETS[capability]:
        raise RuntimeError(f"shared memory {built.metadata.shared} B is above {TRITON_TARGETS[capability]} B")
    if fault := matrix_fault(built.asm["ttir"], code, capability):
        raise RuntimeError(fault)
    return f"registers {registers}, shared {built.metadata.shared} B"


def matrix_fault(source: str, code: str, capability: int) -> str:
    """What is wrong with the machine code of a kernel whose source multiplies matrices of 16 bits; else nothing."""
    products = [line for line in source.splitlines() if "tt.dot" in line and re.search(r"x(bf16|f16)>", line)]
    wanted = "HGMMA" if capability == 90 else "HMMA"
    if products and not re.search(rf"\b{wanted}\b", code):
        return f"no {wanted} in the machine code of a product of 16-bit matrices"
    if products and capability == 90 and re.search(r"\bHMMA\b", code):
        return "HMMA beside HGMMA: a product that took the slow path"
    return f"{local[0]} in the machine code: local memory" if (local := re.findall(r"\b(?:LDL|STL)\b", code)) else ""


def describe(entry: tuple[dict, dict, dict]) -> str:
    types, constexprs, _ = entry
    pointer = next((kind for name, kind in types.items() if kind.startswith("*")), "")
    return " ".join([pointer, *(f"{name}={value}" for name, value in constexprs.items())])


def triton_rows(folder: Path) -> Iterator[Row]:
    if importlib.util.find_spec("triton") is None:
        yield Row("Triton kernels", "sm_80 sm_90", "FAILED", "no triton; run `make build`, or `pip install triton`")
        return
    from triton.runtime import JITFunction

    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    for name, module in load_kernels(folder).items():
        kernels = {
            n: k for n, k in vars(module).items() if isinstance(k, JITFunction) and k.fn.__module__ == module.__name__
        }
        table = getattr(module, "AOT", {})
        helpers = getattr(module, "DEVICE_FUNCTIONS", ())  # called by kernels, never launched
        for kernel in (k for k in kernels if k not in helpers):
            if not table.get(kernel):
                yield Row(
                    f"{name}.{kernel}", "sm_80 sm_90", "FAILED", f"no entry in AOT of triton_kernels/{name}.py; add one"
                )
            for entry in table.get(kernel, ()):
                for cap in TRITON_TARGETS:
                    label = f"{name}.{kernel} {describe(entry)}"
                    yield timed(label, f"sm_{cap}", lambda k=kernels[kernel], e=entry, c=cap: compile_triton(k, e, c))
        if not kernels and name != "__init__":
            yield Row(name, "-", "FAILED", "no Triton kernel found; is TRITON_INTERPRET set? unset it")


# ---- arm64 ----


def build_flags() -> list[str]:
    """CXX of setup.py, read and not imported: importing it would run the build."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CXX":
            return ast.literal_eval(node.value)
    raise RuntimeError("setup.py assigns no list CXX; tools/kernels.py takes the compiler flags from it")


def compile_arm(source: Path) -> str:
    import torch
    from torch.utils.cpp_extension import include_paths

    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    if importlib.util.find_spec("pybind11"):
        includes.append(importlib.import_module("pybind11").get_include())
    command = [
        COMPILER,
        "-std=c++20" if torch.__version__ >= "2.12" else "-std=c++17",
        "-fPIC",
        *build_flags(),
        "-Icsrc",
    ]
    command += [flag for path in includes for flag in ("-isystem", path)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.o"
        run(
            [
                *command,
                "-DTORCH_EXTENSION_NAME=_C",
                "-DTORCH_API_INCLUDE_EXTENSION_H",
                "-c",
                str(source),
                "-o",
                str(out),
            ]
        )
        return f"{out.stat().st_size >> 10} KiB"


def arm_rows(allow_missing: bool) -> Iterator[Row]:
    sources = sorted([*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc" / "cpu").glob("*.cpp")])
    if not shutil.which(COMPILER):
        state = "skipped" if allow_missing else "FAILED"
        yield Row(
            f"{len(sources)} .cpp files",
            "arm64",
            state,
            f"no {COMPILER}; `apt-get install g++-aarch64-linux-gnu`, or --allow-missing",
        )
        return
    with ThreadPoolExecutor(2) as pool:  # about 1 GB each
        yield from pool.map(
            lambda path: timed(str(path.relative_to(ROOT)), "arm64", lambda: compile_arm(path)), sources
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow-missing", action="store_true", help="skip arm64 where its compiler is not installed")
    parser.add_argument("--only", choices=("cuda", "triton", "arm"), help="one of the three parts")
    parser.add_argument("--triton", type=Path, default=ROOT / "triton_kernels", help="folder of the Triton kernels")
    args = parser.parse_args()
    parts = {"cuda": cuda_rows, "triton": lambda: triton_rows(args.triton), "arm": lambda: arm_rows(args.allow_missing)}
    failed = total = 0
    for name, rows in parts.items():
        for row in rows() if args.only in (None, name) else ():
            print(f"{row.state:8} {row.target:12} {row.item}  {row.detail}", flush=True)
            failed += row.state == "FAILED"
            total += 1
    print(f"{total - failed} of {total} rows are as they must be" + (f"; {failed} FAILED" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
