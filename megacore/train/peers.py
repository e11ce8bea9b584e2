"""What the ranks of a job know of each other through its store: who is where, who failed first, who still lives.

Each rank runs a thread (Pulse) that writes every `period` seconds what its main thread is doing. From that a rank whose
collective broke, or waited too long, can tell what is the matter with the one it missed:

    gone           its process has ended
    stopped        its process exists and no thread of it runs (SIGSTOP, a debugger, a frozen host)
    stands still   its threads run, and its main thread is in no collective: in a read, a loop, a lock
    elsewhere      its main thread waits in another collective than the one in which it is missed
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch.distributed as dist

PERIOD = 1.0  # seconds between beats, at most
ENDS_WITHIN = 2.0  # seconds in which a rank may notice by itself that another has failed
SPOKEN_WITHIN = 5.0  # seconds to wait for the rank that speaks first


@dataclass(frozen=True)
class Spot:
    """Where a main thread is."""

    text: str = "nowhere"
    collective: bool = False


def spot(frames: list[tuple[FrameType, int]]) -> Spot:
    """The place that `frames` (innermost first, with their lines) show: the collective and its ranks where
    torch.distributed is on the stack, and the innermost line of this package, else of whatever runs."""
    call, group = "", None
    for frame, _ in frames:
        module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == dist.distributed_c10d.__name__ and not function.startswith("_"):
            call, group = function, frame.f_locals.get("group")
    ours = [(f, n) for f, n in frames if _is_ours(f)]
    frame, line = (ours or frames)[0]
    here = f"{os.path.basename(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    if not call and _waits_for_work(frame, line):
        call = "wait for a transfer"
    if not call:
        return Spot(here)
    return Spot(f"{call}{_members(group)} ({here})", True)


def of_thread(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The stack of a running thread, innermost first."""
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def of_error(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """The stack that an exception came through, innermost first."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("megacore.") and name != __name__


def _waits_for_work(frame: FrameType, line: int) -> bool:
    """True on a line that waits for a transfer: Work.wait is no Python function, and leaves no frame of its own."""
    return "work.wait(" in linecache.getline(frame.f_code.co_filename, line)


def _members(group: object) -> str:
    with suppress(Exception):
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f" of ranks {{{shown}}}"
    return ""


def process_state(pid: int) -> str:
    """Linux's letter for the state of a process of this host (T: stopped, D: waits for a device), "" when it has
    ended, "?" where that cannot be known."""
    if not sys.platform.startswith("linux"):
        return "?"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if state in "ZX" else state


class Board:
    """The store as one rank sees it. `store` None: a job of one process, which has nobody to ask.

    No method raises: the store may live in a process that has ended; what cannot be read is not known."""

    def __init__(self, rank: int = 0, store: dist.Store | None = None, world: int = 1, timeout_s: float = 600.0):
        self.rank, self.store, self.world, self.timeout_s = rank, store, world, timeout_s
        self.period = min(PERIOD, timeout_s / 8)

    def apart(self) -> Board:
        """A board with a connection of its own: a connection serves one thread at a time."""
        return Board(self.rank, self.store.clone() if self.store else None, self.world, self.timeout_s)

    def put(self, key: str, value: object) -> bool:
        with suppress(Exception):
            self.store.set(key, json.dumps(value))
            return True
        return False

    def get(self, key: str) -> object:
        """The value, or None when there is none yet."""
        with suppress(Exception):
            if self.store.check([key]):
                return json.loads(self.store.get(key))
        return None

    def wait(self, key: str, seconds: float, stop: Callable[[], bool] = lambda: False) -> object:
        """Polls: a wait inside the store would keep Ctrl-C out."""
        until = time.monotonic() + seconds
        while (found := self.get(key)) is None and time.monotonic() < until and not stop():
            time.sleep(0.02)
        return found

    def enter(self) -> None:
        self.put(f"at/{self.rank}", {"host": socket.gethostname(), "pid": os.getpid()})

    def claim(self) -> bool:
        """True for the first rank of the job that has something to say about its end, and where nobody can be
        asked."""
        try:
            return self.store is None or self.store.add("claims", 1) == 1
        except Exception:
            return True

    def claimed(self) -> bool:
        try:
            return self.store is not None and self.store.add("claims", 0) > 0
        except Exception:
            return False

    def name(self, peer: int) -> str:
        at = self.get(f"at/{peer}")
        return f"rank {peer} (pid {at['pid']} on {at['host']})" if at else f"rank {peer}"

    def local_pid(self, peer: int) -> int | None:
        at = self.get(f"at/{peer}")
        return at["pid"] if at and at["host"] == socket.gethostname() else None

    def gone(self) -> list[int]:
        """Peers of this host whose process has ended."""
        pids = {peer: self.local_pid(peer) for peer in range(self.world) if peer != self.rank}
        return [peer for peer, pid in pids.items() if pid and process_state(pid) == ""]

    def missing(self) -> list[str]:
        """One line for each peer that is gone, stopped, or in no collective. Takes up to a second (sockets close a
        moment before a process has ended) and 2.5 periods of beats."""
        until = time.monotonic() + 1.0
        while not (gone := self.gone()) and time.monotonic() < until:
            time.sleep(0.02)
        if gone:
            return [f"{self.name(peer)} has gone" for peer in gone]
        first = self._beats()
        time.sleep(2.5 * self.period)
        then = self._beats()
        found = []
        for peer in (p for p in range(self.world) if p != self.rank and p in then):
            beat = then[peer]
            if peer in first and beat["count"] == first[peer]["count"]:
                found.append(self.frozen(peer, beat))
            elif not beat["collective"]:
                found.append(
                    f"{self.name(peer)} runs and stands still: it has been {beat['since']:.0f} s outside of any "
                    f"collective, now at {beat['text']}"
                )
        return found

    def elsewhere(self) -> str:
        """Where all peers are, for when each of them waits."""
        beats = self._beats()
        return "; ".join(f"rank {p} in {b['text']}" for p, b in beats.items() if p != self.rank)

    def frozen(self, peer: int, beat: dict) -> str:
        pid = self.local_pid(peer)
        state = process_state(pid) if pid else "?"
        why = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "waiting for a device", "": "gone"}
        how = why.get(state, "not answering")
        return f"{self.name(peer)} is {how}: no thread of it runs; it was last at {beat['text']}"

    def _beats(self) -> dict[int, dict]:
        return {p: b for p in range(self.world) if (b := self.get(f"beat/{p}"))}


class Pulse:
    """The thread of one rank that beats, and that ends this rank when another has failed, or has stopped.

    Rank r watches rank r - 1, so that each is watched by one. A process is stopped when its beats do not change for the
    time-out, counted in own beats: a host that slept and woke up accuses nobody."""

    def __init__(self, board: Board, parent: int | None, end: Callable[[str], None]):
        self.board, self.parent, self.end = board.apart(), parent, end
        self._done = threading.Event()
        self._main = threading.main_thread().ident
        self._count, self._in, self._since = 0, False, time.monotonic()
        self._seen, self._ticks = -1, 0

    def start(self) -> None:
        if self.board.store is not None or self.parent is not None:
            threading.Thread(target=self._run, daemon=True, name="megacore-pulse").start()

    def close(self) -> None:
        self._done.set()

    def _run(self) -> None:
        failed_at = None
        while not self._done.wait(self.board.period):
            if self.parent is not None and os.getppid() != self.parent:
                self.end(f"rank {self.board.rank} stops: the process that started it has gone")
            if self.board.store is None:
                continue
            self._beat()
            self._watch_neighbour()
            if failed_at is None and self.board.claimed():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > ENDS_WITHIN:
                self.board.wait("spoken", SPOKEN_WITHIN)
                self.end("")

    def _beat(self) -> None:
        frames = of_thread(sys._current_frames().get(self._main))
        now = spot(frames) if frames else Spot()
        if now.collective != self._in:
            self._in, self._since = now.collective, time.monotonic()
        self._count += 1
        self.board.put(
            f"beat/{self.board.rank}", {"count": self._count, "since": time.monotonic() - self._since, **asdict(now)}
        )

    def _watch_neighbour(self) -> None:
        peer = (self.board.rank - 1) % self.board.world
        beat = self.board.get(f"beat/{peer}")
        if not beat or beat["count"] != self._seen or self.board.get(f"left/{peer}"):
            self._seen, self._ticks = (beat["count"] if beat else -1), 0
            return
        self._ticks += 1
        if self._ticks * self.board.period > self.board.timeout_s and self.board.claim():
            line = f"rank {self.board.rank} stops after {self.board.timeout_s:g} s (run.timeout_s): "
            self.end(line + self.board.frozen(peer, beat))
