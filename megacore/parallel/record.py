"""One record a parameter: what it is in the plain model, and where its pieces lie on this rank.

Initialisation, gradient buckets, the norm, checkpoints, verification and Hugging Face import read this record and
nothing else. Records are derived from the module tree (`records`): a module that splits its parameters says how in
`placements()`, every other parameter is whole on each rank of the tensor-parallel group. All parameters are replicated
over dp and cp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megacore.comm.collectives import split_range
from megacore.comm.mesh import Mesh

Range = tuple[int, int]
TIES = (
    "_megacore_ties"  # attribute of a module: {its parameter: (full name of the first copy, this stage has the first)}
)


@dataclass(frozen=True)
class Box:
    """A rectangular piece of the full tensor and its place in the local one; (start, stop) for each dimension."""

    full: tuple[Range, ...]
    local: tuple[Range, ...]
    first: bool = True  # False on the later holders, within tp, of a replicated piece: it is counted and written once

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.full)


def _at(ranges: Sequence[Range]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


@dataclass(frozen=True)
class Placement:
    """How a module splits one of its parameters: the true full shape, and the boxes of this rank."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    shared: bool = False


@dataclass(frozen=True)
class ParamRecord:
    """See the module's head. `shape` is the full, true shape; `local_shape` includes padding; `shared` says that pieces
    are held by several tp ranks whose gradients are partial and must be summed over tp (replicated KV heads)."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    shared: bool = False
    tie: str | None = None  # full name of the first of several tied copies on different stages
    tie_first: bool = True  # this rank's stage holds that first copy

    @property
    def canonical(self) -> str:
        """The name under which the parameter is initialised, saved and compared."""
        return self.tie or self.name

    def counted(self) -> tuple[Box, ...]:
        """The boxes that this rank counts in norms and writes to checkpoints, so that each element is counted once."""
        return tuple(b for b in self.boxes if b.first) if self.tie_first else ()

    def slice_full(self, full: Tensor) -> Tensor:
        """The local tensor cut from the full one; padding is zero."""
        if tuple(full.shape) != self.shape:
            raise ValueError(f"{self.name}: full tensor has shape {tuple(full.shape)}, the model has {self.shape}")
        local = full.new_zeros(self.local_shape)
        for box in self.boxes:
            local[_at(box.local)] = full[_at(box.full)]
        return local

    def add_into_full(self, local: Tensor, full: Tensor, boxes: Sequence[Box] | None = None) -> None:
        """Add this rank's boxes (all, or those given) into their places in the full tensor."""
        for box in self.boxes if boxes is None else boxes:
            full[_at(box.full)] += local[_at(box.local)]


def whole(shape: Sequence[int], first: bool) -> tuple[Box, ...]:
    ranges = tuple((0, n) for n in shape)
    return (Box(ranges, ranges, first),)


def along(shape: Sequence[int], dim: int, pieces: Sequence[tuple[Range, bool]]) -> tuple[Box, ...]:
    """Boxes of a tensor split along one dimension: `pieces` are ranges of the full dimension, which lie one after
    another in the local tensor, each with whether this rank is its first holder."""
    boxes, at = [], 0
    for (start, stop), first in pieces:
        if stop == start:
            continue
        full = [(0, n) for n in shape]
        local = list(full)
        full[dim], local[dim] = (start, stop), (at, at + stop - start)
        boxes.append(Box(tuple(full), tuple(local), first))
        at += stop - start
    return tuple(boxes)


def unit_range(units: int, parts: int, index: int, width: int = 1) -> Range:
    """The share of rank `index` in `units` indivisible units of `width` elements, as a range of elements."""
    start, stop = split_range(units, parts, index)
    return start * width, stop * width


def divisors(n: int) -> list[int]:
    """What an error about divisibility offers."""
    return [k for k in range(1, n + 1) if n % k == 0]


def head_pieces(heads: int, kv_heads: int, parts: int, index: int) -> tuple[Range, Range, bool]:
    """(query heads, KV heads, first holder of those KV heads) of a rank.

    Heads go round in whole KV groups while there are KV heads enough; with fewer KV heads than ranks each KV head is
    held by several neighbouring ranks, which share out its query heads. Errors: more ranks than heads; KV heads that do
    not divide the query heads.
    """
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}; choose one of {divisors(heads)}")
    if parts > heads:
        raise ValueError(f"tp={parts} is more than heads={heads}: a rank would have no head; choose tp <= {heads}")
    group = heads // kv_heads
    if kv_heads >= parts:
        start, stop = split_range(kv_heads, parts, index)
        return (start * group, stop * group), (start, stop), True
    kv = next(k for k in range(kv_heads) if index < split_range(parts, kv_heads, k)[1])
    begin, end = split_range(parts, kv_heads, kv)
    if end - begin > group:
        raise ValueError(
            f"tp={parts} gives KV head {kv} to {end - begin} ranks, but it has {group} query heads; choose a smaller tp"
        )
    start, stop = split_range(group, end - begin, index - begin)
    return (kv * group + start, kv * group + stop), (kv, kv + 1), index == begin


def records(module: nn.Module, mesh: Mesh) -> dict[str, ParamRecord]:
    """Records of the parameters that are present on this rank, in the order of named_parameters."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    for prefix, child in module.named_modules():
        for name, _ in child.named_parameters(recurse=False):
            owners[f"{prefix}.{name}" if prefix else name] = (child, name)
    return {full: _record(full, p, *owners[full], mesh) for full, p in module.named_parameters()}


def _record(full: str, param: Tensor, owner: nn.Module, name: str, mesh: Mesh) -> ParamRecord:
    placements: Mapping[str, Placement] = owner.placements() if hasattr(owner, "placements") else {}
    shape = tuple(param.shape)
    placed = placements.get(name) or Placement(shape, whole(shape, mesh.tp.index == 0))
    tie, tie_first = getattr(owner, TIES, {}).get(name, (None, True))
    return ParamRecord(full, placed.shape, shape, placed.boxes, placed.shared, tie, tie_first)
