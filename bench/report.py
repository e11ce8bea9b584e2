"""A row, the line that shows it, and the file that keeps rows with machine, versions and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import torch

from bench.harness import RIVALS, Timed, spread

CASE_KEYS = (
    "act", "dtype", "shape", "dir", "threads", "inplace", "reduction", "tp", "pp", "schedule", "model", "isa", "impl",
    "device",
)  # fmt: skip
FLOORS = ("linear-alone", "read-and-copy")
PACKAGES = ("torch", "triton", "numpy", "megatron-core", "deepspeed", "liger-kernel", "transformers")


@dataclass(frozen=True)
class Row:
    bench: str
    case: Mapping[str, str | int | bool]
    ours_ms: float | None
    rivals: Mapping[str, float | None]  # None: could not run, `missing` says why
    limit_ms: float | None = None
    extra_bytes: int | None = None  # peak memory of ours beyond inputs, outputs and gradients
    extra_of: int | None = None  # bytes of the logits, of which `extra_bytes` is a share
    floors: Mapping[str, float] = field(default_factory=dict)  # less work than the operator's, timed in the same rounds
    ratios: Mapping[str, float] = field(default_factory=dict)  # rival, floor or "limit" -> median of its / our time
    spread: Mapping[str, float] = field(default_factory=dict)  # (90th - 10th percentile) / median
    rounds: int | None = None
    collectives: int | None = None  # in one forward and backward of ours
    missing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known_names = (("case", self.case, CASE_KEYS), ("rivals", self.rivals, RIVALS), ("floors", self.floors, FLOORS))
        for kind, names, known in known_names:
            unknown = [n for n in names if n not in known]
            if unknown:
                raise ValueError(f"{kind} has {unknown}; choose from {', '.join(known)}")

    @classmethod
    def from_json(cls, found: Mapping) -> Row:
        """Also from files of before a key was added."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in found.items() if k in known})

    def ratio(self, name: str) -> float | None:
        """How many times as long as ours a rival or floor takes."""
        other = self.rivals.get(name, self.floors.get(name))
        return self.ratios.get(name, other / self.ours_ms if other and self.ours_ms else None)

    @property
    def reached(self) -> float | None:
        """The share of the physical limit: the median over the rounds where it was measured in them."""
        if "limit" in self.ratios:
            return self.ratios["limit"]
        return self.limit_ms / self.ours_ms if self.limit_ms and self.ours_ms else None

    def line(self) -> str:
        """One line for the screen: ours, how much slower each rival is, and how near ours comes to the limit."""
        case = " ".join(f"{k}={v}" for k, v in self.case.items())
        parts = [f"{self.bench:14s} {case:58s} ours {ms(self.ours_ms)}"]
        if "ours" in self.spread:
            parts.append(f"±{50 * self.spread['ours']:.0f} %")
        for name, value in {**self.rivals, **self.floors}.items():
            ratio = self.ratio(name)
            parts.append(f"{name} {ms(value)}" + (f" ({ratio:.2f}x)" if ratio else ""))
        if self.reached:
            parts.append(f"limit {ms(self.limit_ms)} ({100 * self.reached:.0f} % reached)")
        if self.extra_bytes is not None:
            share = f" ({100 * self.extra_bytes / self.extra_of:.1f} % of the logits)" if self.extra_of else ""
            parts.append(f"extra {self.extra_bytes / 2**20:.1f} MiB{share}")
        if self.collectives is not None:
            parts.append(f"{self.collectives} collective" + "s" * (self.collectives != 1))
        return "  ".join(parts)


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.{0 if value >= 100 else 2 if value >= 1 else 4}f} ms"


def row(
    bench: str,
    case: Mapping,
    timed: Timed,
    limit_ms: float | None = None,
    floors: Sequence[str] = (),
    once: Mapping[str, float] = MappingProxyType({}),
    **more: int | None,
) -> Row:
    """The row of one `interleave`, whose contestants are "ours", `floors`, rivals and perhaps "limit". `once`: seconds
    of rivals that ran a single time, beside the rounds."""
    others = [name for name in timed.seconds if name not in ("ours", "limit")]
    probed = "limit" in timed.seconds
    rivals = {name: timed.ms(name) for name in others if name not in floors} | dict.fromkeys(timed.missing)
    rivals |= {name: 1e3 * seconds for name, seconds in once.items()}
    return Row(
        bench,
        case,
        timed.ms("ours"),
        rivals,
        timed.ms("limit") if probed else limit_ms,
        floors={name: timed.ms(name) for name in floors},
        ratios={name: timed.ratio(name) for name in [*others, *(["limit"] if probed else [])]},
        spread={name: spread(seconds) for name, seconds in timed.seconds.items()},
        rounds=len(timed.seconds["ours"]),
        missing=timed.missing,
        **more,
    )


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
        command = ["git", *args]
        try:
            done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
        except FileNotFoundError:  # a machine without git
            return ""
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or os.environ.get("MEGACORE_COMMIT", "")
    return (commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")) or None


def machine() -> dict:
    found = {"cpu": _cpu_name(), "cores": os.cpu_count(), "isa": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def about() -> dict:
    """A number is worth nothing without its machine, versions and commit."""
    versions = {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES}
    return {"machine": machine(), "versions": versions, "commit": _commit()}


def write(path: Path, rows: Sequence[Row], **more: object) -> None:
    """What `--json` keeps, and `more`. Written beside it and then renamed: a stopped run leaves the rows of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps({**about(), "rows": [asdict(row) for row in rows], **more}, indent=1) + "\n")
    beside.replace(path)


def read(path: Path) -> tuple[dict, list[Row]]:
    """(everything in the file, its rows)"""
    found = json.loads(path.read_text())
    return found, [Row.from_json(row) for row in found["rows"]]


if __name__ == "__main__":  # one line: for gpu_check.sh
    print(json.dumps(about()))
