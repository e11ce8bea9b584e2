"""linear_cross_entropy against F.cross_entropy(F.linear(x, w), target).    x [R, K], w [V, K], target [R] -> mean loss

Limit: three matrix products of 2 R K V operations at the measured peak, forward and backward together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import operators
from bench.harness import Options
from bench.limits import Limits
from bench.linear_family import arguments
from bench.operators import DTYPES, Problem, dims, ours_named
from bench.report import Row


def cases(options: Options) -> list[dict[str, object]]:
    """Shape: R, K, V."""
    if options.device == "cuda":
        return [{"dtype": "bf16", "shape": "64x128x1000" if options.quick else "4096x4096x128256"}]
    return [{"dtype": "fp32", "shape": "16x32x1000" if options.quick else "1024x768x50304"}]


def rows(options: Options) -> Iterator[Row]:
    yield from operators.sweep(
        "linear_cross_entropy", options, cases(options), lambda case, limits: _problem(case, limits, options.device)
    )


def _problem(case: dict[str, object], limits: Limits, device: str) -> Problem:
    count, k, vocab = dims(case)
    dtype = DTYPES[str(case["dtype"])]
    x, weight = arguments(count, k, vocab, dtype, device, bias=False)
    target = torch.randint(vocab, (count,), device=device)
    dy = 0.5 + torch.rand((), device=device)
    mine = ours_named("linear_cross_entropy")

    def ours(x, weight, target):
        return mine(x, weight, target, vocab_size=vocab, reduction="mean")

    def torchs(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    rivals = operators.torch_rivals(torchs)
    if device == "cuda":
        rivals["liger"] = _liger
    least = {"fwd+bwd": limits.least(flops=6.0 * count * k * vocab)}
    logits_bytes = count * vocab * dtype.itemsize
    return Problem(
        "linear_cross_entropy", case, ours, torchs, (x, weight, target), dy, least, rivals, extra_of=logits_bytes
    )


def _liger() -> operators.Operator:
    return operators.of_package(
        "liger-kernel", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
    )
