"""Changes to good inputs, each a function of a random generator: bytes, JSON trees and words. What they draw from is
what once got through somewhere: ends of number ranges, deep nesting, half a surrogate pair, markup, ESC."""

import json
import random
import struct
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

DEEP = "[" * 100_000
NUMBERS = (0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308)
TEXTS = ("", " ", "x", "\0", "\ud800", "\u202e", "[/b]", "[red]", ":smile:", "\x1b[2J", "a\nb", "../../x", "9" * 5000)
VALUES = (None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], {"": 0}, [0] * 50, {"text": {"text": "x"}})
WORDS = (*b"NaN 1e999 -Infinity null {} [] \xff\xfe \xef\xbb\xbf \0 ] =".split(b" "), b"\n", b"\r\n", b'"')
SIGNED = (("<h", 16), ("<i", 32), ("<q", 64))
FORMS = (("<Q", 0, 2**64 - 1), *((form, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for form, bits in SIGNED))


def of_bytes(draw: random.Random, good: bytes) -> bytes:
    """One to four changes: a bit, a byte, a number, a piece gone, doubled, moved or put in, an early end."""
    data = bytearray(good)
    for _ in range(draw.randint(1, 4)):
        size, kind = len(data), draw.randrange(9)
        at = draw.randrange(size + 1)
        end = min(size, at + draw.choice((1, 2, 4, 8, 40)))
        if kind == 0 and at < size:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < size:
            data[at] = draw.randrange(256)
        elif kind == 2:
            form, low, high = draw.choice(FORMS)
            value = min(max(int(draw.choice(NUMBERS)), low), high)
            data[at : at + struct.calcsize(form)] = struct.pack(form, value)
        elif kind == 3:
            del data[at:end]
        elif kind == 4:
            data[at:at] = data[at:end] * draw.randint(1, 3)
        elif kind == 5:
            data[at:at] = draw.choice(WORDS)
        elif kind == 6:
            del data[at:]
        elif kind == 7 and draw.random() < 0.2:
            data[at:at] = draw.choice((DEEP, '{"text":' * 50_000)).encode()
        elif kind == 8:
            piece = bytes(data[at:end])
            del data[at:end]
            to = draw.randrange(len(data) + 1)
            data[to:to] = piece
    return bytes(data)


def of_tree(draw: random.Random, tree: Any) -> Any:
    """One to three changes to a JSON value: another value or type in a place, a name or an element gone, doubled or
    another's."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return deepcopy(draw.choice(VALUES))
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind <= 2:
            holder[key] = _near(draw, holder[key]) if draw.random() < 0.4 else deepcopy(draw.choice(VALUES))
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            other, name = draw.choice(places)
            holder[key] = deepcopy(other[name]) if _has(other, name) else None
        elif isinstance(holder, list):
            holder.insert(key, deepcopy(holder[key]))
        else:
            holder[draw.choice(TEXTS)] = deepcopy(holder[key])
    return tree


def of_json(draw: random.Random, good: bytes) -> bytes:
    """The tree changed, or its bytes."""
    if draw.random() < 0.35:
        return of_bytes(draw, good)
    text = json.dumps(of_tree(draw, json.loads(good)), indent=draw.choice((None, 1)))
    if draw.random() < 0.1:
        text = text.replace(":", f": {draw.choice(('1e999', 'NaN', 'Infinity', '9' * 400, DEEP))} ,", 1)
    return text.encode("utf-8", "surrogatepass")


def _near(draw: random.Random, value: Any) -> Any:
    if isinstance(value, int | float):
        return draw.choice((value + 1, value - 1, -value, value * 2, str(value), float(value), [value]))
    if isinstance(value, str):
        return draw.choice((value[:-1], value + "x", value.upper(), value * 2, [value]))
    return deepcopy(draw.choice(VALUES))


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])
