"""One rank fails, all stop: the first cause is printed at once, with its rank; what follows from it is one line.

The rank that fails first prints its traceback, leaves its number in the job's store and ends without waiting for
anybody. Its peers learn of it twice: gloo's sockets close (an exception in whatever collective they wait in), and a
watcher thread reads the store (NCCL's collectives would otherwise wait for their time-out). A peer whose collective
broke waits a moment for the store to name the cause before it speaks. The launcher (torchrun) sees a non-zero exit and
ends whoever is left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist

from megacore.train.agreement import CheckpointError

KEY = "megacore/first_failure"
NAMED_WITHIN = 5.0  # seconds a rank with a broken connection waits for the cause to be named
ENDS_WITHIN = 10.0  # seconds after which the watcher ends a rank that is still waiting in a collective
POLL = 1.0

# What a collective says when a peer has gone. The text is all there is: gloo raises plain RuntimeError.
_BROKEN = (
    "connection closed", "connection reset", "broken pipe", "connection refused", "connection was likely closed",
    "gloo", "timed out", "nccl", "recvvalue failed", "sendbytes failed", "socket",
)  # fmt: skip


def is_consequence(error: BaseException) -> bool:
    """True when the error says that a peer has gone, rather than what went wrong here."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(s in str(error).lower() for s in _BROKEN)


class FailureBoard:
    """Where the ranks of one job leave the number of the first that failed. `store` None: a job of one process, which
    needs no watching."""

    def __init__(self, rank: int, store: dist.Store | None):
        self.rank, self.store = rank, store
        self._done = threading.Event()
        self._parent = os.getppid()

    def announce(self) -> None:
        """Name this rank as the first cause, unless another was first. Never waits for long: the store may be gone."""
        if self.store is not None:
            poster = threading.Thread(target=self._post, daemon=True)
            poster.start()
            poster.join(timeout=2.0)

    def _post(self) -> None:
        try:
            if not self.store.check([KEY]):
                self.store.set(KEY, str(self.rank))
        except Exception:
            pass  # the store lived in a process that has ended: the printed traceback is then all there is

    def first(self) -> int | None:
        """The rank that failed first, if one said so."""
        try:
            if self.store is not None and self.store.check([KEY]):
                return int(self.store.get(KEY))
        except Exception:
            return None
        return None

    def wait_first(self, seconds: float) -> int | None:
        until = time.monotonic() + seconds
        while (found := self.first()) is None and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def watch(self) -> None:
        """Start the thread that ends this rank when another has failed and this one still waits for it."""
        if self.store is not None:
            threading.Thread(target=self._watch, daemon=True, name="megacore-failure-watch").start()

    def _watch(self) -> None:
        while not self._done.wait(POLL):
            if os.getppid() != self._parent:
                _say(f"rank {self.rank} stops: the process that started it has gone")
                os._exit(1)
            found = self.first()
            if found is not None and found != self.rank and not self._done.wait(ENDS_WITHIN):
                _say(f"rank {self.rank} stops: rank {found} failed, and this rank still waited for it")
                os._exit(1)

    def close(self) -> None:
        self._done.set()


def guard(work: Callable[[], int], board: FailureBoard) -> int:
    """Run `work` and return its exit code. An exception is reported as described above and ends the process (os._exit:
    tearing down communicators may wait for peers that will never answer)."""
    board.watch()
    try:
        return work()
    except SystemExit:
        raise
    except BaseException as error:
        _report(error, board)
        sys.stdout.flush()
        os._exit(1)
    finally:
        board.close()


def _report(error: BaseException, board: FailureBoard) -> None:
    if isinstance(error, CheckpointError):  # raised on every rank at once, with the reason of the one that caused it
        if board.rank == 0:
            _say(f"megacore train: error: {error}")
        return
    if is_consequence(error):
        first = board.wait_first(NAMED_WITHIN)
        if first is not None and first != board.rank:
            _say(f"rank {board.rank} stops: rank {first} failed ({_first_line(error)})")
            return
        _say(f"rank {board.rank} lost a peer that ended without a word (killed?) {_place(error)}: {_first_line(error)}")
    elif isinstance(error, KeyboardInterrupt):
        _say(f"rank {board.rank} interrupted")
    else:
        _say(f"rank {board.rank} failed: {type(error).__name__}: {_first_line(error)}\n{_trace(error)}")
    board.announce()


def _say(text: str) -> None:
    """One write, so that lines of several ranks do not mix."""
    os.write(2, f"{text.rstrip()}\n".encode())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _place(error: BaseException) -> str:
    """Where in this package the peer was missed: should the guess be wrong, the line that raised is still named."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "megacore" in f.filename] or frames
    return f"at {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class StopRequest:
    """SIGTERM (and the first Ctrl-C) asks for a checkpoint and a clean end; the ranks agree on the step in which they
    obey. A second Ctrl-C interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
