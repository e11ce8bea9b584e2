"""Documents from files: raw text (a file is a document), JSON lines (a line is a document), directory trees.

Files of a directory come in the order of their relative names, never in the file system's. Whatever cannot be read as
text is counted in `Skips` with a reason and examples; nothing is left out in silence.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megacore.train.plain import plain
from megacore.train.regular import exists, open_regular, read_bytes

JSON_LINES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl")
EXCLUDE = ("__pycache__", "node_modules", "site-packages", "dist-packages")  # names of directories not entered
EXAMPLES = 3
KEYS = 8  # of a JSON line, named where it has no text
LONGEST_LINE = 256 << 20  # bytes of a JSON line: a longer one is no document but a file without line ends


class Skips:
    """What was left out and why: `counts[reason]`, with the first few names in `examples[reason]`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, name: object) -> None:
        self.counts[reason] += 1
        named = self.examples.setdefault(reason, [])
        if len(named) < EXAMPLES:
            named.append(plain(name))

    def __str__(self) -> str:
        return "; ".join(f"{n} {reason} ({', '.join(self.examples[reason])})" for reason, n in self.counts.items())


def find_files(inputs: Sequence[Path], suffixes: Iterable[str], exclude: Iterable[str], skips: Skips) -> list[Path]:
    """Files behind the inputs: a file as it is, a directory's files of these suffixes; each once, in a fixed order."""
    wanted = {s if s.startswith(".") else f".{s}" for s in (s.lower() for s in suffixes)}
    shut = set(exclude)
    found: dict[str, Path] = {}
    for given in map(Path, inputs):
        if _is_dir(given):
            files = [
                f for f in _walk(given, shut, skips) if f.suffix.lower() in wanted or skips.add("of another suffix", f)
            ]
        elif exists(given):  # a dangling link too: it is skipped with its reason, like any file that cannot be read
            files = [given]
        else:
            raise FileNotFoundError(f"input {plain(given)} does not exist; give text files, .jsonl files or folders")
        for file in files:
            if found.setdefault(os.path.realpath(file), file) is not file:
                skips.add("given twice", file)
    return list(found.values())


def _walk(root: Path, shut: set[str], skips: Skips) -> list[Path]:
    files = []
    _listed(root, skips)
    for directory, names, leaves in os.walk(root):
        here = Path(directory)
        for name in list(names):
            if name in shut or name.startswith("."):
                skips.add("excluded directories", here / name)
            elif os.path.islink(here / name):
                skips.add("links to directories", here / name)
            elif _listed(here / name, skips):
                continue
            names.remove(name)
        files += [here / leaf for leaf in leaves]
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def _listed(directory: Path, skips: Skips) -> bool:
    """May it be listed? os.walk passes over one that may not, without a word."""
    try:
        os.scandir(directory).close()
    except OSError as error:
        skips.add(f"folders that cannot be listed: {error.strerror}", directory)
        return False
    return True


def _is_dir(path: Path) -> bool:
    """False where the folder above may not be searched; Path.is_dir raises there."""
    return os.path.isdir(path)


def documents(file: Path, jsonl_key: str, skips: Skips) -> Iterator[str]:
    """The texts of one file, newlines as they are."""
    if file.suffix.lower() in JSON_LINES:
        yield from _json_lines(file, jsonl_key, skips)
        return
    try:
        text = read_bytes(file).decode("utf-8-sig")
    except OSError as error:
        skips.add(f"unreadable: {error.strerror}", file)
    except MemoryError:
        skips.add("larger than the memory", file)
    except UnicodeDecodeError:
        skips.add("not UTF-8 text", file)
    else:
        if "\0" in text:
            skips.add("binary", file)
        elif not text.strip():
            skips.add("empty", file)
        else:
            yield text


def _json_lines(file: Path, key: str, skips: Skips) -> Iterator[str]:
    try:
        with open_regular(file) as stream:
            number = 0
            while line := stream.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    skips.add(f"lines of more than {LONGEST_LINE:,} bytes", f"{file}:{number}")
                    while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                        pass
                elif line.strip():
                    yield from _json_line(line, f"{file}:{number}", key, skips)
    except OSError as error:
        skips.add(f"unreadable: {error.strerror}", file)


def _json_line(line: bytes, name: str, key: str, skips: Skips) -> Iterator[str]:
    try:
        # Numbers are not what is read: none is made, so that none can be too long. Not json's own guess of the encoding
        record = json.loads(line.decode("utf-8-sig"), parse_int=_number, parse_float=_number)
    except UnicodeDecodeError:
        skips.add("lines that are not UTF-8 text", name)
        return
    except RecursionError:
        skips.add("lines that are nested too deeply", name)
        return
    except ValueError:
        skips.add("lines that are not JSON", name)
        return
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ""
        if isinstance(record, dict):
            shown = [k if len(k) <= 40 else k[:37] + "..." for k in list(record)[:KEYS]]
            keys = f" has {', '.join(shown)}{', ...' * (len(record) > KEYS)}" if record else " is empty"
        skips.add(f"lines without a text under key {key!r}", name + keys)
    elif not text.strip():
        skips.add("empty", name)
    elif not _encodable(text):
        skips.add("lines with half a surrogate pair", name)
    else:
        yield text


def _number(_: str) -> int:
    return 0


def _encodable(text: str) -> bool:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        return text.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False
