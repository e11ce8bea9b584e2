"""Whole parameters whose gradients differ between tensor-parallel ranks: stopped in the first steps, by name.

A gradient that each rank computes of its own columns alone is wrong and drives the copies apart. What is whole and
right has the same gradient on every rank, up to rounding (equal bits on a CPU).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.comm.mesh import Group, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import ParamRecord

STEPS = 2  # with gradients: a factor that starts at zero hides what is before it in the first
TOLERANCE = 1e-3  # of a gradient's norm: partial ones differ by the order of themselves, nondeterminism by rounding
FLOOR = 1e-6  # of the largest norm: a smaller gradient is rounding about zero


class WholeGradients:
    """`check()` on the finished gradients, collective over the world; it does nothing after STEPS steps.

    Cost: two numbers a parameter, one small all-reduce over tp and one over the world. Raises ValueError on every
    rank of the world, with the same words."""

    def __init__(self, buffers: GradBuffers, recs: Mapping[str, ParamRecord], mesh: Mesh):
        self._buffers, self._mesh = buffers, mesh
        self._names = [n for n in buffers.slots if not recs[n].shared and _is_whole(recs[n])]
        self._left = STEPS if mesh.tp.size > 1 else 0

    def check(self) -> None:
        if not self._left:
            return
        low, high = _extremes([self._buffers.grad(n) for n in self._names], self._mesh.tp, self._buffers.device)
        norms = high[:, 1]
        peak = norms.max() if len(self._names) else norms.new_zeros(())
        apart = ((high - low) > TOLERANCE * norms[:, None]).any(1) & (norms > FLOOR * peak)
        wrong = [name for name, bad in zip(self._names, apart.tolist(), strict=True) if bad]
        verdict = torch.tensor([float(bool(wrong)), float(peak)], dtype=torch.float64, device=self._buffers.device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=self._mesh.world.pg)
        some_wrong, largest = verdict.tolist()
        if some_wrong:
            said: list[str] = [""] * self._mesh.world.size
            dist.all_gather_object(said, wrong[-1] if wrong else "", group=self._mesh.world.pg)
            raise ValueError(
                f"{next(filter(None, said))} is whole on every rank, but its gradient differs between tensor-parallel "
                "ranks: it acts on each rank's own columns; give its module a Partial() row, or a CopyTo() row to the "
                "module whose whole output meets split columns"
            )
        self._left -= largest > 0


def _is_whole(rec: ParamRecord) -> bool:
    return len(rec.boxes) == 1 and rec.boxes[0].shape == rec.shape


def _extremes(grads: list[Tensor], tp: Group, device: torch.device) -> tuple[Tensor, Tensor]:
    """Least and largest, over the ranks, of (sum / sqrt(n), 2-norm) of each gradient."""
    rows = [torch.stack([g.sum() / max(g.numel(), 1) ** 0.5, g.norm()]).double() for g in grads]
    mine = torch.nan_to_num(torch.stack(rows)) if rows else torch.zeros(0, 2, dtype=torch.float64, device=device)
    both = torch.cat([mine, -mine])
    if rows:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=tp.pg)
    high, low = both.chunk(2)
    return -low, high
