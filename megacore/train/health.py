"""Has the run diverged? Then it ends, and the last good checkpoint stays the newest."""

from __future__ import annotations

import math
from pathlib import Path

from megacore.parallel.batch import MicroBatch
from megacore.train.agreement import CheckpointError
from megacore.train.step import StepResult


class Diverged(CheckpointError):
    """The same on every rank; the weights are of no use."""


class Health:
    """Counts steps in a row that changed nothing because their gradients were not finite. A batch without a valid token
    is skipped as well, and says nothing of the weights. `limit` 0: any number may follow each other."""

    def __init__(self, limit: int):
        self.limit, self.skipped = limit, 0
        self.batch: list[MicroBatch] | None = None  # this rank's newest: what weights are tried on before a save

    def saw(self, batch: list[MicroBatch], result: StepResult) -> bool:
        """Take note of a step; True once the run has diverged."""
        self.batch = batch
        if result.skipped and not math.isfinite(result.grad_norm):
            self.skipped += 1
        elif not result.skipped:
            self.skipped = 0
        return 0 < self.limit <= self.skipped

    def diverged(self, done: int, saved: int, out: Path) -> Diverged:
        kept = f"the checkpoint of step {saved} in {out} is kept" if saved >= 0 else "there is no checkpoint"
        row = f"the last {self.skipped} steps had no finite gradients" if self.skipped else "its loss is not finite"
        return Diverged(
            f"the run has diverged: at step {done} {row}, and its weights are not saved; {kept}: "
            "start again with a lower optim.lr or other data (run.max_skipped says how many such steps may follow)"
        )
