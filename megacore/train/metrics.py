"""What a run tells: one JSON line and TensorBoard scalars a step, a live line on the screen, and one closing report.

Only one rank writes (rank 0: the loss of a step is the same on every rank).
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WINDOW = 20  # steps over which the shown speed is averaged


class MetricsFile:
    """`metrics.jsonl`: one object a line, each with its `step`. Opened at step n it drops the lines of later steps, so
    that a run that died after its last checkpoint and does those steps again leaves one line for each."""

    def __init__(self, path: Path, done: int):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, done) if path.exists() else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(path)
        self._file = path.open(
            "a", buffering=1
        )  # a line reaches the file before the next step: a killed run loses none

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **values}, allow_nan=True) + "\n")

    def close(self) -> None:
        self._file.close()


def _lines_until(path: Path, done: int) -> list[str]:
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # the torn last line of a run that was killed while writing
        if step <= done and line.endswith("\n"):
            kept.append(line)
    return kept


def read(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class Writers:
    """The metrics file and TensorBoard together. Resumed at step `done`."""

    def __init__(self, out: Path, done: int, tensorboard: bool):
        self.file = MetricsFile(out / "metrics.jsonl", done)
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # 2 s to import: only on the rank that writes

            self.board = SummaryWriter(str(out / "tensorboard"), purge_step=done + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self.file.write(step, values)
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def clock(seconds: float) -> str:
    seconds = max(0, round(seconds))
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class ProgressLine:
    """The live line: step, loss, tokens/s, learning rate, gradient norm, time left; 80 columns are enough. On a
    terminal one line that changes; elsewhere a plain line every `every` steps."""

    def __init__(self, console: Console, first: int, last: int, every: int):
        self.console, self.first, self.last, self.every = console, first, last, every
        self.recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self.live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None

    def __enter__(self) -> ProgressLine:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.__exit__(kind, error, trace)

    def show(self, step: int, values: Mapping[str, float], seconds: float, tokens: int) -> None:
        """`step` counts from 1: the number of steps done."""
        self.recent.append((seconds, tokens))
        spent = sum(s for s, _ in self.recent)
        speed = sum(t for _, t in self.recent) / spent if spent else 0.0
        left = spent / len(self.recent) * (self.last - step)
        line = (
            f"step {step}/{self.last}  loss {values['loss']:.4f}  {speed:,.0f} tokens/s  lr {values['lr']:.2e}  "
            f"norm {values['grad_norm']:.3f}  {clock(left)} left"
        )
        if self.live:
            row = Table.grid(padding=(0, 2))
            bar = [ProgressBar(total=self.last, completed=step, width=24)] if self.console.width >= 110 else []
            row.add_row(*bar, Text(line, no_wrap=True, overflow="ellipsis"))
            self.live.update(row)
        elif step % self.every == 0 or step == self.last or step == self.first + 1:
            self.note(line)

    def note(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


@dataclass
class Closing:
    """What the closing report says. Seconds are means over the ranks."""

    steps: int
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
            "steps": self.steps, "tokens": self.tokens, "seconds": self.seconds, "tokens_per_s": self.speed,
            "mfu": self.mfu, "flops_per_token": self.flops_per_token, "peak_flops": self.peak_flops,
            "peak_source": self.peak_source, "split_seconds": dict(self.split), "peak_memory_bytes": self.peak_memory,
            "memory_sum_bytes": self.memory_sum, "train_loss": self.train_loss, "valid_loss": self.valid_loss,
            "ln_vocab": math.log(self.vocab_size), "sample": self.sample,
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
    total = sum(closing.split.values()) or 1.0
    parts = [
        f"{name.replace('_', '-')} {100 * s / total:.1f} %" for name, s in closing.split.items() if s >= 0.0005 * total
    ]
    table.add_row("time split", ", ".join(parts) + f"   of {clock(total)}, mean over ranks")
    table.add_row(
        "peak memory",
        f"{closing.peak_memory / 2**20:,.0f} MiB (largest rank), {closing.memory_sum / 2**20:,.0f} MiB in all",
    )
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
    path.write_text(json.dumps({**closing.values(), "written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, indent=1) + "\n")
