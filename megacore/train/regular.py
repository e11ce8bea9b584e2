"""Files of others, opened without waiting: a FIFO blocks until somebody writes, a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file (links are followed), open for reading bytes. OSError names the path where it is none, is missing
    or may not be read; never waits. ValueError where the path itself cannot be one (a NUL in it)."""
    _refuse(os.stat(path).st_mode, path)  # before it is opened: to open a device may already act on it
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        _refuse(os.fstat(handle).st_mode, path)  # what was opened may be another file than what was looked at
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """The content of a regular file; OSError (EFBIG) where it has more than `most` bytes."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = stream.read() if most is None else stream.read(most + 1)
    if most is not None and max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"has {max(size, len(content)):,} bytes, more than {most:,}", str(path))
    return content


def exists(path: str | Path) -> bool:
    """Is there anything under this name, be it a dangling link? Path.exists says no to one, and raises where the folder
    may not be searched."""
    return os.path.lexists(path)


def _refuse(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))
