"""What every operator's benchmark does: verify forward and gradients, then time both directions against the rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bench import harness

Operator = Callable[..., Tensor]


def outcome(f: Operator, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """[y, gradient of each input that wants one], for the upstream gradient dy."""
    y = f(*inputs)
    return [y, *torch.autograd.grad(y, [x for x in inputs if x.requires_grad], dy.to(y.dtype))]


def copies(inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Tensors of their own storage; those that want a gradient in `dtype`."""
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() if x.requires_grad else x for x in inputs]


def verify(name: str, ours: Operator, torchs: Operator, inputs: Sequence[Tensor], dy: Tensor) -> None:
    """Output and every gradient: error against fp64 at most twice that of plain torch in the same dtype."""
    found = outcome(ours, copies(inputs), dy), outcome(torchs, copies(inputs), dy)
    exact = outcome(torchs, copies(inputs, torch.float64), dy)
    for i, (got, theirs, true) in enumerate(zip(*found, exact, strict=True)):
        harness.check_as_good_as(f"{name} {'gradient ' + str(i) if i else 'output'}", got, theirs, true)


def compiled(f: Operator) -> Operator:
    """torch.compile at its best: for this shape alone, and with no earlier case in its count of recompilations."""
    torch.compiler.reset()
    return torch.compile(f, dynamic=False)


def rows(
    bench: str,
    case: Mapping,
    contestants: Mapping[str, Operator],
    inputs: Sequence[Tensor],
    dy: Tensor,
    options: harness.Options,
    limits_ms: Mapping[str, float],
) -> Iterator[harness.Row]:
    """One row for each direction in `limits_ms`. Each contestant has its own inputs: an operator may overwrite them."""
    kept = {name: f for name, f in contestants.items() if name in ("ours", *options.rivals)}
    own = {name: copies(inputs) for name in kept}

    def forward(name: str) -> None:
        with torch.no_grad():
            kept[name](*own[name])

    def both(name: str) -> None:
        outcome(kept[name], own[name], dy)

    extra = harness.saved_bytes(lambda: kept["ours"](*own["ours"]), own["ours"])
    runs = {"fwd": forward, "fwd+bwd": both}
    for direction, limit in limits_ms.items():
        started = {name: lambda name=name, run=runs[direction]: run(name) for name in kept}
        taken = harness.interleave(started, options.rounds, harness.cache_flush())
        yield harness.row(bench, case | {"dir": direction}, taken, limit, None if direction == "fwd" else extra)
