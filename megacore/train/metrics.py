"""What a run tells while it trains: one JSON line and TensorBoard scalars a step, and a live line on the screen.

Only one rank writes (rank 0: the loss of a step is the same on every rank).
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megacore.train.outlets import LineFile, dumps, reason, tell, write_whole

WINDOW = 20  # steps over which the shown speed is averaged


class MetricsFile:
    """`metrics.jsonl`: one object a line (RFC 8259: a number that is not finite is null), each with its `step`. Opened
    at step n it drops the lines of later steps, so that a run that died after its last checkpoint and does those steps
    again leaves one line for each, and lines that are no metrics."""

    def __init__(self, path: Path, done: int):
        self.path = path
        self._lines = LineFile(path, lambda at: _drop_after(at, done))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write(dumps({"step": step, **values}))

    def close(self) -> None:
        self._lines.close()


def _drop_after(path: Path, done: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and (row := _row(line)) and row["step"] <= done]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))  # nearly always; needs no room on the disk
    else:
        write_whole(path, b"".join(kept))


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's object, or None: the torn last line of a run that was killed while writing, or no metrics at all."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, those that are none left out; none where there is no file."""
    path = Path(path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for line in lines if (row := _row(line)) is not None]


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A value of a row that can be reckoned with."""
    value = row.get(name)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


class Writers:
    """The metrics file and TensorBoard together. Resumed at step `done`. Neither ends a run: see outlets."""

    def __init__(self, out: Path, done: int, tensorboard: bool):
        self.file = MetricsFile(out / "metrics.jsonl", done)
        self.board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # 2 s to import: only on the rank that writes

            self._guarded(lambda: setattr(self, "board", SummaryWriter(str(out / "tensorboard"), purge_step=done + 1)))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self.file.write(step, values)
        for name, value in values.items():
            if self.board is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._guarded(partial(self.board.add_scalar, name, value, step))

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self._guarded(self.board.close)

    def _guarded(self, call: Callable[[], object]) -> None:
        """TensorBoard writes in a thread of its own and tells of its errors at a later call, of whatever type."""
        try:
            call()
        except Exception as error:
            self.board = None
            tell(f"warning: no more TensorBoard: {type(error).__name__}: {reason(error)}; training goes on")


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
