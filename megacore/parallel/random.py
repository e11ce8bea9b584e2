"""Randomness that no layout changes.

A parameter's initial values come from a stream keyed by (seed, full name): a shard takes its slice of the full tensor.
Dropout is keyed by (seed, step, module, global sample, position, feature): see megacore.ops.dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megacore.ops import dropout, dropout_key
from megacore.parallel.batch import MicroBatch


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The stream of one parameter; on the CPU, so that every device and layout draws the same bits."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class Streams:
    """The seed, and the micro-batch that is being computed. The modules of one model share one of these; whoever runs
    the model says which micro-batch it is: `with streams.at(batch): model(batch.ids)`."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.batch: MicroBatch | None = None

    @contextmanager
    def at(self, batch: MicroBatch | None) -> Iterator[None]:
        before, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = before


class Dropout(nn.Module):
    """y = x * keep / (1 - p) in training, with the mask that (seed, step, name, sample, position, feature) decides.

    x is [B, S, F], or [B, G, S, F] for attention probabilities of G heads. Where the heads are split, `group_start` is
    the first head of this rank. Nothing is drawn, and x is returned, in eval mode or at p = 0.
    """

    def __init__(self, p: float, streams: Streams, name: str = "", group_start: int = 0):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout p={p} is outside [0, 1); choose a share of elements to drop below 1")
        self.p, self.streams, self.name, self.group_start = p, streams, name, group_start

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        batch = self.streams.batch
        if batch is None:
            raise ValueError(
                f"dropout {self.name!r} in training has no micro-batch; run the model inside `with streams.at(batch):`"
            )
        key = dropout_key(self.streams.seed, batch.step, self.name)
        return dropout(x, self.p, key=key, sample=batch.samples, position=batch.positions, group_start=self.group_start)

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


def name_dropouts(model: nn.Module) -> None:
    """Key each Dropout by its full name in the plain model; called once, where the plain model is complete."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.name = name
