"""The output layer, split by vocabulary: logits, or their factors, for a loss that never holds all logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from megacore.comm.collectives import copy_to
from megacore.parallel.layers import ColumnParallelLinear


@dataclass(frozen=True)
class Unprojected:
    """logits = hidden @ weight.T + bias, not computed: hidden [..., H], weight [V/t, H] and bias [V/t] of this rank.
    The gradient of `hidden` is summed over ranks behind it, so each rank gives its own part."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class VocabHead(ColumnParallelLinear):
    """y [..., V/t] = x weight^T + bias, the columns as VocabParallelEmbedding has its rows; with gather_output the true
    columns of all ranks, y [..., V], in order, on every rank (each must go on to the same loss). Inside `unprojected`,
    an Unprojected instead."""

    projects = True

    def forward(self, x: Tensor) -> Tensor | Unprojected:
        if self.projects:
            return super().forward(x)
        return Unprojected(copy_to(x, self.group), self.weight, self.bias)

    def _gather(self, y: Tensor) -> Tensor:
        true = sum(stop - start for (start, stop), _ in self.pieces[self.group.index])  # padding stays here
        return super()._gather(y[..., :true])


def heads_of(model: nn.Module) -> list[VocabHead]:
    return [module for module in model.modules() if isinstance(module, VocabHead)]


@contextmanager
def unprojected(head: VocabHead) -> Iterator[None]:
    """Within the block `head` gives its factors: for a caller that hands its output to the loss and to nothing else."""
    head.projects = False
    try:
        yield
    finally:
        head.projects = True
