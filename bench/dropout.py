"""dropout (counter-based, mask never stored) against F.dropout (mask stored).    x [B, S, F] -> [B, S, F]

Limit: one read and one write of the tensor in each direction, at the measured bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import operators
from bench.harness import Options
from bench.limits import Limits
from bench.operators import DTYPES, Problem, dims
from bench.poison import poisoned
from bench.report import Row
from megacore.ops import dropout, use

P = 0.1
KEY = 0x5DEECE66D


def cases(options: Options) -> list[dict[str, object]]:
    """Shape: B, S, F."""
    if options.quick:
        return [{"dtype": "fp32", "shape": "2x16x32"}]
    if options.device == "cuda":
        return [{"dtype": "bf16", "shape": "4x4096x4096"}]
    return [{"dtype": "fp32", "shape": shape} for shape in ("4x1024x768", "4x256x256")]


def rows(options: Options) -> Iterator[Row]:
    yield from operators.sweep(
        "dropout", options, cases(options), lambda case, limits: _problem(case, limits, options.device)
    )


def _problem(case: dict[str, object], limits: Limits, device: str) -> Problem:
    shape, dtype = dims(case), DTYPES[str(case["dtype"])]
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)
    sample, position = (torch.arange(size, device=device) for size in shape[:2])

    def ours(x):
        return dropout(x, P, key=KEY, sample=sample, position=position)

    def torchs(x):
        return F.dropout(x, P)

    once = float(x.nbytes)
    least = {"fwd": limits.least(nbytes=2 * once), "fwd+bwd": limits.least(nbytes=4 * once)}
    rivals = {"torch-eager": lambda: torchs}
    return Problem("dropout", case, ours, torchs, (x,), dy, least, rivals, verify=lambda: _verify(ours, x, dy, device))


def _verify(ours: operators.Operator, x: torch.Tensor, dy: torch.Tensor, device: str) -> None:
    """The mask is that of the plain-torch Philox, bit for bit, forward and backward, and drops the share it should."""
    with poisoned():
        got = operators.outcome(ours, (x,), dy)
    with use("reference", "dropout", device):
        wanted = operators.outcome(ours, (x,), dy)
    if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
        raise AssertionError("dropout: other bits than the reference; not timed")
    dropped = float((got[0] == 0).double().mean())
    if abs(dropped - P) > 5 * (P * (1 - P) / x.numel()) ** 0.5:
        raise AssertionError(f"dropout: drops {dropped:.4f} of the elements at p={P}; not timed")
