"""Whether narrow tensors still are what their wide masters round to, bit for bit.

The bits of a NaN depend on the kernel that rounded it: it may count as written. It stays a NaN."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

PIECE = 1 << 16  # elements rounded at once on a CPU: they stay in the cache, and no second model is held

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The same memory as integers."""
    return x.view(_BITS[x.dtype.itemsize])


def not_rounded(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Names whose narrow tensor is not `wide.to(narrow.dtype)`, given name -> (narrow, wide) of equal shapes.

    On a CPU in pieces, compared eight bytes at a time (25 M bf16 elements on one core: 28 ms, 75 ms by `ne`); elsewhere
    one answer from the device for all of them."""
    on_cpu = {name for name, (narrow, _) in pairs.items() if narrow.device.type == "cpu"}
    found = {name: not _same(*pairs[name]) for name in on_cpu}
    others = [name for name in pairs if name not in on_cpu]
    if others:
        flags = [(bits(n) != bits(w.to(n.dtype))).any() for n, w in (pairs[name] for name in others)]
        found.update(zip(others, torch.stack(flags).tolist(), strict=True))
    return [name for name in pairs if found[name]]


def _same(narrow: Tensor, wide: Tensor) -> bool:
    pieces = zip(narrow.reshape(-1).split(PIECE), wide.reshape(-1).split(PIECE), strict=True)
    return all(_equal(n, w.to(n.dtype)) for n, w in pieces)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Of one dimension. torch.equal of 16-bit numbers costs four times that of 64-bit ones."""
    words = 8 // a.dtype.itemsize
    if a.is_contiguous() and a.storage_offset() % words == 0 and len(a) >= words:
        whole = len(a) // words * words
        return torch.equal(a[:whole].view(torch.int64), b[:whole].view(torch.int64)) and torch.equal(
            bits(a[whole:]), bits(b[whole:])
        )
    return torch.equal(bits(a), bits(b))
