"""Verify, then time: ours and its rivals in turn in one process, beside what the machine could do at best.

A time is the median over rounds. In each round every contestant runs once, in an order that rotates, after a sweep
through memory that empties the caches; what disturbs the machine then disturbs all of them alike. A ratio is the median
of the ratios of the rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

RIVALS = (
    "torch-eager",
    "torch-compile",
    "torch-dtensor",
    "torch-pipelining",
    "megatron-core",
    "deepspeed",
    "gloo",
    "onednn",
    "cublaslt",
    "liger",
)
CACHE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # more than the last-level cache of the machines we know
FEWEST = 5  # rounds, however long one takes


class Missing(Exception):
    """A contestant cannot run here; the text says why. It is shown as "-", and is no error."""


@dataclass(frozen=True)
class Options:
    rivals: tuple[str, ...] = RIVALS
    rounds: int = 20
    threads: tuple[int, ...] = (1,)
    quick: bool = False  # small shapes and few rounds: does it run at all?
    device: str = "cpu"
    budget: float = 60.0  # seconds for the rounds of one row: long ones get fewer, never below FEWEST
    only: tuple[Mapping[str, object], ...] = ()  # run the cases that agree with one of these
    impl: str | None = None  # of ours: "cpp", "triton", "reference"; None: what dispatch chooses

    def wants(self, bench: str, case: Mapping[str, object]) -> bool:
        """Whether the case (or, while it has no `dir` yet, one of its directions) is asked for."""
        has = {"bench": bench, **case}
        keys = {*has, *(() if "dir" in has else ("dir",))}

        def agrees(filter_: Mapping[str, object]) -> bool:
            return set(filter_) <= keys and all(str(has[k]) == str(v) for k, v in filter_.items() if k in has)

        return not self.only or any(map(agrees, self.only))


@dataclass(frozen=True)
class Timed:
    """Seconds of each contestant in each round of one `interleave`; "limit": what cannot be undercut, see limits.py."""

    seconds: Mapping[str, Sequence[float]]
    missing: Mapping[str, str] = field(default_factory=dict)  # rivals that could not run -> why

    def ms(self, name: str) -> float:
        return median_ms(self.seconds[name])

    def ratio(self, name: str) -> float:
        """How many times as long as ours that contestant takes: the median of the ratios of the rounds."""
        return median(a / b for a, b in zip(self.seconds[name], self.seconds["ours"], strict=True))


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: every contestant is first, second, ... equally often."""
    for i in range(rounds):
        at = i % len(names)
        yield [*names[at:], *names[:at]]


def wall_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_seconds(run: Callable[[], object]) -> float:
    """Between two events. The sweep queued before them hides the time in which the host starts the first kernels."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def clock(device: str) -> Callable[[Callable[[], object]], float]:
    return cuda_seconds if device == "cuda" else wall_seconds


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    between: Callable[[str], object] | None = None,
    warmup: int = 2,
    seconds_of: Callable[[Callable[[], object]], float] = wall_seconds,
    budget: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. `between(name)` runs untimed before each: a sweep, inputs, a barrier.

    Fewer rounds than asked, but not below FEWEST, where they would take more than `budget` seconds. Ranks that meet in
    a barrier must not have a budget: they would differ in it.
    """

    def one(name: str) -> float:
        if between is not None:
            between(name)
        return seconds_of(contestants[name])

    warm: list[float] = []
    while len(warm) < warmup and not (warm and warm[-1] * FEWEST > budget):  # what takes so long is warm
        warm.append(sum(one(name) for name in contestants))
    if warm and budget < math.inf:
        rounds = min(rounds, max(FEWEST, int(budget / max(warm[-1], 1e-9))))
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for order in rotations(list(contestants), rounds):
        for name in order:
            taken[name].append(one(name))
    return taken


def cache_flush(device: str = "cpu") -> Callable[[], object]:
    """A function that sweeps through memory of its own, larger than the caches."""
    sweep = torch.zeros(CACHE_BYTES[device] // 4, device=device)
    return lambda: sweep.add_(1.0)


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * median(seconds)


def spread(seconds: Sequence[float]) -> float:
    """(90th - 10th percentile) / median."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / median(ordered)


def check_as_good_as(name: str, got: Tensor, torchs: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Refuses to time a wrong answer: the error against fp64 is at most `factor` times that of plain torch in the same
    dtype. What was never written is NaN (`poison`), and no bound holds for NaN."""
    scale = exact.abs().max().clamp_min(1e-30)
    ours, theirs = ((x.detach().double() - exact).abs().max() / scale for x in (got, torchs))
    bound = factor * theirs + factor / 2 * torch.finfo(got.dtype).eps
    if got.shape != exact.shape or not ours <= bound:
        raise AssertionError(
            f"{name}: error {ours:.2e} against fp64, more than {bound:.2e} ({factor:g} x plain torch's); not timed"
        )
