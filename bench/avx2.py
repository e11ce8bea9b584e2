"""Cases as a CPU without 16-bit arithmetic runs them, measured on one that has it.

oneDNN is told by its own variable to stop at AVX2, and our kernels by a switch of the extension. The variable is read
when torch starts: these cases run in a process of their own. It refuses to measure where torch did not become slow,
because the case would then not be what its name says. Everything but the 16-bit products keeps what the CPU has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from bench import harness
from bench.harness import Options
from bench.report import Row, read

VARIABLE, VALUE = "ONEDNN_MAX_CPU_ISA", "AVX2"
SLOWER = 2.0  # with 16-bit arithmetic bf16 is at least as fast as fp32; without it torch takes several times as long


def limited() -> bool:
    return os.environ.get(VARIABLE) == VALUE


def limit_ours() -> None:
    """Tells our kernels, too; refuses where torch is not slow."""
    from megacore import _C

    if hasattr(_C, "set_native_16bit"):
        _C.set_native_16bit(False)
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    narrow_a, narrow_b = a.bfloat16(), b.bfloat16()
    runs = {"fp32": lambda: a @ b, "bf16": lambda: narrow_a @ narrow_b}
    taken = {name: min(seconds) for name, seconds in harness.interleave(runs, 5).items()}
    if taken["bf16"] < SLOWER * taken["fp32"]:
        raise SystemExit(f"{VARIABLE}={VALUE} did not slow torch down: {taken}; isa=avx2 is not measured")


def rows(bench: str, options: Options, cases: list[Mapping[str, object]]) -> Iterator[Row]:
    """The rows of these cases, from a process in which torch has no 16-bit arithmetic."""
    wanted = [t for t in options.threads if any(options.wants(bench, {**c, "threads": t}) for c in cases)]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench", bench, "--json", written, "--rounds", options.rounds]
        command += ["--budget", options.budget, *(["--quick"] if options.quick else [])]
        command += ["--rivals", *options.rivals, "--threads", *wanted]
        asked = {f.get("dir") for f in options.only if any(replace(options, only=(f,)).wants(bench, c) for c in cases)}
        command += [f"--only=dir={asked.pop()}"] if len(asked) == 1 and None not in asked else []
        env = os.environ | {VARIABLE: VALUE}
        done = subprocess.run([str(word) for word in command], env=env, stdout=subprocess.DEVNULL, text=True)
        if done.returncode:
            print(f"- {bench}: isa=avx2 was not measured: exit status {done.returncode}", file=sys.stderr)
            return
        for row in read(written)[1]:
            if options.wants(bench, row.case):
                yield row
