"""What every pipeline stage knows of a micro-batch, whatever crosses from the stage before.

B sequences, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # the target of a token that is not counted, as in torch


@dataclass(frozen=True)
class MicroBatch:
    ids: Tensor  # [B, S] int64
    targets: Tensor  # [B, S] int64, IGNORE where not counted
    samples: Tensor  # [B] int64, place of each sequence in the training order: what dropout is keyed by
    positions: Tensor  # [S] int64
    step: int
    index: int = 0  # among this rank's micro-batches of the step

    @property
    def signature(self) -> tuple[int, ...]:
        """Fixes the shape of everything that crosses stages."""
        return tuple(self.ids.shape)

    @property
    def valid(self) -> int:
        """How many targets are counted."""
        return int((self.targets != IGNORE).sum())

    @classmethod
    def of(cls, ids: Tensor, targets: Tensor, *, first_sample: int = 0, step: int = 0, index: int = 0) -> MicroBatch:
        """A micro-batch of consecutive samples at positions 0..S-1."""
        b, s = ids.shape
        samples = torch.arange(first_sample, first_sample + b, device=ids.device)
        return cls(ids, targets, samples, torch.arange(s, device=ids.device), step, index)
