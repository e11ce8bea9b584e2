"""Starts torchrun for a job on one host, passes SIGTERM to the ranks and returns torchrun's exit code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What the ranks get unless the environment says otherwise. OpenMP threads of ranks that share cores fight. All ranks
# are on this host, so gloo need not look for a network interface. C++ symbols in every traceback cost seconds a rank.
DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_ADDR2LINE": "1"}
if sys.platform == "linux":
    DEFAULTS["GLOO_SOCKET_IFNAME"] = "lo"


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def command(nproc: int, arguments: Sequence[str]) -> list[str]:
    """The torchrun command that runs `python -m megacore ARGUMENTS` on `nproc` ranks of this host."""
    torchrun = [sys.executable, "-m", "megacore.train.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    return [*torchrun, "--nproc-per-node", str(nproc), "--monitor-interval", "0.5", "-m", "megacore", *arguments]


def launch(nproc: int, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the job and return its exit code. SIGTERM to this process goes to the ranks, not to torchrun: they agree on a
    step, save and end with 0, and torchrun then ends with 0 as well (it would end with 1 after a signal of its own).
    The first Ctrl-C is passed on as SIGTERM: a rank that still imports ends without a traceback."""
    child = subprocess.Popen(
        command(nproc, arguments),
        env={**DEFAULTS, **environment},
        preexec_fn=_die_with_parent,
        start_new_session=True,  # else a terminal's Ctrl-C would reach torchrun as well, and the ranks twice
    )

    interrupted = False

    def forward(number: int, _frame: object) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and not interrupted:
            interrupted, number = True, signal.SIGTERM
        for pid in _children(child.pid) or [child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.terminate()


def _die_with_parent() -> None:
    """In the child, before it becomes torchrun (Linux): a launcher that is killed must not leave a job behind that a
    resumed one would meet in the same folder. The ranks in turn watch torchrun (failure.py)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _children(pid: int) -> list[int]:
    """Processes that `pid` started (Linux); empty elsewhere."""
    try:
        return [
            int(p) for tasks in Path(f"/proc/{pid}/task").iterdir() for p in (tasks / "children").read_text().split()
        ]
    except OSError:
        return []
