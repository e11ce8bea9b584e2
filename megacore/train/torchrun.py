"""torchrun for one host: `python -m megacore.train.torchrun NPROC FD ARGUMENTS` runs `python -m megacore ARGUMENTS` on
NPROC ranks and ends with the code of the rank that failed first.

The agent is torch's (torch.distributed.launcher). Three things differ from the command `torchrun`:
- the store listens on the loopback only; torchrun's listens on every interface, and whoever reaches it can write to it;
- once a rank has failed, ranks that still run GRACE seconds later are killed: torchrun waits 30 s;
- instead of a page on the failure, one JSON object goes to the file descriptor FD: which rank ended first, and how.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megacore.comm.store import loopback_store
from megacore.train.launch import STOPPED, children

GRACE = 2.0  # seconds in which the other ranks may end by themselves
BACKEND = "megacore-loopback"


class Loopback(RendezvousHandler):
    """The rendezvous of one agent with itself, whose store listens on 127.0.0.1."""

    def __init__(self, parameters: RendezvousParameters):
        self._run = parameters.run_id
        self._store = loopback_store()
        self._address = RendezvousStoreInfo("127.0.0.1", self._store.port)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.PrefixStore(self._run, self._store), 0, 1, self._address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True


Death = tuple[int, int | None]  # pid; exit code (negative: signal), None where the agent reaped it before we looked


class Deaths:
    """A thread that sees each rank end, in order, and kills those that outlive the first failure by GRACE seconds.

    Linux with pidfds; elsewhere it does nothing, and torch's agent ends the others after its own 30 s."""

    def __init__(self, pids: Callable[[], list[int]], grace: float = GRACE):
        self.order: list[Death] = []  # of ranks that failed
        self._pids, self._grace = pids, grace
        self._known: dict[int, int] = {}  # pid -> pidfd of those that run
        self._seen: set[int] = set()
        if hasattr(os, "pidfd_open"):
            threading.Thread(target=self._watch, daemon=True, name="megacore-deaths").start()

    def _watch(self) -> None:
        kill_at = float("inf")
        while True:
            for pid in self._pids():
                if pid not in self._seen:
                    self._seen.add(pid)
                    with suppress(OSError):
                        self._known[pid] = os.pidfd_open(pid)
            poll = select.poll()
            for fd in self._known.values():
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(50)}
            ended = [(pid, _code(pid)) for pid, fd in self._known.items() if fd in ready]
            self.order += sorted((e for e in ended if e[1] != 0), key=_first)
            if any(code is not None for _, code in self.order) and kill_at == float("inf"):
                kill_at = time.monotonic() + self._grace
            for pid in [pid for pid, fd in self._known.items() if fd in ready]:
                os.close(self._known.pop(pid))
            if time.monotonic() > kill_at:
                for fd in self._known.values():
                    with suppress(OSError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)


def _first(death: Death) -> float:
    """Of those that ended at one time: first what the agent has seen already, then signals."""
    return float("-inf") if death[1] is None else death[1]


def _code(pid: int) -> int | None:
    """Exit code of a child that has ended (negative: signal), without reaping it: the agent does that."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the agent was faster
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def first_cause(order: list[Death], failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """(rank, exit code) of the rank that ended the job: the first one, unless it says that it stopped because of
    another (STOPPED); then the first later one that failed by itself. After the first failure the agent signals the
    rest, so that a later signal is a consequence. (-1, STOPPED): every rank stopped because of another."""
    ranks = {failure.pid: rank for rank, failure in failures.items()}
    codes = {f.pid: f.exitcode for f in sorted(failures.values(), key=lambda f: f.timestamp)}
    seen = [(pid, codes.get(pid, 0) if code is None else code) for pid, code in order]
    unseen = [(pid, code) for pid, code in codes.items() if pid not in dict(order)]  # ended before we could watch them
    failed = [(pid, code) for pid, code in unseen + seen if code]
    for place, (pid, code) in enumerate(failed):
        if code != STOPPED and (place == 0 or code > 0):
            return ranks.get(pid, -1), code
    return -1, STOPPED


def run(nproc: int, tell: Callable[[dict[str, Any]], None], arguments: list[str]) -> int:
    """Run the job. `tell` gets {"rank", "code"} of the first failure."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its page on what `tell` says in a line
    rendezvous_handler_registry.register(BACKEND, Loopback)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=f"megacore-{os.getpid()}", rdzv_backend=BACKEND,
        rdzv_endpoint="127.0.0.1", local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # no folder of logs that a kill would leave behind
    )  # fmt: skip
    deaths = Deaths(lambda: children(os.getpid()))
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "megacore", *arguments)
    except ChildFailedError as error:
        rank, code = first_cause(deaths.order, error.failures)
        tell({"rank": rank, "code": code})
        return code if 0 < code != STOPPED else 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="megacore.train.torchrun")
    parser.add_argument("nproc", type=int)
    parser.add_argument("fd", type=int)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    return run(given.nproc, lambda told: os.write(given.fd, json.dumps(told).encode()), given.arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the job is over; torch takes a second to be torn down
