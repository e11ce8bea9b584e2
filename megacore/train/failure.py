"""One rank fails, all stop: the first cause is printed at once and whole, by the rank that had it.

The rank that fails claims the word in the job's store, prints its traceback, and ends without waiting for anybody. Its
peers learn of it twice: gloo's sockets close (an exception in whatever collective they wait in), and Pulse (peers.py)
reads the store (NCCL's collectives would otherwise wait for their time-out). A rank that is killed says nothing: the
peer that misses it first has the word, looks for who is gone, stopped or standing still, and names it. The others end
without a word, with code STOPPED, so that whoever started them can tell the cause from its consequences.

What is a consequence is decided by the type of the exception and by where it was raised, never by its words alone; and
one for which no peer can be blamed is printed whole, like any other error.
"""

from __future__ import annotations

import dis
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType, TracebackType

import torch.distributed as dist

from megacore.train.agreement import CheckpointError
from megacore.train.launch import STOPPED
from megacore.train.peers import SPOKEN_WITHIN, Board, Pulse, of_error, spot

INTERRUPTED = 130
# Where the library says that it raised: a wait for a transfer leaves no frame of Python's.
_RAISED_BY_THE_LIBRARY = re.compile(r"/gloo/[\w/]+\.(cc|h):\d|c10d/\w+\.[ch]pp:\d|ProcessGroup\w+\.[ch]pp:\d")
LOGS = ("tensorboard", "rich")  # packages whose threads only show or write what a run says of itself


def broken_collective(error: BaseException) -> BaseException | None:
    """The exception of a collective that `error` is, or came from; None for an error of this rank's own."""
    for one in _chain(error):
        if isinstance(one, dist.DistError):
            return one
        if type(one) is not RuntimeError or one.__traceback__ is None:  # gloo raises nothing more special
            continue
        frames = of_error(one.__traceback__)
        inside = str(frames[0][0].f_globals.get("__name__", "")).startswith("torch.distributed")
        if inside or (not _by_a_raise(one.__traceback__) and _RAISED_BY_THE_LIBRARY.search(_text(one))):
            return one
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _by_a_raise(trace: TracebackType) -> bool:
    """True where a `raise` of Python's threw the exception, rather than a call into the library."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def guard(work: Callable[[], int], board: Board, parent: int | None = None) -> int:
    """Run `work` and return its exit code. An exception, here or in a thread, is reported as described above and ends
    the process (os._exit: tearing down communicators may wait for peers that will never answer). `parent`: the process
    with which this one must end."""
    pulse = Pulse(board, parent, lambda line: _end(line, board))
    before, threading.excepthook = threading.excepthook, lambda args: _thread_failed(args, board.apart())
    pulse.start()
    try:
        code = work()
        board.put(f"left/{board.rank}", True)
        return code
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        code = report(error, board)
        sys.stdout.flush()
        os._exit(code)
    finally:
        threading.excepthook = before
        pulse.close()


def report(error: BaseException, board: Board) -> int:
    """Say what is to be said of an error that ends this rank; its exit code."""
    if isinstance(error, CheckpointError):  # raised on every rank at once, with the reason of the one that caused it
        if board.rank == 0:
            _say(f"megacore train: error: {_text(error)}")
        return 1
    if broken := broken_collective(error):
        return _report_missing(error, broken, board)
    first = board.claim()
    if isinstance(error, KeyboardInterrupt):
        _speak(f"rank {board.rank} interrupted" if first else "", board)
        return INTERRUPTED
    line = f"{type(error).__name__}: {_first_line(error)}"
    if first:
        board.put("cause", line)
    if not first and board.wait("cause", 0.5) == line:
        _speak(f"rank {board.rank} failed likewise: {line}", board)
    else:
        _speak(f"rank {board.rank} failed: {line}\n{_trace(error)}", board)
    return 1


def _report_missing(error: BaseException, broken: BaseException, board: Board) -> int:
    """A collective broke, or waited too long: the first rank to notice names whom it missed, and where."""
    if not board.claim():
        board.wait("spoken", SPOKEN_WITHIN)
        return STOPPED
    where = spot(of_error(broken.__traceback__)).text if broken.__traceback__ else "a collective"
    if missing := board.missing():
        gone = all(line.endswith("has gone") for line in missing)
        after = "" if gone else f" after {board.timeout_s:g} s (run.timeout_s)"
        _speak(f"rank {board.rank} stops{after}: {'; '.join(missing)}; missed in {where}", board)
        return STOPPED
    others = board.elsewhere()
    _speak(
        f"rank {board.rank} failed in {where}: {_first_line(error)}"
        f"{f' (every rank lives: {others})' if others else ''}\n{_trace(error)}",
        board,
    )
    return 1


def _thread_failed(args: threading.ExceptHookArgs, board: Board) -> None:
    """A helper thread of this rank ended by an exception: its work will not be done, so the run ends with its cause;
    a log is no such work."""
    if args.exc_type is SystemExit or args.exc_value is None:
        return
    name = args.thread.name if args.thread else "a thread"
    line = f"{args.exc_type.__name__}: {_first_line(args.exc_value)}"
    frames = of_error(args.exc_traceback)
    packages = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames}
    if packages & set(LOGS):
        _say(f"rank {board.rank}: {name} of a log has ended ({line}); the run goes on without it")
        return
    board.claim()
    board.put("cause", line)
    _speak(f"rank {board.rank} failed in thread {name}: {line}\n{_trace(args.exc_value)}", board)
    os._exit(1)


def _end(line: str, board: Board) -> None:
    _speak(line, board.apart())
    os._exit(STOPPED)


def _speak(text: str, board: Board) -> None:
    if text:
        _say(text)
        board.put("spoken", board.rank)


def _say(text: str) -> None:
    """One write, so that lines of several ranks do not mix. A reader that has gone hears nothing."""
    with suppress(OSError):
        os.write(2, f"{text.rstrip()}\n".encode(errors="backslashreplace"))


def _text(error: BaseException) -> str:
    """str(error), for an error that may not be printable itself."""
    try:
        return str(error)
    except Exception as broken:
        return f"its text cannot be printed: {type(broken).__name__} in __str__"


def _first_line(error: BaseException) -> str:
    return (_text(error).splitlines() or [""])[0]


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class StopRequest:
    """SIGTERM, SIGHUP and the first Ctrl-C ask for a checkpoint and a clean end; the ranks agree on the step in which
    they obey. A second Ctrl-C interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or in the background of a shell
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
