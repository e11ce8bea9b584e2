"""A log must not end a run: full disks, closed pipes; and JSON that every parser reads (MB-56)."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megacore.train import outlets
from megacore.train.metrics import MetricsFile, Writers, number, read
from megacore.train.outlets import Screen, best_effort, dumps, write_whole
from megacore.train.report import Closing, recalled, report_is_of, write_report


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def told(monkeypatch):
    lines = []
    monkeypatch.setattr(outlets, "tell", lines.append)
    return lines


def refuse_constants(name):
    raise AssertionError(f"{name} is no JSON")


def parse(line):
    return json.loads(line, parse_constant=refuse_constants)


def test_json_has_no_nan_and_no_infinity(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write(1, {"loss": math.nan, "grad_norm": math.inf, "deep": [{"x": -math.inf}], "lr": 0.1})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert parse(line) == {"step": 1, "loss": None, "grad_norm": None, "deep": [{"x": None}], "lr": 0.1}
    assert number(read(tmp_path / "metrics.jsonl")[0], "loss") is None


def report(**changes):
    values = {
        "steps": 1, "tokens": 8, "seconds": 1.0, "flops_per_token": 1.0, "peak_flops": 0.0, "peak_source": "",
        "split": {}, "peak_memory": 0.0, "memory_sum": 0.0, "train_loss": math.nan, "valid_loss": math.inf,
        "vocab_size": 8, "averaged": 0, "done": 4,
    }  # fmt: skip
    return Closing(**{**values, **changes})


def test_the_report_is_json_too_without_a_peak(tmp_path):
    write_report(tmp_path / "report.json", report())
    body = parse((tmp_path / "report.json").read_text())
    assert body["mfu"] is None and body["train_loss"] is None and body["valid_loss"] is None


def test_lines_wait_while_the_disk_is_full_and_none_is_lost_or_torn(tmp_path):
    """The limit on a file's size fails a write half way, as a full disk does: the part must not stay."""
    path = tmp_path / "metrics.jsonl"
    script = f"""
import resource, signal
from pathlib import Path
from megacore.train.metrics import MetricsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = MetricsFile(Path({str(path)!r}), 0)
for step in range(1, 31):
    limit = 200 if 5 <= step < 25 else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    file.write(step, {{"loss": 1.0 / step}})
    if step == 24:
        assert Path({str(path)!r}).read_bytes().endswith(b"\\n"), "a torn line"
file.close()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert [row["step"] for row in map(parse, path.read_text().splitlines())] == list(range(1, 31))
    assert ended.stderr.count("takes no lines") == 1 and "none was lost" in ended.stderr


def test_a_file_that_cannot_be_made_ends_nothing(tmp_path, told):
    (tmp_path / "file").write_text("")
    lines = MetricsFile(tmp_path / "file" / "metrics.jsonl", 0)
    lines.write(1, {"loss": 1.0})
    lines.close()
    assert len(told) == 2 and "lost" in told[-1]


def test_a_tensorboard_that_fails_is_given_up(tmp_path, told, monkeypatch):
    monkeypatch.setattr("megacore.train.metrics.tell", told.append)
    writers = Writers(tmp_path, 0, tensorboard=True)
    monkeypatch.setattr(writers.board, "add_scalar", full)
    writers.write(1, {"loss": 2.0, "lr": 1.0})
    writers.write(2, {"loss": 1.0})
    writers.close()
    assert len(told) == 1 and "No space left" in told[0]
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_report_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch, told):
    path = tmp_path / "report.json"
    write_whole(path, "old")
    monkeypatch.setattr(Path, "write_bytes", full)
    with best_effort("report.json", say=told.append):
        write_report(path, report())
    assert path.read_text() == "old" and "No space left" in told[0]


@pytest.mark.parametrize("sink", ["pipe", "full"])
def test_a_screen_that_takes_no_text_changes_no_exit_code(sink):
    if sink == "full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    script = """
import sys
from rich.console import Console
from megacore.train.outlets import Screen
console = Console(file=Screen(sys.stdout))
for number in range(3000):
    console.print("a line that fills the buffer", number)
print("done", file=sys.stderr)
"""
    command = [sys.executable, "-c", script]
    if sink == "pipe":
        head = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        ended = subprocess.run(command, stdout=head.stdin, stderr=subprocess.PIPE, text=True)
        head.stdin.close()
        head.wait()
    else:
        with open("/dev/full", "w") as nowhere:
            ended = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0 and ended.stderr.endswith("done\n"), ended.stderr
    assert ended.stderr.count("the screen takes no text") == 1 and "Exception" not in ended.stderr


def test_a_screen_passes_on_what_it_can(tmp_path):
    with (tmp_path / "out").open("w") as file:
        Console(file=Screen(file)).print("text")
    assert (tmp_path / "out").read_text() == "text\n"


ODD = ["[1, 2]", "7", "null", '{"loss": 1}', '{"step": "3"}', '{"step": 1.5}', "[" * 100_000, "\udcff", "{"]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_lines_that_are_no_metrics_stop_no_resume(tmp_path, odd):
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": "low"}', '{"step": 9, "loss": 1.0}']
    path.write_text("\n".join([good[0], odd, *good[1:]]) + "\n", errors="surrogateescape")
    file = MetricsFile(path, 2)
    file.write(3, {"loss": 2.0})
    file.close()
    rows = read(path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [number(row, "loss") for row in rows] == [3.0, None, 2.0]


def test_dropping_late_lines_needs_no_room(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    monkeypatch.setattr("megacore.train.metrics.write_whole", full)
    MetricsFile(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_report_is_made_from_the_metrics_where_the_process_ended_before_it(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for step in range(1, 5):
        file.write(step, {"loss": 1.0, "seconds": 0.5, "tokens_per_s": 200.0})
    file.write(4, {"valid_loss": 2.0})
    assert not report_is_of(tmp_path / "report.json", 4)
    made = recalled(
        tmp_path / "metrics.jsonl", flops_per_token=1.0, peak_flops=1.0, peak_source="", train_loss=1.0, valid_loss=2.0,
        vocab_size=8, averaged=4, done=4,
    )  # fmt: skip
    assert (made.steps, made.tokens, made.seconds, made.speed) == (4, 400, 2.0, 200.0)
    write_report(tmp_path / "report.json", made)
    assert report_is_of(tmp_path / "report.json", 4) and not report_is_of(tmp_path / "report.json", 5)


def test_strict_keeps_numbers_bit_for_bit():
    assert parse(dumps({"x": 0.1 + 0.2, "n": 2**60, "t": True}))["x"] == 0.1 + 0.2
