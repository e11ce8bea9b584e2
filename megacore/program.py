"""What the program `megacore` must see to before torch is imported, which takes seconds. Nothing here acts in a process
that merely imports the package.

- Ctrl-C in these seconds ends in one line and code 130, not in a page of half-imported modules.
- A rank under torchrun dies with torchrun (Linux). torchrun gives each rank a session of its own, so that no signal
  reaches it there once torchrun is killed: it would go on alone, or wait for peers that never come.
"""

from __future__ import annotations

import _signal as signal  # without signal.py's enumerations: Ctrl-C must be heard before anything is imported
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

PR_SET_PDEATHSIG = 1
INTERRUPTED = 130  # 128 + SIGINT, as a shell counts


def runs(command: list[str]) -> bool:
    """True for the command line of `python -m megacore ...` or of the console script `megacore ...`."""
    for at, word in enumerate(command[1:], 1):
        if word == "-m":
            return command[at + 1 : at + 2] == ["megacore"]
        if not word.startswith("-"):
            return os.path.basename(word) == "megacore"
    return False


def begin() -> None:
    """Called first thing by megacore/__init__.py; acts only where this process is the program `megacore`."""
    if not runs(sys.orig_argv):
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored where a shell put us in the background
        signal.signal(signal.SIGINT, _leave)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
        if orphaned(os.getppid()):  # torchrun went before this process could ask to go with it
            os._exit(1)


def interruptible() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again: what is half done can be put away."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """The kernel sends this process `number` when the thread that started it ends (Linux; elsewhere nothing)."""
    import ctypes
    from contextlib import suppress

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def orphaned(parent: int, processes: str = "/proc") -> bool:
    """True where the parent is no launcher of Python's: an init process took this one over. Unknown counts as no."""
    try:
        with open(f"{processes}/{parent}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return b"torch" not in command and b"python" not in command


def _leave(_number: int, _frame: FrameType | None) -> None:
    if speaks(os.environ):
        os.write(2, b"megacore: interrupted\n")
    os._exit(INTERRUPTED)  # SystemExit would be caught by whatever is being imported, or take a page with it


def leave(code: int) -> int:
    """End the program with `code`, at once: a launcher that has waited for its job has nothing to tear down, and torch
    takes a second for it. Returns `code` in a process that is not the program."""
    if runs(sys.orig_argv):
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # its reader has gone
                code = code or 1
        os._exit(code)
    return code


def speaks(environment: Mapping[str, str]) -> bool:
    """True for a process on its own and for rank 0: what all ranks would say is said once."""
    return environment.get("RANK", "0") == "0"
