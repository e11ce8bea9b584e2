"""Gradients that are still partial after the data-parallel sum: copies of one parameter on several model ranks.

| kind         | held by                                             | summed over |
|--------------|-----------------------------------------------------|-------------|
| tied copies  | first and last stage (embedding and head)           | embed       |
| shared boxes | several tensor ranks (key/value heads < tensor size)| tp          |

Each holder then has the whole gradient, with the same bits, so that the copies stay equal for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.comm.mesh import Group
from megacore.parallel.record import Box, ParamRecord


def sum_tied(grads: Mapping[str, Tensor], recs: Mapping[str, ParamRecord], embed: Group) -> None:
    """Sum the copies of each tied parameter in place over `embed`, in the order of their common names (the copies have
    different places in their stages)."""
    if embed.size == 1:
        return
    for name in sorted((n for n in grads if recs[n].tie is not None), key=lambda n: recs[n].tie):
        dist.all_reduce(grads[name], group=embed.pg)


@dataclass(frozen=True)
class _Piece:
    """Rows of one local box that other tensor ranks hold too, and where they lie in the exchanged buffer."""

    name: str
    box: Box
    rows: Tensor  # [n] within the box
    places: Tensor  # [n] rows of the parameter's part of the buffer


class SharedBoxes:
    """Sums over `tp` the rows that several tensor ranks hold with partial gradients.

    Only rows that are held more than once travel, all parameters in one all-reduce per dtype. Which rows those are
    depends on every rank's boxes, so construction is collective over `tp` (two small all-reduces).
    """

    def __init__(self, recs: Mapping[str, ParamRecord], names: list[str], tp: Group, device: torch.device) -> None:
        self._tp = tp
        self._pieces: list[_Piece] = []
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the exchanged rows, by parameter
        if tp.size == 1 or not names:
            return
        # A rank whose own boxes are held once must still take part when another rank shares some of its own.
        flags = torch.tensor([int(recs[n].shared) for n in names], device=device)
        dist.all_reduce(flags, group=tp.pg)
        shared = [n for n, flag in zip(names, flags.tolist(), strict=True) if flag]
        if not shared:
            return
        holders = torch.zeros(sum(recs[n].shape[0] for n in shared), dtype=torch.int64, device=device)
        parts = dict(zip(shared, holders.split([recs[n].shape[0] for n in shared]), strict=True))
        for name in shared:
            for box in recs[name].boxes:
                parts[name][slice(*box.full[0])] += 1
        dist.all_reduce(holders, group=tp.pg)
        for name in shared:
            self._locate(name, recs[name], parts[name] > 1)

    def _locate(self, name: str, rec: ParamRecord, contested: Tensor) -> None:
        place = contested.cumsum(0) - 1
        self._shapes[name] = (int(contested.sum()), *rec.shape[1:])
        for box in rec.boxes:
            rows = contested[slice(*box.full[0])].nonzero().flatten()
            self._pieces.append(_Piece(name, box, rows, place[slice(*box.full[0])][rows]))

    def sum_(self, grads: Mapping[str, Tensor]) -> None:
        """Collective over `tp`, in place. Cost: the shared rows, full width, once more in memory."""
        for dtype in sorted({grads[name].dtype for name in self._shapes}, key=str):
            names = [n for n in self._shapes if grads[n].dtype == dtype]
            sizes = [torch.Size(self._shapes[n]).numel() for n in names]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=grads[names[0]].device)
            whole = {n: part.view(self._shapes[n]) for n, part in zip(names, buffer.split(sizes), strict=True)}
            pieces = [(p, *_views(p, grads, whole)) for p in self._pieces if p.name in whole]
            for p, local, full in pieces:
                full.index_add_(0, p.places, local.index_select(0, p.rows))
            dist.all_reduce(buffer, group=self._tp.pg)
            for p, local, full in pieces:
                local.index_copy_(0, p.rows, full.index_select(0, p.places))


def _views(piece: _Piece, grads: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The box in the local gradient, and its columns in the exchanged rows."""
    local = grads[piece.name][tuple(slice(*s) for s in piece.box.local)]
    full = whole[piece.name][(slice(None), *(slice(*s) for s in piece.box.full[1:]))]
    return local, full
