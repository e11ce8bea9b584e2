"""Triton's interpreter: tests that run in it, and three of its faults mended.

Triton serves a CPU only in its interpreter, which must be chosen before it is imported: `run_in_the_interpreter` runs
tests in a process of its own. There `mended` (a fixture of the whole session) corrects what the interpreter of Triton
3.6 to 3.9 does, so that the kernel is judged: it cuts fp32 to bf16 off where every GPU rounds
to the nearest, and it multiplies matrices of bf16 as if their bits were integers. And numpy's exp of fp32 is 2.1 units
off where torch's is 0.6.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def run_in_the_interpreter(*paths: Path, select: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", select]
    done = subprocess.run(
        [*command, *map(str, paths)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture(scope="session", autouse=INTERPRETING)
def mended() -> Iterator[None]:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self, src, dst_type):
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            narrow = torch.from_numpy(np.array(src.data, np.float32)).to(torch.bfloat16)
            return TensorHandle(narrow.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle((np.array(src.data, np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self, a, b, d, *rest):
        wide = [self.cast_impl(t, tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b)]
        return dot(self, *wide, d, *rest)

    def create_exp(self, arg):
        return TensorHandle(np.exp(arg.data.astype(np.float64)).astype(arg.data.dtype), arg.dtype.scalar)

    mends = {"cast_impl": cast_impl, "create_dot": create_dot, "create_exp": create_exp}
    originals = {name: getattr(InterpreterBuilder, name) for name in mends}
    for name, mend in mends.items():
        setattr(InterpreterBuilder, name, mend)
    yield
    for name, original in originals.items():
        setattr(InterpreterBuilder, name, original)
