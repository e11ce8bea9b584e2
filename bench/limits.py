"""What this machine does at best: products and sweeps through memory, tried in several ways. The fastest counts.

The fastest way, a probe, then runs in the rounds of the contestants as one of them. What slows the machine in a round
slows the limit of that round too, so that the share of the limit means the same on a busy machine as on a quiet one,
and on one CPU as on another: where a contestant uses the library's product it is at the share that it leaves of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench import harness
from megacore import _C

SHAPES = ((1536, 1536, 1536), (2048, 768, 3072), (512, 768, 6144))  # M, K, N: large, and as layers and heads have them
SMALL = ((256, 256, 256),)
GPU_SHAPES = ((8192, 8192, 8192), (8192, 4096, 8192))
HOPELESS = 0.25  # of the best rate at a small size: a dtype or library below that is not tried at a large one


@dataclass(frozen=True)
class Probe:
    name: str
    run: Callable[[], object]
    work: float  # FLOP, or bytes of memory traffic, of one run
    rate: float = 0.0  # work a second, the best seen


@dataclass(frozen=True)
class Limit:
    """A lower bound for some work. With a probe it is measured anew in each round."""

    ms: float
    work: float = 0.0
    probe: Probe | None = None

    def seconds(self, probed: Sequence[float]) -> list[float]:
        """The limit in each round, from the seconds that the probe took there."""
        return [s * self.work / self.probe.work for s in probed]


@dataclass(frozen=True)
class Limits:
    flops: float  # of the fastest product, a second
    bandwidth: float  # bytes read plus bytes written by the fastest sweep, a second
    product: Probe | None = None
    sweep: Probe | None = None

    def least(self, *, flops: float = 0.0, nbytes: float = 0.0) -> Limit:
        """For work of that many FLOP and bytes of memory traffic: whichever takes longer."""
        arithmetic, traffic = 1e3 * flops / self.flops, 1e3 * nbytes / self.bandwidth
        if traffic > arithmetic:
            return Limit(traffic, nbytes, self.sweep)
        return Limit(arithmetic, flops, self.product)


def measure(device: str = "cpu", dtypes: Sequence[torch.dtype] = (torch.float32,), quick: bool = False) -> Limits:
    """With the threads at hand. `dtypes`: those that the work may be done in."""
    size = (1 << 24) if quick else {"cpu": 1 << 28, "cuda": 1 << 31}[device]
    sweep = best(list(sweeps(size, device)), device)
    shapes = SMALL if quick else {"cpu": SHAPES, "cuda": GPU_SHAPES}[device]
    ways = [(dtype, way) for dtype in dtypes for way in libraries(dtype, device)]
    first = [_tried(product(dtype, way, SMALL[0], device), device) for dtype, way in ways]
    worth = [way for way, probe in zip(ways, first, strict=True) if probe.rate >= HOPELESS * max(p.rate for p in first)]
    top = best([product(dtype, way, shape, device) for dtype, way in worth for shape in shapes], device)
    return Limits(top.rate, sweep.rate, top, sweep)


def best(probes: Sequence[Probe], device: str) -> Probe:
    return max((_tried(probe, device) for probe in probes), key=lambda probe: probe.rate)


def _tried(probe: Probe, device: str) -> Probe:
    taken = harness.interleave({"limit": probe.run}, rounds=2, warmup=1, seconds_of=harness.clock(device))
    return replace(probe, rate=probe.work / min(taken["limit"]))


# ---- ways to multiply ----

Way = Callable[[Tensor, Tensor, Tensor], object]  # a [M, K], w [N, K], out [M, N] = a w^T


def _torch(a: Tensor, w: Tensor, out: Tensor) -> None:
    torch.mm(a, w.t(), out=out)


def _onednn(a: Tensor, w: Tensor, out: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, w, None, "none", [], "")


def _ours(a: Tensor, w: Tensor, out: Tensor) -> None:
    _C.set_own_product(True)
    try:
        torch.ops.megacore.matmul_into(a, w.t(), out, False)
    finally:
        _C.set_own_product(None)


def libraries(dtype: torch.dtype, device: str) -> Iterator[Way]:
    """torch's own choice (MKL, oneDNN or cuBLAS); on a CPU also oneDNN and our product where they can."""
    yield _torch
    if device != "cpu":
        return
    if dtype == torch.float32 and _C.cpu_path() == "avx512" and hasattr(_C, "set_own_product"):
        yield _ours
    try:
        _onednn(*(torch.ones(16, 16, dtype=dtype) for _ in range(3)))
    except (RuntimeError, AttributeError):  # no oneDNN in this torch, or no such kernel in it
        return
    yield _onednn


def product(dtype: torch.dtype, way: Way, shape: tuple[int, int, int], device: str) -> Probe:
    m, k, n = shape
    a, w = (torch.randn(s, device=device).to(dtype) for s in ((m, k), (n, k)))
    name = f"{way.__name__.strip('_')} {str(dtype).removeprefix('torch.')} {m}x{k}x{n}"
    return Probe(name, partial(way, a, w, torch.empty(m, n, dtype=dtype, device=device)), 2.0 * m * k * n)


# ---- ways through memory ----


def sweeps(nbytes: int, device: str) -> Iterator[Probe]:
    """Of memory that was written before: pages that never were are one page of zeros, which lies in the cache."""
    x, y = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    yield Probe("copy", lambda: y.copy_(x), 2.0 * nbytes)
    yield Probe("in place", lambda: y.mul_(1.0), 2.0 * nbytes)
    yield Probe("read by amax", x.amax, nbytes)
    yield Probe("read by dot", lambda: torch.dot(x, x), nbytes)
