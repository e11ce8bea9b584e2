"""JSON of others, read so that whatever is wrong with it is one line: RFC 8259, nothing that recursion, infinities or
numbers past 64 bits could hide in.

    body = read("train.json", "sidecar")                            an object
    size = field(body, "vocab_size", int, "train.json", least=1, most=2**31 - 1)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from megacore.train.plain import plain
from megacore.train.regular import read_bytes

LARGEST = 1 << 30  # bytes of one file: a checkpoint's manifest of 10^6 chunks has 300 MB
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "an object",
    list: "a list",
}


def parse(text: str | bytes, what: str) -> Any:
    """The value of a JSON text. ValueError, one line that begins with `what`: not UTF-8, not JSON, nested too deeply,
    NaN or an infinity (1e999 too), a whole number past 64 bits."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")  # not json's own guess, by which two bytes make a file UTF-16
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError(f"{what} is no JSON that can be read: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are of the kind
        raise ValueError(f"{what} is no JSON that can be read: {plain(error)}") from None


def read(path: str | Path, what: str = "") -> dict[str, Any]:
    """The object that a JSON file holds. OSError where the file cannot be read (a FIFO or device is not), ValueError
    where it holds no such thing; both name the file."""
    named = f"{what} {plain(path)}".strip()
    body = parse(read_bytes(path, LARGEST), named)
    if not isinstance(body, dict):
        raise ValueError(f"{named} holds {_kind(body)}, not an object of names and values")
    return body


def field(
    body: Mapping[str, Any],
    name: str,
    kind: type,
    source: str | Path,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """body[name] of the kind int, float, str, bool, list or dict, within [least, most]; ValueError names file, field,
    value and rule. A whole number does for a float; true is no number."""
    if name not in body:
        raise ValueError(f"{plain(source)} has no {name}")
    value = body[name]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{plain(source)}: {name}={_short(value)} is no {WORDS[kind].removeprefix('a ')}")
    if least is not None and value < least:
        raise ValueError(f"{plain(source)}: {name}={_short(value)} is below {least}")
    if most is not None and value > most:
        raise ValueError(f"{plain(source)}: {name}={_short(value)} is above {most}")
    return value


def _short(value: Any) -> str:
    text = plain(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    return "null" if value is None else WORDS.get(type(value), type(value).__name__)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is past the largest number of 64 bits")
    return value


def _whole(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError(f"{text[:40]} is past 64 bits")
    return value
