"""The closing report of a run: on the screen, and as report.json."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megacore.train.metrics import clock, number, read
from megacore.train.outlets import dumps, write_whole


@dataclass
class Closing:
    """What the closing report says. Seconds are means over the ranks."""

    steps: int  # of this process
    tokens: int
    seconds: float  # wall time of the training steps
    flops_per_token: float
    peak_flops: float  # of all devices of the run together
    peak_source: str
    split: Mapping[str, float]
    peak_memory: float  # bytes, largest of the ranks
    memory_sum: float  # bytes, all ranks
    train_loss: float
    valid_loss: float | None
    vocab_size: int
    averaged: int  # steps in the training loss; those before a resume count
    done: int = 0  # steps of the whole run
    sample: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        return self.speed * self.flops_per_token / self.peak_flops if self.peak_flops else math.nan

    def values(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "done": self.done, "steps": self.steps, "tokens": self.tokens, "seconds": self.seconds,
            "tokens_per_s": self.speed, "mfu": self.mfu, "flops_per_token": self.flops_per_token,
            "peak_flops": self.peak_flops, "peak_source": self.peak_source, "split_seconds": dict(self.split),
            "peak_memory_bytes": self.peak_memory, "memory_sum_bytes": self.memory_sum, "train_loss": self.train_loss,
            "valid_loss": self.valid_loss, "ln_vocab": math.log(self.vocab_size), "sample": self.sample,
        }  # fmt: skip


def print_report(console: Console, closing: Closing) -> None:
    table = Table(title="megacore train: closing report", show_header=False, title_justify="left", expand=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("tokens", f"{closing.tokens:,} in {closing.steps} steps, {clock(closing.seconds)}")
    table.add_row("tokens/s", f"{closing.speed:,.0f}")
    mfu = "unknown (no peak)" if math.isnan(closing.mfu) else f"{100 * closing.mfu:.1f} %"
    table.add_row(
        "MFU", f"{mfu} = tokens/s * {closing.flops_per_token:.4g} FLOP/token / {closing.peak_flops / 1e9:,.1f} GFLOP/s"
    )
    table.add_row("peak", Text(closing.peak_source))
    if total := sum(closing.split.values()):
        parts = [
            f"{n.replace('_', '-')} {100 * s / total:.1f} %" for n, s in closing.split.items() if s >= 0.0005 * total
        ]
        table.add_row("time split", ", ".join(parts) + f"   of {clock(total)}, mean over ranks")
    if closing.peak_memory:
        largest, every = closing.peak_memory / 2**20, closing.memory_sum / 2**20
        table.add_row("peak memory", f"{largest:,.0f} MiB (largest rank), {every:,.0f} MiB in all")
    table.add_row("training loss", f"{closing.train_loss:.4f} (mean of the last {closing.averaged} steps)")
    if closing.valid_loss is not None:
        top = math.log(closing.vocab_size)
        share = 100 * closing.valid_loss / top
        table.add_row(
            "validation loss", f"{closing.valid_loss:.4f} on files held out = {share:.1f} % of ln V = {top:.4f}"
        )
    for note in closing.notes:
        table.add_row("note", Text(note))
    console.print(table)
    if closing.sample:
        console.print(Text("sample of generated text:", style="bold"))
        console.print(Text(closing.sample), soft_wrap=True)


def write_report(path: Path, closing: Closing) -> None:
    """report.json, whole or not at all; OSError leaves the one before."""
    write_whole(path, dumps({**closing.values(), "written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")


def report_is_of(path: Path, done: int) -> bool:
    """Whether report.json tells of a run of `done` steps; one of fewer, or a torn one, is none."""
    try:
        return int(json.loads(path.read_bytes())["done"]) == done
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def recalled(metrics: Path, **known: Any) -> Closing:
    """The report of a run whose process ended between its last save and its report, from its metrics file. `known`:
    what Closing asks for and the file does not say. Times by part and memory went with the process."""
    rows = [row for row in read(metrics) if number(row, "seconds") is not None]
    seconds = sum(number(row, "seconds") for row in rows)
    tokens = sum(number(row, "seconds") * (number(row, "tokens_per_s") or 0.0) for row in rows)
    return Closing(
        steps=len(rows), tokens=round(tokens), seconds=seconds, split={}, peak_memory=0.0, memory_sum=0.0, **known,
        notes=["made afterwards from metrics.jsonl: the process that trained ended before its report"],
    )  # fmt: skip
