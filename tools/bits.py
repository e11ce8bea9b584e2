"""python tools/bits.py [ROW...] [-- PYTEST ARGUMENTS]     the tests that compare bits, as other CPUs would run them

A CPU cannot be changed, but the libraries can be held to the instructions of another one: MKL, oneDNN and ATen by their
variables, ours by an option of the tests (tests/bits.py). Each row is one run of `pytest -m bits`. A row that this
machine has no instructions for is named and left out. Ends with 1 if a row is red.

MKL obeys its variable on Intel's CPUs alone; AMX cannot be lent to a CPU that lacks it. Tests of torch.compile are left
to `make test`: inductor compiles for the CPU that it finds, and its cache does not know the variables.
"""

import os
import subprocess
import sys
import time

import torch

from megacore import _C

DEEPEST = ["tests/ops", "tests/parallel", "tests/pipeline", "tests/models", "tests/train", "tests/comm"]
QUICK = [
    "--deselect=tests/ops/test_linear_cuda.py",
    "--ignore=tests/triton_kernels",
    "-k",
    "not interpreter and not compile",
]


def row(mkl: str, onednn: str, aten: str, *ours: str) -> tuple[dict[str, str], tuple[str, ...]]:
    return {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}, ours


ROWS = {  # name: (environment, options of the tests); what it needs is the first word
    "avx2": row("AVX2", "AVX2", "avx2", "--cpu-path=avx2"),
    "avx512": row("AVX512", "AVX512_CORE", "avx512"),
    "avx512-ours": row("AVX2", "AVX512_CORE_BF16", "avx512", "--own-product"),  # AMD with AVX-512: MKL stays at AVX2
    "portable": row("SSE4_2", "SSE41", "default", "--cpu-path=portable"),
    "portable-cbwr": ({"MKL_CBWR": "COMPATIBLE"}, ()),
}


def able(name: str) -> bool:
    found = _C.set_cpu_path(name.split("-")[0])
    _C.set_cpu_path("")
    return found


def run(name: str, extra: list[str]) -> tuple[str, float]:
    """Verdict and seconds."""
    variables, options = ROWS[name]
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=20", "-m", "bits"]
    start = time.monotonic()
    done = subprocess.run([*command, *QUICK, *options, *(extra or DEEPEST)], env=os.environ | variables, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        print(f"--- {name}", done.stdout[-8000:], sep="\n")
    return ("RED, " if done.returncode else "") + (lines[-1] if lines else "nothing said"), time.monotonic() - start


def main(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    names, extra = words[:cut] or list(ROWS), words[cut + 1 :]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        print(f"row {unknown[0]!r} is unknown; choose from {' '.join(ROWS)}", file=sys.stderr)
        return 2
    print(f"this CPU: torch {torch.backends.cpu.get_cpu_capability()}, megacore {_C.cpu_path()}", flush=True)
    red = 0
    for name in names:
        if not able(name):
            print(f"{name:14}: not run, this machine has no such instructions", flush=True)
            continue
        verdict, seconds = run(name, extra)
        red += verdict.startswith("RED")
        said = " ".join([f"{k}={v}" for k, v in ROWS[name][0].items()] + list(ROWS[name][1]))
        print(f"{name:14}: {verdict} ({seconds:.0f} s; {said})", flush=True)
    return int(red > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
