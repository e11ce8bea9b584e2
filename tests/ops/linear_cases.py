"""The linear family as one table, its inputs, and the ways in which an operator can be served here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore import _C
from megacore.ops import implementations, linear, linear_gelu, linear_swiglu, use
from tests.oracle import DTYPES

IMPLS = implementations("linear_gelu", "cpu")  # "triton" too in the interpreter: tests/triton_kernels
KERNELS = [impl for impl in IMPLS if impl != "reference"]
# the C++ kernels without wider instructions; as on a CPU with and one without 16-bit arithmetic
PATHS = [*KERNELS, "cpp-avx2", "cpp-portable", "cpp-native16", "cpp-widened"]
DTYPES_OF = {path: [d for d in DTYPES if d != torch.float64 or path != "triton"] for path in [*PATHS, "reference"]}
DTYPES_OF |= {path: [torch.bfloat16, torch.float16] for path in ("cpp-native16", "cpp-widened")}
SERVED = [(path, dtype) for path, dtypes in DTYPES_OF.items() for dtype in dtypes]  # what each path is tested with
SUFFIX = {"cpp": "", "triton": "_triton"}
FUNCTIONS = {"linear": linear, "linear_gelu": linear_gelu, "linear_swiglu": linear_swiglu}


@dataclass(frozen=True)
class Case:
    op: str
    approximate: str | None = None
    halves: int = 1

    @property
    def form(self) -> tuple[str, ...]:
        return () if self.approximate is None else (self.approximate,)

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None, **more) -> Tensor:
        more |= {} if self.approximate is None else {"approximate": self.approximate}
        return FUNCTIONS[self.op](x, w, b, **more)

    def act(self, pre: Tensor) -> Tensor:
        if self.op == "linear_swiglu":
            gate, up = pre.chunk(2, -1)
            return F.silu(gate) * up
        return pre if self.approximate is None else F.gelu(pre, approximate=self.approximate)

    def plain(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return self.act(F.linear(x, w, b))

    def raw(self, impl: str):
        return getattr(torch.ops.megacore, self.op + SUFFIX[impl]).default

    def raw_dpre(self, impl: str):
        return getattr(torch.ops.megacore, f"{self.op}_dpre{SUFFIX[impl]}").default

    def inputs(self, m, k, n, dtype, bias=True, seed=0) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x [m, k], weight, bias and dy [m, n]."""
        g = torch.Generator().manual_seed(seed)
        rows = n * self.halves
        x = torch.randn(m, k, generator=g, dtype=torch.float64).to(dtype)
        w = (torch.randn(rows, k, generator=g, dtype=torch.float64) / max(k, 1) ** 0.5).to(dtype)
        b = torch.randn(rows, generator=g, dtype=torch.float64).to(dtype) if bias else None
        dy = torch.randn(m, n, generator=g, dtype=torch.float64).to(dtype)
        return x, w, b, dy


CASES = [
    Case("linear"),
    Case("linear_gelu", "tanh"),
    Case("linear_gelu", "none"),
    Case("linear_swiglu", halves=2),
]
ACTIVATED = CASES[1:]


def name(value) -> str | None:
    return "-".join((value.op, *value.form)) if isinstance(value, Case) else None


def with_gradients(f, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> list[Tensor]:
    """y, dx, dw and db."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    y = f(leaves[0], leaves[1], leaves[2] if b is not None else None)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@contextmanager
def serving(path: str) -> Iterator[str]:
    """The implementation, named as in PATHS, serves the family."""
    impl, _, kind = path.partition("-")
    if not _C.set_cpu_path(kind if kind in ("avx2", "portable") else ""):
        pytest.skip(f"this machine has no {kind}")
    _C.set_native_16bit({"native16": True, "widened": False}.get(kind))
    try:
        with use(impl, "linear"), use(impl, "linear_gelu"), use(impl, "linear_swiglu"):
            yield impl
    finally:
        _C.set_cpu_path("")
        _C.set_native_16bit(None)
