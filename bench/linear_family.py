"""What the benchmarks of linear, linear_gelu and linear_swiglu share.    x [M, K], weight [N, K], bias [N] -> [M, N]

Limit: the matrix products (one forward, two more backward) at the measured peak, or reading x and the weight and
writing the pre-activation and the output, whichever takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import avx2, operators
from bench.harness import Options
from bench.limits import Limit, Limits
from bench.operators import DTYPES, Operator, Problem, dims
from bench.report import Row

GPU_SHAPES = ("8192x2048x1024", "8192x4096x2048", "8192x8192x4096", "8192x12288x6144")  # M, K, N


def arguments(m: int, k: int, n: int, dtype: torch.dtype, device: str, bias: bool = True) -> list[Tensor]:
    """x, weight and bias, all wanting gradients. Pre-activations are about N(0, 1)."""
    drawn = [torch.randn(m, k, device=device), torch.randn(n, k, device=device) * k**-0.5]
    drawn += [torch.randn(n, device=device)] if bias else []
    return [t.to(dtype).requires_grad_() for t in drawn]


def bounds(limits: Limits, m: int, k: int, n: int, out: int, itemsize: int) -> dict[str, Limit]:
    """`out` columns are written beside the N of the pre-activation."""
    once = {"flops": 2.0 * m * k * n, "nbytes": float(itemsize * (m * k + n * k + m * n + m * out))}
    return {"fwd": limits.least(**once), "fwd+bwd": limits.least(**{what: 3 * value for what, value in once.items()})}


def linear_alone(inputs: list[Tensor]) -> dict[str, dict[str, Callable[[], object]]]:
    """F.linear on the same tensors: what no forward can undercut that uses it."""
    own = operators.copies(inputs)
    return {"fwd": {"linear-alone": lambda: operators.forward(F.linear, own)}}


def rows(
    bench: str,
    options: Options,
    cases: list[Mapping[str, object]],
    make: Callable[[Mapping[str, object], Limits], Problem],
) -> Iterator[Row]:
    """Those with isa=avx2 in a process of their own, whose torch has no 16-bit arithmetic."""
    if avx2.limited():
        avx2.limit_ours()
        yield from operators.sweep(bench, options, [c for c in cases if c.get("isa") == "avx2"], make)
        return
    yield from operators.sweep(bench, options, [c for c in cases if "isa" not in c], make)
    if options.device == "cpu":
        yield from avx2.rows(bench, options, [c for c in cases if c.get("isa") == "avx2"])


def problem(
    bench: str,
    case: Mapping[str, object],
    limits: Limits,
    ours: Operator,
    torchs: Operator,
    rivals: Mapping[str, Callable[[], Operator]],
    *,
    gated: bool = False,
    bias: bool = True,
    device: str,
) -> Problem:
    """`gated`: the weight has 2N rows, of gate and up, for N outputs."""
    m, k, out = dims(case)
    n, dtype = (2 * out if gated else out), DTYPES[str(case["dtype"])]
    inputs = arguments(m, k, n, dtype, device, bias)
    dy = torch.randn(m, out, device=device).to(dtype)
    least = bounds(limits, m, k, n, out, dtype.itemsize)
    rivals = operators.torch_rivals(torchs) | dict(rivals)
    floors = linear_alone(inputs)
    forward_only = tuple(name for name in ("onednn", "cublaslt") if name in rivals)
    return Problem(bench, case, ours, torchs, inputs, dy, least, rivals, forward_only, floors=floors)
