"""Metrics: one line a step whatever the crashes, a screen line with what users watch, a report whose numbers add up."""

import io
import json
import math
import time

import pytest
from rich.console import Console

from megacore.train.metrics import MetricsFile, ProgressLine, Writers, clock, read
from megacore.train.peak import gpu_peak, measure_cpu_peak
from megacore.train.report import Closing, print_report, write_report
from megacore.train.timers import PARTS, Timers


def test_a_resumed_run_leaves_one_line_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in range(1, 6):
        first.write(step, {"loss": 10.0 - step})
    with path.open("a") as torn:
        torn.write('{"step": 6, "lo')  # killed while writing
    again = MetricsFile(path, 3)
    for step in range(4, 8):
        again.write(step, {"loss": 20.0 - step})
    again.close()
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["loss"] for row in read(path)] == [9.0, 8.0, 7.0, 16.0, 15.0, 14.0, 13.0]


def test_each_line_is_on_disk_when_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write(1, {"loss": 1.0})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]  # not closed, as in a killed run


def test_losses_survive_bit_for_bit(tmp_path):
    file, loss = MetricsFile(tmp_path / "metrics.jsonl", 0), 0.1 + 0.2
    file.write(1, {"loss": loss})
    assert read(tmp_path / "metrics.jsonl")[0]["loss"] == loss


def test_tensorboard_has_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = Writers(tmp_path, 0, tensorboard=True)
    writers.write(1, {"loss": 2.0, "lr": 0.5})
    writers.write(2, {"loss": 1.0, "lr": 0.25, "skipped": "gradients are not finite"})
    writers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert set(events.Tags()["scalars"]) == {"loss", "lr"}


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_line_shows_what_users_watch(terminal):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=200)
    with ProgressLine(console, 0, 100, every=10) as line:
        for step in range(1, 21):
            line.show(step, {"loss": 4.5, "lr": 1e-3, "grad_norm": 0.75}, seconds=0.5, tokens=1000)
    text = screen.getvalue()
    for part in ("step 20/100", "loss 4.5", "2,000 tokens/s", "lr 1.00e-03", "norm 0.75", "0:40 left"):
        assert part in text
    if not terminal:
        assert [line.split()[1] for line in text.splitlines()] == ["1/100", "10/100", "20/100"]


def closing(**changes: object) -> Closing:
    values = {
        "steps": 10, "tokens": 5000, "seconds": 2.0, "flops_per_token": 4e6, "peak_flops": 1e11,
        "peak_source": "a table",
        "split": {"compute": 1.5, "tensor": 0.25, "pipeline": 0.25, "other": 0.0}, "peak_memory": 2**20,
        "memory_sum": 2**22, "train_loss": 3.0, "valid_loss": 2.0, "vocab_size": 4096,
        "averaged": 10, "sample": "def [bold]f():",
    }  # fmt: skip
    return Closing(**{**values, **changes})


def test_report(tmp_path):
    screen = io.StringIO()
    print_report(Console(file=screen, width=160), closing())
    text = screen.getvalue()
    said = (
        "5,000 in 10 steps", "2,500", "10.0 %", "a table", "compute 75.0 %", "tensor 12.5 %", "1 MiB", "4 MiB",
        "3.0000",
        "2.0000", f"{200 / math.log(4096):.1f} % of ln V", "def [bold]f():",
    )  # fmt: skip
    for part in said:
        assert part in text, part
    write_report(tmp_path / "report.json", closing())
    assert json.loads((tmp_path / "report.json").read_text())["mfu"] == pytest.approx(2500 * 4e6 / 1e11)


def test_report_without_a_peak_or_validation():
    screen = io.StringIO()
    print_report(Console(file=screen, width=160), closing(peak_flops=0.0, valid_loss=None))
    assert "unknown" in screen.getvalue() and "validation" not in screen.getvalue()


def test_timers_count_each_second_once():
    timers = Timers()
    with timers.measure("data"):
        time.sleep(0.02)
    timers.add({"compute": 0.5, "pipeline": 0.25})
    timers.started -= 1.0
    split = timers.split()
    assert list(split) == list(PARTS)
    assert split["data"] >= 0.02 and split["compute"] == 0.5
    assert sum(split.values()) == pytest.approx(timers.elapsed, abs=0.02)


def test_clock():
    assert [clock(s) for s in (0, 61, 3599.6, 7325)] == ["0:00", "1:01", "1:00:00", "2:02:05"]


def test_peaks():
    assert gpu_peak("NVIDIA H200") == 989e12 and gpu_peak("Some GPU") is None
    assert 1e8 < measure_cpu_peak(1, seconds=0.01) < 1e14
