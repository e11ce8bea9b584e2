"""What ranks say when one of them fails, is killed, stands still, or was given something else."""

import os
import random
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist

from megacore.train import failure, same
from megacore.train.data.prepare import prepare
from megacore.train.launch import STOPPED, verdict
from megacore.train.metrics import read
from megacore.train.peers import Board, of_error, process_state, spot
from megacore.train.torchrun import first_cause
from tests.train.jobs import JobServer

TOML = """
[model]
layers = 4
hidden = 16
heads = 4
seq_length = 8
[data]
dir = "{data}"
global_batch = 8
micro_batch = 2
[optim]
warmup_steps = 2
[run]
out = "{out}"
steps = 8
save_every = 4
tensorboard = false
peak_tflops = 1.0
sample_tokens = 0
"""
TP_DP, TP_PP, PP4 = ("tp=2", "dp=2"), ("tp=2", "pp=2"), ("pp=4",)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    server = JobServer(tmp_path_factory.mktemp("jobs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(["alpha", "beta", "gamma"]) for _ in range(60)))
    prepare([folder], folder / "data", vocab_size=280, valid_fraction=0.2)
    return folder / "data"


@pytest.fixture
def config(tmp_path, data) -> str:
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(data=data, out=tmp_path / "run"))
    return str(path)


def options(layout, **run) -> list[str]:
    return [f"--parallel.{size}" for size in layout] + [f"--run.{k.replace('_', '-')}={v}" for k, v in run.items()]


def lines(ended) -> list[str]:
    """What was said of the end, by whichever rank."""
    said = [line for text in ended.said for line in text.splitlines()]
    return [line for line in said if line.startswith(("rank ", "megacore train:"))]


@pytest.mark.parametrize("layout", [TP_DP, TP_PP, PP4], ids="-".join)
@pytest.mark.parametrize(
    ("fault", "victim", "how"),
    [("stopped", 1, "is stopped (SIGSTOP)"), ("hung", 2, "runs and stands still")],
    ids=["stopped", "hung"],
)
def test_a_rank_that_stands_still_is_named_within_the_time_out(jobs, config, layout, fault, victim, how):
    ended = jobs.run(4, "train", config, *options(layout, timeout_s=4), fault=fault, limit=45)
    assert all(ended.codes), ended.output
    others = [rank for rank in range(4) if rank != victim]
    assert all(ended.codes[rank] == STOPPED for rank in others), ended.output
    assert max(ended.at[rank] for rank in others) < 40, ended.at
    [line] = lines(ended)
    assert f"rank {victim} (pid " in line and how in line and "after 4 s (run.timeout_s)" in line, line
    assert fault == "stopped" or "faults.py" in line or "corpus" in line or "loop.py" in line, line
    assert fault == "stopped" or "missed in " in line, line


@pytest.mark.parametrize("layout", [TP_DP, TP_PP, PP4], ids="-".join)
def test_a_killed_rank_is_named_once_by_who_missed_it(jobs, config, layout):
    ended = jobs.run(4, "train", config, *options(layout), fault="killed")
    assert ended.codes == [STOPPED, -9, STOPPED, STOPPED], ended.output
    [line] = lines(ended)
    assert "rank 1 (pid " in line and "has gone; missed in " in line and "run.timeout_s" not in line, line
    assert "{" in line or "wait for a transfer" in line, line


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("words", "RuntimeError: the feature store's socket timed out (gloo, nccl)"),
        ("unprintable", "_Unprintable: its text cannot be printed"),
        ("thread", "rank 1 failed in thread prefetch: OSError: the reader's disk has gone"),
    ],
)
def test_the_first_cause_is_whole_and_alone(jobs, config, fault, cause):
    ended = jobs.run(4, "train", config, *options(TP_DP, timeout_s=20), fault=fault)
    assert ended.codes == [STOPPED, 1, STOPPED, STOPPED], ended.output
    assert cause in ended.said[1] and "Traceback" in ended.said[1] and "faults.py" in ended.said[1], ended.output
    assert not any("Traceback" in ended.said[rank] or "killed" in ended.said[rank] for rank in (0, 2, 3)), ended.output
    assert len(lines(ended)) == 1, ended.output


def test_a_rank_with_a_layout_of_its_own_ends_the_others_that_wait_for_it(jobs, config):
    """No rank waits for its time-out; test_run_folder.py has other fields."""
    ended = jobs.run(4, "train", config, *options(TP_DP, timeout_s=300), fault="wrong layout", limit=60)
    assert ended.codes == [2] * 4, ended.output
    [line] = lines(ended)
    assert "rank 1: error: world=4 is not" in line and sum(len(text.splitlines()) for text in ended.said) == 1, line


@pytest.mark.parametrize("fault", ["slow report", "slow save"])
def test_rank_0_may_work_for_longer_than_others_may_wait(jobs, config, tmp_path, fault):
    """MB-53."""
    ended = jobs.run(4, "train", config, *options(TP_DP, timeout_s=3, sample_tokens=4, steps=4), fault=fault)
    assert ended.codes == [0] * 4, ended.output
    assert (tmp_path / "run/report.json").is_file() and len(read(tmp_path / "run/metrics.jsonl")) == 5


def _raised(text: str) -> BaseException:
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


def test_words_alone_make_no_consequence():
    quoted = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    assert failure.broken_collective(_raised(quoted)) is None
    assert failure.broken_collective(_raised("socket timed out")) is None
    assert failure.broken_collective(OSError("Connection reset by peer")) is None
    store = dist.DistNetworkError("the client socket has timed out")
    assert failure.broken_collective(store) is store
    outer = _raised("step failed")
    outer.__cause__ = store
    assert failure.broken_collective(outer) is store


def test_a_job_of_one_process_prints_whole_what_no_peer_explains(capfd):
    error = dist.DistNetworkError("alone")
    assert failure.report(error, Board()) == 1
    assert "rank 0 failed in a collective: alone" in capfd.readouterr().err


def test_a_spot_names_the_line_of_ours():
    try:
        same.first_difference([{"a": 1}, {"a": 2}, 3])
    except TypeError as error:
        found = spot(of_error(error.__traceback__))
        assert found.text.startswith("same.py:") and not found.collective
        assert traceback.extract_tb(error.__traceback__)[-1].name in found.text


def test_a_process_has_a_state():
    assert process_state(os.getpid()) in "RSD" or sys.platform != "linux"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_state(child.pid) in ("", "?")


class _Failure:
    def __init__(self, pid, exitcode, timestamp=0):
        self.pid, self.exitcode, self.timestamp = pid, exitcode, timestamp


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        ([(11, -9), (10, STOPPED)], (1, -9)),  # killed, and its peer noticed
        ([(10, STOPPED), (11, 1)], (1, 1)),  # a peer was faster than the one that failed
        ([(10, STOPPED), (11, -9)], (-1, STOPPED)),  # it stood still and was ended by us
        ([(10, 1), (11, -15)], (0, 1)),
        ([(11, None), (10, -15)], (1, -9)),  # the agent reaped it before we looked, and ended its peer
        ([(10, -15)], (1, -9)),  # it ended before we watched it
        ([], (1, -9)),  # no pidfds: torch's own order
    ],
)
def test_the_rank_that_ended_the_job_is_told_from_those_that_followed(order, cause):
    failures = {0: _Failure(10, STOPPED, 2), 1: _Failure(11, -9, 1)}
    assert first_cause(order, failures) == cause


@pytest.mark.parametrize(
    ("code", "told", "asked", "line", "ends"),
    [
        (0, {}, [15], "", 0),  # saved and left
        (1, {"rank": 2, "code": -9}, [], "rank 2 was ended by signal 9 (SIGKILL)", 137),
        (1, {"rank": 2, "code": -11}, [], "rank 2 was ended by signal 11 (SIGSEGV)", 139),
        (7, {"rank": 2, "code": 7}, [], "", 7),  # it has said why
        (1, {"rank": -1, "code": STOPPED}, [], "", 1),
        (-9, {}, [], "torchrun was ended by signal 9 (SIGKILL), and the ranks with it", 137),
        (-15, {}, [2], "interrupted by SIGINT", 130),  # torchrun was being imported
        (1, {"rank": 0, "code": -15}, [2], "interrupted by SIGINT", 130),  # the ranks were
        (1, {"rank": 0, "code": -15}, [15], "interrupted by SIGTERM", 143),
        (130, {"rank": 0, "code": 130}, [2, 2], "interrupted by SIGINT", 130),
        (1, {"rank": 0, "code": 1}, [15], "", 1),  # it could not save, and has said so
    ],
)
def test_the_launcher_says_what_no_rank_could(code, told, asked, line, ends):
    assert verdict(code, told, asked) == (line, ends)
