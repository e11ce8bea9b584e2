"""cross_entropy against F.cross_entropy.    logits [R, V], target [R] -> [R]; on a GPU the mean, as Liger has it

Limit: forward reads the logits once; backward reads them again and writes the gradient, all at the measured bandwidth.
Floor where the logits are kept (`read-and-copy`): read them once, then read them and write a fresh copy, in the same
rounds. It pays for the pages of the copy, which the limit does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness, operators
from bench.harness import Options
from bench.limits import Limits
from bench.operators import DTYPES, Problem, dims, ours_named
from bench.report import Row


def cases(options: Options) -> list[dict[str, object]]:
    """Shape: R, V."""
    if options.device == "cuda":
        how = {"dtype": "bf16", "shape": "64x1000" if options.quick else "8192x131072", "reduction": "mean"}
        return [how | {"inplace": inplace} for inplace in (False, True)]
    shape = "16x1000" if options.quick else "1024x50304"
    return [
        {"dtype": dtype, "shape": shape, "inplace": inplace} for dtype in ("fp32", "bf16") for inplace in (False, True)
    ]


def rows(options: Options) -> Iterator[Row]:
    yield from operators.sweep(
        "cross_entropy", options, cases(options), lambda case, limits: _problem(case, limits, options.device)
    )


def _problem(case: dict[str, object], limits: Limits, device: str) -> Problem:
    count, vocab = dims(case)
    inplace, reduction, dtype = bool(case["inplace"]), str(case.get("reduction", "none")), DTYPES[str(case["dtype"])]
    logits = torch.randn(count, vocab, device=device).to(dtype).requires_grad_()
    target = torch.randint(vocab, (count,), device=device)
    dy = 0.5 + torch.rand(() if reduction == "mean" else (count,), device=device)
    mine = ours_named("cross_entropy")

    def ours(logits, target):
        return mine(logits, target, vocab_size=vocab, reduction=reduction, inplace_backward=inplace)

    def torchs(logits, target):
        return F.cross_entropy(logits, target, reduction=reduction)

    rivals = operators.torch_rivals(torchs)
    if device == "cuda" and inplace:
        rivals["liger"] = _liger
    once = float(logits.nbytes)
    least = {} if inplace else {"fwd": limits.least(nbytes=once)}  # in forward nothing differs
    least["fwd+bwd"] = limits.least(nbytes=3 * once)
    floors = {} if inplace else {"fwd+bwd": {"read-and-copy": _read_and_copy(logits.detach(), device)}}
    overwriting = ("ours", "liger") if inplace else ()
    return Problem(
        "cross_entropy", case, ours, torchs, (logits, target), dy, least, rivals,
        overwriting=overwriting, floors=floors, extra_of=logits.nbytes,
    )  # fmt: skip


def _read_and_copy(logits: Tensor, device: str) -> Callable[[], object]:
    """With the fastest of torch's ways to read."""
    readers: dict[str, Callable[[], object]] = {
        "sum": logits.sum,
        "max": lambda: logits.amax(),
        "dot": lambda: torch.dot(logits.view(-1), logits.view(-1)),
    }
    taken = harness.interleave(readers, 3, warmup=1, seconds_of=harness.clock(device))
    read = readers[min(taken, key=lambda name: min(taken[name]))]
    return lambda: (read(), logits.clone())


def _liger() -> operators.Operator:
    return operators.of_package("liger-kernel", "liger_kernel.transformers.functional", "liger_cross_entropy")
