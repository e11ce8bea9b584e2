"""Starts torchrun for a job on one host, passes signals to the ranks, and says in one line which rank was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megacore.program import die_with_parent

# What the ranks get unless the environment says otherwise. OpenMP threads of ranks that share cores fight. All ranks
# are on this host, so gloo need not look for a network interface. C++ symbols in every traceback cost seconds a rank.
DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_ADDR2LINE": "1"}
if sys.platform == "linux":
    DEFAULTS["GLOO_SOCKET_IFNAME"] = "lo"

STOPPED = 3  # exit code of a rank that stopped because of another one, which has been named


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    attempt: int = 0  # how often torchrun has restarted the job
    elastic: bool = False  # started by torchrun, with which it ends


def command(nproc: int, report: int, arguments: Sequence[str]) -> list[str]:
    """The command that runs `python -m megacore ARGUMENTS` on `nproc` ranks of this host; file descriptor `report`."""
    return [sys.executable, "-m", "megacore.train.torchrun", str(nproc), str(report), *arguments]


class Job:
    """torchrun as a child of this process. Signals to this process go to the ranks, not to torchrun: they agree on a
    step, save and end with 0, and torchrun then ends with 0 as well (it would end with 1 after a signal of its own).
    SIGTERM, SIGHUP and the first Ctrl-C ask for that; a rank that still imports ends at once. The second Ctrl-C
    interrupts the ranks, the third ends torchrun, and they die with it."""

    def __init__(self) -> None:
        self.child: subprocess.Popen | None = None
        self.asked: list[int] = []  # signals so far

    def on_signal(self, number: int, _frame: FrameType | None = None) -> None:
        self.asked.append(number)
        if self.child is None:
            return  # start() looks again
        presses = self.asked.count(signal.SIGINT)
        if number == signal.SIGINT and presses > 2:
            self.child.kill()
            return
        passed = signal.SIGINT if number == signal.SIGINT and presses == 2 else signal.SIGTERM
        for pid in children(self.child.pid) or [self.child.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, passed)

    def run(self, nproc: int, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, dict]:
        """(torchrun's exit code, what it reports of the first failure)."""
        read, write = os.pipe()
        parent = os.getpid()

        def before() -> None:
            die_with_parent()
            if os.getppid() != parent:  # it went between the fork and this line
                os._exit(1)

        self.child = subprocess.Popen(
            command(nproc, write, arguments),
            env={**DEFAULTS, **environment},
            preexec_fn=before,  # a launcher that is killed must not leave a job behind; ranks die with torchrun
            pass_fds=(write,),
            start_new_session=True,  # else a terminal's Ctrl-C would reach torchrun as well, and the ranks twice
        )
        os.close(write)
        if self.asked:  # between the handlers and here
            self.child.terminate()
        try:
            code = self.child.wait()
            with os.fdopen(read) as report:
                told = report.read()
            return code, json.loads(told) if told else {}
        finally:
            if self.child.poll() is None:
                self.child.terminate()


def launch(nproc: int, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the job and return its exit code: 0, that of the rank that failed first, or 128 + the signal that ended a
    rank, torchrun, or a job that was asked to stop before it could save."""
    job, before = Job(), {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, job.on_signal)
    try:
        code, told = job.run(nproc, arguments, environment)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    line, code = verdict(code, told, job.asked)
    if line:
        print(f"megacore train: {line}", file=sys.stderr, flush=True)
    return code


def verdict(code: int, told: Mapping[str, int], asked: Sequence[int]) -> tuple[str, int]:
    """(the launcher's line, its exit code) from torchrun's exit code, its report, and the signals it was sent."""
    ended = told.get("code", 0)
    by_signal = code < 0 or ended < 0 or ended == 130 or (code and not told)
    if code and asked and by_signal:
        return f"interrupted by {_name(asked[-1])}", 128 + asked[-1]
    if ended < 0:
        return f"rank {told['rank']} was ended by signal {-ended} ({_name(-ended)})", 128 - ended
    if code < 0:
        return f"torchrun was ended by signal {-code} ({_name(-code)}), and the ranks with it", 128 - code
    return "", code


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def children(pid: int) -> list[int]:
    """Processes that `pid` started (Linux); empty elsewhere."""
    try:
        return [
            int(p) for tasks in Path(f"/proc/{pid}/task").iterdir() for p in (tasks / "children").read_text().split()
        ]
    except OSError:
        return []
