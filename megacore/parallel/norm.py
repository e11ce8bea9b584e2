"""norm = sqrt(sum over all parameters of the model, each element once, of grad^2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megacore.comm.collectives import all_reduce_
from megacore.comm.mesh import Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import ParamRecord


def global_norm(buffers: GradBuffers, recs: Mapping[str, ParamRecord], mesh: Mesh) -> tuple[Tensor, bool]:
    """(norm, finite) of the finished gradients, the same on every rank. norm: fp64 scalar; squares are summed in fp64.

    A box that several ranks hold is counted by the one whose record counts it, so replicated and tied parameters enter
    once. `finite` is false when any element of any rank, counted or not, is inf or NaN; the norm is inf then, so that
    the optimizer need look at nothing else. Cost: one read of the gradients and ONE all-reduce of two numbers over
    `model` (tensor x pipeline); the data-parallel copies are equal already.
    """
    counted, others = [], []
    for name in buffers.slots:
        mine = set(recs[name].counted())
        for box in recs[name].boxes:
            piece = buffers.grad(name)[tuple(slice(*s) for s in box.local)]
            (counted if box in mine else others).append(piece)
    squares = _squares(counted, buffers.device)
    found_inf = ~torch.isfinite(squares + _squares(others, buffers.device))
    packed = torch.stack([squares, found_inf.double()])
    total, found = all_reduce_(packed, mesh.model).tolist()
    finite = found == 0
    norm = torch.tensor(total, dtype=torch.float64).sqrt()
    return (norm if finite else torch.full_like(norm, torch.inf)), finite


def _squares(pieces: list[Tensor], device: torch.device) -> Tensor:
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float64)  # one launch for all pieces on a GPU
    return torch.stack(norms).square().sum()
