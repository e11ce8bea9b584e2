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

JSON_LINES = (".jsonl", ".json", ".ndjson")
SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl")
EXCLUDE = ("__pycache__", "node_modules", "site-packages", "dist-packages")  # names of directories not entered
EXAMPLES = 3


class Skips:
    """What was left out and why: `counts[reason]`, with the first few names in `examples[reason]`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, name: object) -> None:
        self.counts[reason] += 1
        named = self.examples.setdefault(reason, [])
        if len(named) < EXAMPLES:
            named.append(str(name))

    def __str__(self) -> str:
        return "; ".join(f"{n} {reason} ({', '.join(self.examples[reason])})" for reason, n in self.counts.items())


def find_files(inputs: Sequence[Path], suffixes: Iterable[str], exclude: Iterable[str], skips: Skips) -> list[Path]:
    """Files behind the inputs: a file as it is, a directory's files of these suffixes; each once, in a fixed order."""
    wanted = {s if s.startswith(".") else f".{s}" for s in (s.lower() for s in suffixes)}
    shut = set(exclude)
    found: dict[str, Path] = {}
    for given in map(Path, inputs):
        if given.is_dir():
            files = [
                f for f in _walk(given, shut, skips) if f.suffix.lower() in wanted or skips.add("of another suffix", f)
            ]
        elif given.exists():
            files = [given]
        else:
            raise FileNotFoundError(f"input {given} does not exist; give text files, .jsonl files or directories")
        for file in files:
            if found.setdefault(os.path.realpath(file), file) is not file:
                skips.add("given twice", file)
    return list(found.values())


def _walk(root: Path, shut: set[str], skips: Skips) -> list[Path]:
    files = []
    for directory, names, leaves in os.walk(root):
        here = Path(directory)
        for name in list(names):
            if name in shut or name.startswith("."):
                skips.add("excluded directories", here / name)
            elif (here / name).is_symlink():
                skips.add("links to directories", here / name)
            else:
                continue
            names.remove(name)
        files += [here / leaf for leaf in leaves]
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def documents(file: Path, jsonl_key: str, skips: Skips) -> Iterator[str]:
    """The texts of one file, newlines as they are."""
    if file.suffix.lower() in JSON_LINES:
        yield from _json_lines(file, jsonl_key, skips)
        return
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        skips.add(f"unreadable: {error.strerror}", file)
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
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield from _json_line(line, f"{file}:{number}", key, skips)
    except OSError as error:
        skips.add(f"unreadable: {error.strerror}", file)


def _json_line(line: bytes, name: str, key: str, skips: Skips) -> Iterator[str]:
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        skips.add("lines that are not JSON", name)
        return
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = f" has {', '.join(record)}" if isinstance(record, dict) else ""
        skips.add(f"lines without a text under key {key!r}", name + keys)
    elif not text.strip():
        skips.add("empty", name)
    elif not _encodable(text):
        skips.add("lines with half a surrogate pair", name)
    else:
        yield text


def _encodable(text: str) -> bool:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        return text.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False
