"""Verify, then time: ours and its rivals in turn in one process, beside what the machine could do at best.

A time is the median over rounds. In each round every contestant runs once, in an order that rotates, after a sweep
through memory that empties the caches; what disturbs the machine then disturbs all of them alike.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

CASE_KEYS = ("act", "dtype", "shape", "dir", "threads", "inplace", "tp", "pp", "schedule", "model")
RIVALS = (
    "torch-eager",
    "torch-compile",
    "torch-dtensor",
    "torch-pipelining",
    "megatron-core",
    "deepspeed",
    "gloo",
    "onednn",
    "liger",
)
CACHE_BYTES = 64 << 20  # more than the last-level cache that one core gets on the machines we know


@dataclass(frozen=True)
class Options:
    rivals: tuple[str, ...] = RIVALS
    rounds: int = 20
    threads: tuple[int, ...] = (1,)
    quick: bool = False  # small shapes and few rounds: does it run at all?


@dataclass(frozen=True)
class Limits:
    """What this machine does at best with the threads at hand, measured by `measure_limits`."""

    flops: float  # of a large fp32 matrix product, a second
    bandwidth: float  # bytes read plus bytes written by a large copy, a second

    def ms(self, *, flops: float = 0.0, nbytes: float = 0.0) -> float:
        """Lower bound for work of that many FLOP and bytes of memory traffic, in ms."""
        return 1e3 * max(flops / self.flops, nbytes / self.bandwidth)


@dataclass(frozen=True)
class Row:
    bench: str
    case: Mapping[str, str | int | bool]
    ours_ms: float | None
    rivals: Mapping[str, float | None]
    limit_ms: float | None = None
    extra_bytes: int | None = None  # memory that ours holds from forward to backward, beside inputs and outputs
    spread: float | None = field(default=None, compare=False)  # of ours: (90th - 10th percentile) / median

    def __post_init__(self) -> None:
        for kind, names, known in (("case", self.case, CASE_KEYS), ("rivals", self.rivals, RIVALS)):
            unknown = [n for n in names if n not in known]
            if unknown:
                raise ValueError(f"{kind} has {unknown}; choose from {', '.join(known)}")

    def as_json(self) -> dict:
        fields = asdict(self)
        del fields["spread"]
        return fields

    def line(self) -> str:
        """One line for the screen: ours, how much slower each rival is, and how near ours comes to the limit."""
        case = " ".join(f"{k}={v}" for k, v in self.case.items())
        parts = [f"{self.bench:14s} {case:58s} ours {_ms(self.ours_ms)}"]
        if self.spread is not None:
            parts.append(f"±{50 * self.spread:.0f} %")
        for name, ms in self.rivals.items():
            ratio = f" ({ms / self.ours_ms:.2f}x)" if ms and self.ours_ms else ""
            parts.append(f"{name} {_ms(ms)}{ratio}")
        if self.limit_ms and self.ours_ms:
            parts.append(f"limit {_ms(self.limit_ms)} ({100 * self.limit_ms / self.ours_ms:.0f} % reached)")
        return "  ".join(parts)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round: every contestant is first, second, ... equally often."""
    for i in range(rounds):
        at = i % len(names)
        yield [*names[at:], *names[:at]]


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    between: Callable[[], object] | None = None,
    warmup: int = 2,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. `between` runs untimed before each: a cache flush, or a barrier."""
    for _ in range(warmup):
        for run in contestants.values():
            run()
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for order in rotations(list(contestants), rounds):
        for name in order:
            if between is not None:
                between()
            start = time.perf_counter()
            contestants[name]()
            taken[name].append(time.perf_counter() - start)
    return taken


def cache_flush() -> Callable[[], object]:
    """A function that sweeps through memory of its own, larger than the caches."""
    sweep = torch.zeros(CACHE_BYTES // 4)
    return lambda: sweep.add_(1.0)


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * median(seconds)


def spread(seconds: Sequence[float]) -> float:
    """(90th - 10th percentile) / median."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / median(ordered)


def row(
    bench: str, case: Mapping, taken: Mapping[str, Sequence[float]], limit_ms: float | None, extra_bytes: int | None
) -> Row:
    """The row of one `interleave`, whose contestants are "ours" and rivals."""
    rivals = {name: median_ms(seconds) for name, seconds in taken.items() if name != "ours"}
    return Row(bench, case, median_ms(taken["ours"]), rivals, limit_ms, extra_bytes, spread(taken["ours"]))


def measure_limits(size: int = 1536, copy_bytes: int = 256 << 20) -> Limits:
    """Best of a few: an fp32 product of size^3, and a copy of `copy_bytes` (each byte read once, written once)."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    source, target = torch.zeros(copy_bytes // 4), torch.zeros(copy_bytes // 4)
    taken = interleave({"gemm": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds=5)
    return Limits(flops=2 * size**3 / min(taken["gemm"]), bandwidth=2 * copy_bytes / min(taken["copy"]))


def check_as_good_as(name: str, got: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """Refuses to time a wrong answer: the error against fp64 is at most twice that of plain torch in the same dtype."""
    scale = exact.abs().max().clamp_min(1e-30)
    ours, theirs = ((x.double() - exact).abs().max() / scale for x in (got, torchs))
    bound = 2 * theirs + torch.finfo(got.dtype).eps
    if not ours <= bound:
        raise AssertionError(
            f"{name}: error {ours:.2e} against fp64, more than {bound:.2e} (twice plain torch's); not timed"
        )


def saved_bytes(run: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    """Bytes that one forward keeps for its backward, beside its inputs and its output."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = run()
    known = {x.untyped_storage().data_ptr() for x in (*inputs, output)}
    return sum(size for at, size in kept.items() if at not in known)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if cpuinfo.exists() else []
    return named[0].split(":", 1)[1].strip() if named else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    return (commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")) or None


def report(rows: Sequence[Row]) -> dict:
    """What `--json` writes: a number is worth nothing without its machine, versions and commit."""
    machine = {"cpu": _cpu_name(), "cores": os.cpu_count(), "isa": torch.backends.cpu.get_cpu_capability()}
    packages = ("torch", "triton", "numpy", "megatron-core", "deepspeed", "liger-kernel", "transformers")
    versions = {"python": platform.python_version()} | {p: _version(p) for p in packages}
    return {"machine": machine, "versions": versions, "commit": _commit(), "rows": [row.as_json() for row in rows]}


def write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report(rows), indent=1) + "\n")
