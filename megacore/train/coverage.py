"""Whether metadata.json says where every element of every tensor lies: exactly one chunk each, inside the tensor,
inside a file of the checkpoint. A digest proves that nobody changed the text, not that whoever wrote it was right; a
tensor with a gap would be left as the memory was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch

Range = tuple[tuple[int, int], ...]  # [start, stop) along each dimension

LARGEST = 2**63  # sizes and offsets are int64 everywhere
CHUNK = {"offsets", "sizes", "file", "key", "blake2b"}
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "int16", "int8", "uint8", "uint16",
    "uint32", "uint64", "bool", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def key_of(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The key of a chunk in its file: the tensor's name where it is the whole tensor, else name@offsets."""
    return name if list(sizes) == list(shape) else f"{name}@{','.join(map(str, offsets))}"


def first_fault(body: Mapping[str, Any]) -> str:
    """The first thing that is wrong with the content of metadata.json, naming tensor and place; empty if nothing is.

    Cost: n log n for n chunks that are split along one dimension; for grids, n times the chunks that meet a plane."""
    for key, kind in {"step": int, "extra": dict, "files": dict, "tensors": dict}.items():
        if not isinstance(body.get(key), kind) or isinstance(body.get(key), bool):
            return f"{key}={_short(body.get(key))} is no {kind.__name__}" if key in body else f"{key} is missing"
    if body["step"] < 0:
        return f"step={body['step']} is negative"
    for file, size in body["files"].items():
        if "/" in file or "\\" in file or "\0" in file or not file.endswith(".safetensors"):
            return f"file {file!r} is no plain name of a safetensors file in the checkpoint's folder"
        if not _count(size):
            return f"{file} has {_short(size)} bytes, which is no size"
    owners: dict[tuple[str, str], str] = {}
    held = dict.fromkeys(body["files"], 0)
    for name, entry in body["tensors"].items():
        fault = _of_tensor(name, entry, held, owners)
        if fault:
            return f"{name}: {fault}"
    over = [f for f, total in held.items() if total > body["files"][f]]
    return f"{over[0]} is said to hold {held[over[0]]} bytes of chunks in {body['files'][over[0]]}" if over else ""


def _of_tensor(name: str, entry: Any, held: dict[str, int], owners: dict[tuple[str, str], str]) -> str:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "chunks"}:
        return f"{_short(entry)} is not a dtype, a shape and chunks"
    shape, chunks = entry["shape"], entry["chunks"]
    if entry["dtype"] not in DTYPES:
        return f"dtype={_short(entry['dtype'])} is unknown"
    if not _sizes(shape):
        return f"shape={_short(shape)} is no shape"
    if not isinstance(chunks, list):
        return f"chunks={_short(chunks)} is no list"
    item = getattr(torch, entry["dtype"]).itemsize
    for number, chunk in enumerate(chunks):
        fault = _of_chunk(name, shape, chunk, held, owners)
        if fault:
            return f"chunk {number}: {fault}"
        held[chunk["file"]] += prod(chunk["sizes"]) * item
    boxes = [tuple((o, o + n) for o, n in zip(c["offsets"], c["sizes"], strict=True)) for c in chunks]
    covered, full = sum(prod(c["sizes"]) for c in chunks), prod(shape)
    if both := overlap(boxes) if full else None:
        return f"chunks {_place(boxes[both[0]])} and {_place(boxes[both[1]])} both hold some of its elements"
    # inside the shape and without overlap: as many elements as the tensor has means all of them
    return "" if covered == full else f"its chunks hold {covered} of {full} elements; the rest is in no chunk"


def _of_chunk(name: str, shape: list[int], chunk: Any, held: dict, owners: dict[tuple[str, str], str]) -> str:
    if not isinstance(chunk, dict) or set(chunk) != CHUNK:
        return f"{_short(chunk)} is not {', '.join(sorted(CHUNK))}"
    offsets, sizes, file, key = (chunk[k] for k in ("offsets", "sizes", "file", "key"))
    if not _sizes(offsets) or not _sizes(sizes) or not len(offsets) == len(sizes) == len(shape):
        return f"offsets={_short(offsets)}, sizes={_short(sizes)} are no place in shape {tuple(shape)}"
    if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
        return f"offsets={tuple(offsets)}, sizes={tuple(sizes)} reach outside of shape {tuple(shape)}"
    if prod(shape) and not prod(sizes):
        return f"sizes={tuple(sizes)} is empty"
    if not isinstance(file, str) or file not in held:
        return f"file={_short(file)} is not among the checkpoint's files"
    if key != key_of(name, shape, offsets, sizes):
        return f"key={_short(key)} in {file} is not that of offsets {tuple(offsets)}, sizes {tuple(sizes)}"
    if not isinstance(chunk["blake2b"], str):
        return f"blake2b={_short(chunk['blake2b'])} is no digest"
    if prod(sizes) and owners.setdefault((file, key), name) != name:
        return f"{key} in {file} belongs to {owners[file, key]} as well"
    return ""


def overlap(boxes: Sequence[Range]) -> tuple[int, int] | None:
    """Two boxes (by number) that share an element, or None. A sweep along the dimension with the most starts: only
    boxes that are open at the same time are compared."""
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0]))
    if not dims:
        return 0, 1  # scalars
    along = max(dims, key=lambda d: len({box[d][0] for box in boxes}))
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][along])
    if len(dims) == 1:  # neighbours alone can touch first
        return next(((a, b) for a, b in pairwise(order) if boxes[a][0][1] > boxes[b][0][0]), None)
    live: list[int] = []
    for i in order:
        live = [j for j in live if boxes[j][along][1] > boxes[i][along][0]]
        for j in live:
            if all(a < d and c < b for (a, b), (c, d) in zip(boxes[i], boxes[j], strict=True)):
                return j, i
        live.append(i)
    return None


def _place(box: Range) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(map(_count, values)) and prod(values) < LARGEST


def _short(value: Any) -> str:
    """Of an error's line: what was found, without pages of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
