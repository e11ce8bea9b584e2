"""Where a run's words go: files and streams that a run can do without.

A full disk under a log, a pipe that nobody reads any more (`| head`) or a folder that was taken away must not end a
training whose checkpoints can still be written. Each outlet says once, on stderr, what it lost and why, keeps what it
can, and tries again with the next words. Checkpoints are no outlet: what cannot be saved ends the run.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

WAITING = 100_000  # lines kept in memory while a file takes none: some 20 MB, a day of steps of one second


def tell(text: str) -> None:
    """One line on stderr; where that is gone too there is nobody left to tell."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def strict(value: Any) -> Any:
    """`value` as RFC 8259 can say it: NaN and the infinities, which JSON does not have, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def dumps(value: Any, **options: Any) -> str:
    """JSON that every parser reads."""
    return json.dumps(strict(value), allow_nan=False, **options)


@contextmanager
def best_effort(what: str, say: Callable[[str], None] = tell) -> Iterator[None]:
    """An error of the system within the block is told, and goes no further."""
    try:
        yield
    except OSError as error:
        say(f"warning: {what} was not written ({reason(error)}); training goes on")


def reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def write_whole(path: Path, content: str | bytes) -> None:
    """A file that is there whole or not at all: written beside, renamed. OSError leaves the old one as it was."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


class LineFile:
    """Appends lines to a file. Lines that it does not take (a full disk) wait, and are written, whole and in order,
    when it takes them again. `start` is called before the first line: it makes the file, and may drop old lines."""

    def __init__(self, path: Path, start: Callable[[Path], None]):
        self.path, self._start = path, start
        self._file: io.FileIO | None = None
        self._waiting: deque[bytes] = deque(maxlen=WAITING)
        self._told = False
        self._flush()

    def write(self, line: str) -> None:
        self._waiting.append(f"{line}\n".encode())
        self._flush()

    def _flush(self) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._start(self.path)
                self._file = self.path.open("ab", buffering=0)  # a line is there before the next step, whoever dies
            while self._waiting:
                _append(self._file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._told:
                tell(f"warning: {self.path} takes no lines ({reason(error)}); they wait in memory, training goes on")
            self._told = True
        else:
            if self._told:
                tell(f"{self.path} takes lines again; none was lost")
            self._told = False

    def close(self) -> None:
        if self._waiting:
            self._flush()
        if self._waiting:
            tell(f"warning: the last {len(self._waiting)} lines of {self.path} are lost")
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _append(file: io.FileIO, line: bytes) -> None:
    """The whole line or nothing of it: the part that a full disk took is cut off again."""
    at, written = os.fstat(file.fileno()).st_size, 0
    try:
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), at)
        raise


class Screen(io.TextIOBase):
    """A text stream that never fails: what `stream` does not take is dropped."""

    def __init__(self, stream: TextIO):
        self._stream, self._told = stream, False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (OSError, ValueError) as error:  # ValueError: a file that was closed
            if not self._told:
                tell(f"warning: the screen takes no text ({reason(error)}); training goes on")
                self._told = True
            self._drop()

    def _drop(self) -> None:
        """What the stream still holds would fail again at exit and turn a good run's exit code into 120: send it, and
        all that follows, to nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding
