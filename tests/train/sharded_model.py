"""A model by hand for checkpoint tests: full tensors, and what each rank of a layout holds, by index arithmetic alone.

13 rows of vocabulary padded per rank, 6 features, 4 blocks, 2 KV heads; qkv in three boxes; sizes that do not divide.
`PAD` fills every local tensor before a load: padding must keep it.
"""

from __future__ import annotations

import torch

from megacore.comm.collectives import split_range
from megacore.comm.mesh import Layout
from megacore.parallel.record import Box, ParamRecord
from megacore.train.logical import LogicalTensor

PAD = -7.0
VOCAB, WIDTH, BLOCKS, KV_HEADS = 13, 6, 4, 2
DTYPES = {"model": torch.bfloat16, "optim": torch.float32}


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"wte.weight": (VOCAB, WIDTH), "wpe.weight": (5, WIDTH), "scale": ()}
    for i in range(BLOCKS):
        found |= {f"blocks.{i}.qkv.weight": (18, WIDTH), f"blocks.{i}.kv.weight": (KV_HEADS * 3, WIDTH)}
        found |= {f"blocks.{i}.out.weight": (WIDTH, 7), f"blocks.{i}.norm.weight": (WIDTH,)}
    return found


def full(kind: str, name: str, salt: int = 0) -> torch.Tensor:
    """Random bits (NaNs, infinities and denormals among them), so that only a bitwise copy is right."""
    number = sorted(shapes()).index(name) * 10 + salt + (1000 if kind == "optim" else 0)
    g = torch.Generator().manual_seed(number)
    dtype = DTYPES[kind]
    ints = torch.int16 if dtype.itemsize == 2 else torch.int32
    info = torch.iinfo(ints)
    return torch.randint(info.min, info.max, shapes()[name], generator=g, dtype=torch.int64).to(ints).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((_bits(a) == _bits(b)).all())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def _pieces(name: str, tp: int, k: int) -> tuple[int | None, list[tuple[int, int]], int, bool]:
    """(dimension that is split, ranges of it on tp rank k, local size along it, first holder)."""
    if name == "wte.weight":
        rows = -(-VOCAB // tp)
        return 0, [(min(k * rows, VOCAB), min((k + 1) * rows, VOCAB))], rows, True
    if "qkv" in name:
        start, stop = split_range(6, tp, k)
        return 0, [(part * 6 + start, part * 6 + stop) for part in range(3)], 3 * (stop - start), True
    if ".kv" in name:
        heads = sorted({k * KV_HEADS // tp} if tp >= KV_HEADS else range(KV_HEADS))
        first = tp < KV_HEADS or k == 0 or (k - 1) * KV_HEADS // tp != heads[0]
        return 0, [(3 * heads[0], 3 * heads[-1] + 3)], 3 * len(heads), first
    if "out" in name:
        start, stop = split_range(7, tp, k)
        return 1, [(start, stop)], stop - start, True
    return None, [], 0, k == 0


def _record(name: str, stored: str, tp: int, k: int, tie_first: bool) -> ParamRecord:
    shape = shapes()[stored]
    dim, ranges, size, first = _pieces(stored, tp, k)
    everything = tuple((0, n) for n in shape)
    tie = None if name == stored and tie_first else stored
    if dim is None:
        return ParamRecord(name, shape, shape, (Box(everything, everything, first),), tie=tie, tie_first=tie_first)
    boxes, at = [], 0
    for start, stop in ranges:
        place, local = list(everything), list(everything)
        place[dim], local[dim] = (start, stop), (at, at + stop - start)
        boxes.append(Box(tuple(place), tuple(local), first))
        at += stop - start
    local_shape = tuple(size if d == dim else n for d, n in enumerate(shape))
    return ParamRecord(name, shape, local_shape, tuple(boxes), first is False, tie, tie_first)


def records(layout: Layout, rank: int) -> dict[str, ParamRecord]:
    """Of one rank, by the names that its stage knows: the tied copy on the last stage is called head.weight."""
    at = layout.coords(rank)
    stage, last, k = at["pp"], layout.pp - 1, at["tp"]
    found = {}
    for stored in shapes():
        block = int(stored.split(".")[1]) if stored.startswith("blocks") else None
        home = last if stored == "scale" else 0 if block is None else block * layout.pp // BLOCKS
        if home == stage:
            found[stored] = _record(stored, stored, layout.tp, k, True)
    if stage == last and last > 0:
        found["head.weight"] = _record("head.weight", "wte.weight", layout.tp, k, False)
    return found


def cut(record: ParamRecord, whole: torch.Tensor) -> torch.Tensor:
    """What the rank should hold, with PAD where there is padding: by torch.cat of boxes, not by their local places."""
    if record.local_shape == record.shape and len(record.boxes) == 1 and record.boxes[0].full == record.boxes[0].local:
        return whole.clone()
    pieces = [whole[tuple(slice(a, b) for a, b in box.full)] for box in record.boxes]
    dim = next((d for d, (a, b) in enumerate(zip(record.local_shape, record.shape, strict=True)) if a != b), 0)
    joined = torch.cat(pieces, dim)
    padding = list(joined.shape)
    padding[dim] = record.local_shape[dim] - joined.shape[dim]
    return torch.cat([joined, torch.full(padding, PAD, dtype=whole.dtype)], dim)


def logical(layout: Layout, rank: int, values: bool, salt: int = 0) -> dict[str, LogicalTensor]:
    """Both kinds of tensors of a rank, holding their values or PAD. The optimizer's are views: one transposed, the
    others slices of one flat buffer, as in the trainer."""
    recs = records(layout, rank)
    flat = torch.zeros(10_000, dtype=DTYPES["optim"])
    at, found = 1, {}
    for record in recs.values():
        name = record.canonical
        for kind, dtype in DTYPES.items():
            local = cut(record, full(kind, name, salt)) if values else torch.full(record.local_shape, PAD, dtype=dtype)
            if kind == "optim" and ".kv" in name:
                local = local.t().contiguous().t()
            elif kind == "optim":
                view = flat[at : at + local.numel()].view(local.shape)
                view.copy_(local)
                local, at = view, at + local.numel()
            key = f"model/{name}" if kind == "model" else f"optim/{name}/exp_avg"
            found[key] = LogicalTensor(record, local)
    return found
