"""When a run has diverged, and which of its checkpoints are worth going back to.

A step whose loss or gradients are not finite changes nothing, so one of them costs one batch. Many in a row mean that
the weights are ruined: no batch will mend them. A checkpoint is proven once a step (or an evaluation) from its very
weights gave finite numbers; until then, it may hold what the last update ruined.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from megacore.comm.collectives import all_reduce_
from megacore.comm.mesh import Group
from megacore.train import commit
from megacore.train.agreement import CheckpointError, by_first


class DivergedError(CheckpointError):
    """The run ends on every rank at the same step: loss and gradients are the same everywhere, and so is this."""


class Health:
    """What the numbers of a run say of its weights. Plain counting; nothing is sent."""

    def __init__(self, limit: int):
        self.limit = limit
        self.bad = 0  # steps in a row without finite numbers; 0: the weights may be saved
        self.why = ""
        self.proven = -1  # the newest step whose weights gave finite numbers

    def saw(self, step: int, loss: float, norm: float = 0.0, why: str = "") -> None:
        """The weights after `step` steps gave this loss and gradient norm. `why`: the reason of a skipped step."""
        if not (isfinite(loss) and isfinite(norm)):
            self.bad, self.why = self.bad + 1, why or "the loss is not finite"
        elif not why:  # a batch with nothing to learn from proves nothing
            self.bad, self.proven = 0, step

    def ruined(self, why: str) -> None:
        """Something other than a step showed that the weights are not to be saved. A good step takes it back."""
        self.bad, self.why = max(self.bad, 1), why

    @property
    def over(self) -> bool:
        return self.bad >= self.limit


def give_up(health: Health, folder: Path, done: int, since: int, group: Group) -> DivergedError:
    """The error that ends the run. Collective. Checkpoints of this process (after step `since`) that were never proven
    are renamed to `.skipped`, so that the next start goes on from one that was."""

    def clear() -> int | None:
        commit.leave_behind(folder, max(health.proven, since))
        left, _ = commit.candidates(folder)
        return commit.entries(folder)[0][0] if left else None

    newest = by_first(group, f"cannot list {folder}", clear)
    last = f"step {done}" if health.bad == 1 else f"the last {health.bad} steps, {done - health.bad + 1} to {done},"
    kept = f"the newest good checkpoint is step {newest}" if newest is not None else "no good checkpoint was saved"
    return DivergedError(
        f"the run diverged: {last} gave no finite numbers ({health.why}); {kept}; lower optim.lr "
        f"(or raise run.max_skipped={health.limit}) and start again from there"
    )


@torch.no_grad()
def all_finite(tensors: list[Tensor], group: Group, device: torch.device) -> bool:
    """Whether no rank holds a NaN or an infinity. Collective; one pass over the tensors, without a copy."""
    ends = [torch.aminmax(t) for t in tensors if t.numel() and t.is_floating_point()]
    bad = torch.zeros((), dtype=torch.float64, device=device)
    if ends:
        bad += (~torch.isfinite(torch.stack([e.double() for pair in ends for e in pair]))).any()
    return all_reduce_(bad, group).item() == 0
