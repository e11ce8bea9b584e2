"""Jobs under torchrun and under the launcher itself: restarts, signals during the start, kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore import program
from megacore.train.metrics import read
from tests.train.kill_trial import TOML, corpus, processes, trial

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


def _losses(run: Path) -> dict[int, float]:
    rows = [row for row in read(run / "metrics.jsonl") if "loss" in row]
    assert len({row["step"] for row in rows}) == len(rows), "a step has two lines"
    return {row["step"]: row["loss"] for row in rows}


def _under_torchrun(folder: Path, data: Path, steps: int, *options: str) -> subprocess.Popen:
    folder.mkdir()
    (folder / "run.toml").write_text(TOML.format(data=data, steps=steps))
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options,
             "-m", "megacore", "train", str(folder / "run.toml"), f"--run.out={folder / 'run'}"],
            cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip


@pytest.mark.timeout(300)
def test_a_job_that_torchrun_restarts_goes_on_from_its_checkpoint(tmp_path, data):
    """MB-52: losses are those of a run without the accident, each step once."""
    steps = 120
    whole = _under_torchrun(tmp_path / "whole", data, steps)
    job = _under_torchrun(tmp_path / "restarted", data, steps, "--max-restarts", "2")
    saved = tmp_path / "restarted/run/checkpoints/step-00000025"
    until = time.monotonic() + 120
    while not saved.is_dir() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(processes(tmp_path / "restarted")["rank 1"], signal.SIGKILL)
    assert job.wait(timeout=150) == 0, (tmp_path / "restarted/said").read_text()
    assert whole.wait(timeout=150) == 0, (tmp_path / "whole/said").read_text()
    assert "resumed from" in (tmp_path / "restarted/said").read_text()
    assert _losses(tmp_path / "restarted/run") == _losses(tmp_path / "whole/run")
    assert sorted(_losses(tmp_path / "whole/run")) == list(range(1, steps + 1))
    assert json.loads((tmp_path / "restarted/run/report.json").read_text())["train_loss"] > 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("victim", "at_s"), [("launcher", 6.0), ("torchrun", 1.0), ("rank 0", 0.5), ("rank 1", 6.0), ("torchrun", 9.0)]
)
def test_after_a_kill_nobody_is_left(tmp_path, data, victim, at_s):
    """MB-51b and MB-22: from the start-up of the ranks to their training (kill_trial.py tries 30 moments)."""
    row = trial(tmp_path / "job", data, victim, at_s, steps=100_000)
    assert not row.whole
    assert not row.faults, f"{row.faults}\n{row.said}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("victim", "at_s"), [("torchrun", 0.5), ("rank 0", 0.3)])
def test_ctrl_c_during_the_start_is_one_line_and_130(tmp_path, data, victim, at_s):
    row = trial(tmp_path / "job", data, victim, at_s, steps=100_000, number=signal.SIGINT, whom="launcher")
    assert row.code == 130 and len(row.said.splitlines()) == 1 and "interrupted" in row.said, row
    assert not row.left and row.gone_s < 30


@pytest.mark.timeout(240)
def test_a_terminal_that_closes_takes_the_job_along(tmp_path, data):
    row = trial(tmp_path / "job", data, "rank 0", 0.3, steps=100_000, number=signal.SIGHUP, whom="launcher")
    assert row.code == 129 and row.said == "megacore train: interrupted by SIGHUP\n" and not row.left, row


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "command", ["topo --tp 2", "verify --layers 2", "prepare docs --out {out}", "train configs/stdlib.toml --nproc 2"]
)
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path, command):
    words = command.format(out=tmp_path / "out").split()
    job = subprocess.Popen(
        [sys.executable, "-m", "megacore", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "libtorch" not in Path(f"/proc/{job.pid}/maps").read_text():
        time.sleep(0.002)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130 and said == "megacore: interrupted\n", said


@pytest.mark.parametrize(
    ("command", "is_program"),
    [
        (["python", "-m", "megacore", "train"], True),
        (["python", "-u", "-m", "megacore"], True),
        (["python", "/env/bin/megacore", "train"], True),
        (["python", "-m", "megacore.train.torchrun", "2"], False),
        (["python", "mine.py", "-m", "megacore"], False),
        (["python", "-m", "pytest", "megacore"], False),
        (["python", "-c", "import megacore"], False),
        (["python"], False),
    ],
)
def test_a_process_that_merely_imports_the_package_is_left_alone(command, is_program):
    assert program.runs(command) == is_program


def test_an_orphan_knows_that_its_parent_is_no_launcher(tmp_path):
    for pid, line in (
        (1, b"/sbin/init\0"),
        (2, b"/usr/bin/python3\0-m\0torch.distributed.run\0"),
        (3, b"/x/torchrun\0"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/cmdline").write_bytes(line)
    assert [program.orphaned(pid, str(tmp_path)) for pid in (1, 2, 3, 4)] == [True, False, False, False]
