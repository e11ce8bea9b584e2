"""Where each parameter lies in the flat buffers, and which stretch of a buffer is reduced at once.

The buffers hold main gradients (fp32, or fp64 for fp64 parameters), one buffer a dtype. Parameters lie in reverse
order, about the order in which backward delivers their gradients, so that a bucket is a contiguous stretch that fills
early. The optimizer's masters and moments lie in buffers of the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

# A parameter may become a view of a flat buffer, and GEMMs choose their path by alignment: torch's own CPU allocations
# start on 64 bytes, GPU memory moves in 128-byte lines. Below that, the neighbours could change the bits of a GEMM.
ALIGN_BYTES = 128

Flat = dict[torch.dtype, Tensor]


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype the gradients of parameters of `dtype` are summed and their masters are kept: fp64 for fp64, else
    fp32. bf16 sums stop growing at 256 times the addend."""
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} has no gradient; train parameters of a floating-point dtype")
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Slot:
    """The place of one parameter: elements [start, start + numel) of the buffer of `dtype`, in row-major order."""

    name: str
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    bucket: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def piece(self, flat: Flat) -> Tensor:  # [numel]
        return flat[self.dtype][self.start : self.start + self.numel]

    def view(self, flat: Flat) -> Tensor:  # local shape
        return self.piece(flat).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the buffer of `dtype`: whole parameters, reduced by one all-reduce."""

    dtype: torch.dtype
    start: int
    stop: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FlatLayout:
    """Slots in reverse parameter order; buckets in the order in which every rank launches them."""

    slots: Mapping[str, Slot]
    buckets: tuple[Bucket, ...]
    sizes: Mapping[torch.dtype, int]

    def allocate(self, device: torch.device) -> Flat:
        """Zeroed buffers, one a dtype."""
        return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}


def flat_layout(params: Mapping[str, nn.Parameter], bucket_bytes: int) -> FlatLayout:
    """Pack parameters, last first, into buckets of at most `bucket_bytes`; a larger parameter has a bucket of its own.

    A bucket's number is its place in the order in which the buckets become complete, the same on all ranks that hold
    the same parameters.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} is not positive; give at least 1 (one parameter a bucket)")
    sizes: dict[torch.dtype, int] = {}
    stretches: dict[torch.dtype, list[Bucket]] = {}
    starts: dict[str, int] = {}
    place = {name: i for i, name in enumerate(reversed(params))}
    for name in place:
        dtype = main_dtype(params[name].dtype)
        step = ALIGN_BYTES // dtype.itemsize
        start = sizes.get(dtype, 0)
        stop = start + -(-params[name].numel() // step) * step
        starts[name], sizes[dtype] = start, stop
        done = stretches.setdefault(dtype, [])
        if done and (stop - done[-1].start) * dtype.itemsize <= bucket_bytes:
            done[-1] = Bucket(dtype, done[-1].start, stop, (*done[-1].names, name))
        else:
            done.append(Bucket(dtype, start, stop, (name,)))
    buckets = sorted((b for found in stretches.values() for b in found), key=lambda b: place[b.names[-1]])
    number = {name: i for i, b in enumerate(buckets) for name in b.names}
    slots = {
        name: Slot(name, main_dtype(params[name].dtype), starts[name], tuple(params[name].shape), number[name])
        for name in place
    }
    return FlatLayout(slots, tuple(buckets), sizes)
