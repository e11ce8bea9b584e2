"""One job a run folder: two would delete each other's checkpoints and mix their metrics.

The first rank holds an advisory lock (flock) on RUN/run.lock while it lives; the kernel drops it with the process,
however that ends, so no lock is ever stale. The file says who holds it. Where a filesystem has no locks the run goes on
without one, and says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megacore.train.outlets import tell

NAME = "run.lock"
PATIENCE = 3.0  # seconds that a job which is just ending may take to let go
_UNLOCKABLE = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class RunLock:
    """Holds the lock of a run's folder, from `take` to `release`."""

    def __init__(self, out: Path):
        self.path = out / NAME
        self._fd: int | None = None

    def take(self, patience: float = PATIENCE) -> None:
        """ValueError that says who holds it; OSError where the folder cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(fd, fcntl.LOCK_EX, patience):
            holder = _holder(fd)
            os.close(fd)
            raise ValueError(_refusal(self.path.parent, holder))
        self._fd = fd
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(about).encode(), 0)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def check_unlocked(out: Path, patience: float = PATIENCE) -> None:
    """ValueError that says who holds the folder, if anybody does. Takes nothing: for a launcher, and for ranks before
    they join (a shared lock for a moment, so that they do not see each other)."""
    try:
        fd = os.open(out / NAME, os.O_RDONLY)
    except OSError:
        return  # no run has been here, or `take` will say what is wrong
    try:
        if not _lock(fd, fcntl.LOCK_SH, patience):
            raise ValueError(_refusal(out, _holder(fd)))
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, patience: float) -> bool:
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _UNLOCKABLE:
                tell("warning: the filesystem of run.out has no locks; see that no second job writes there")
                return True
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def _holder(fd: int) -> str:
    try:
        about = json.loads(os.pread(fd, 4096, 0))
        return f"process {int(about['pid'])} on {about['host']!s:.80}, since {about['since']!s:.30}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another job, which did not leave its name"


def _refusal(out: Path, holder: str) -> str:
    return f"run.out={str(out)!r} is in use by {holder}; wait until it has ended, stop it, or give another run.out"
