"""`prepare` on a screen: a bar for each phase, and what it did in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from megacore.train.plain import plain

from .prepare import Report


def with_bars(console: Console, work: Callable[[Callable[[str, int, int], None]], Report]) -> Report:
    """Run `work(show)`. A phase is over when the next one begins or the work ends: its bar then stands at 100 %, also
    where less was there to do than was thought."""
    columns = (
        TextColumn("{task.description:9}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def finish() -> None:
            for task in bars.tasks:
                bars.update(task.id, completed=task.total)

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                finish()
                tasks[phase] = bars.add_task(phase, total=max(total, 1))
            bars.update(tasks[phase], completed=done, total=max(total, 1))

        report = work(show)
        finish()
    return report


def in_words(console: Console, out: Path, report: Report, asked: int | None) -> None:
    """What was skipped and what came out. `asked`: the vocabulary that was to be trained, None where none was."""
    lines = [
        f"skipped {count}: {reason} ({', '.join(report.examples.get(reason, ()))})"
        for reason, count in report.skipped.items()
    ]
    if asked is not None and report.vocab_size < asked:
        lines.append(
            f"vocabulary {report.vocab_size:,} of the {asked:,} asked for: the text has no more pairs that occur twice "
            "to make tokens of; more text gives more"
        )
    lines.append(
        f"{plain(out)}: {report.files:,} files read, {report.files_skipped:,} skipped, "
        f"{report.characters:,} characters; vocabulary {report.vocab_size:,}; "
        f"train {report.train_documents:,} documents, {report.train_tokens:,} tokens; "
        f"valid {report.valid_documents:,} documents, {report.valid_tokens:,} tokens"
    )
    for line in lines:
        console.print(line, soft_wrap=True)
