"""Megatron's indexed dataset: PREFIX.bin holds the tokens end to end, PREFIX.idx says where each sequence begins.

The .idx file, little-endian, N sequences in D documents:
    9 bytes  MMIDIDX\\0\\0      uint64 version = 1      uint8 dtype code      uint64 N      uint64 D + 1
    int32 lengths[N] (tokens)  int64 pointers[N] (bytes into .bin)  int64 documents[D + 1] (sequence indices, 0 first)
Beside them PREFIX.json, our sidecar, keeps what a training run must know before it starts (largest token id,
vocabulary, tokenizer); files of Megatron have none and are read all the same. All arithmetic on offsets is int64.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_CODES = (6, 7)  # float64 and float32 exist in the format, but no token is a float
CHUNK = 1 << 22  # elements looked at in one go by whole-file scans: tens of MB, whatever the size of the file


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for vocabularies below 65 500, else int32: Megatron's rule, so that its files and ours can be merged."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def dtype_code(dtype: np.dtype) -> int:
    """The format's code of a dtype; ValueError for a dtype the format (or a token) cannot have."""
    for code, known in DTYPES.items():
        if known == np.dtype(dtype):
            return code
    raise ValueError(f"dtype={np.dtype(dtype)} cannot hold tokens in an indexed dataset; use uint16 or int32")


def part(prefix: str | Path, suffix: str) -> Path:
    """PREFIX + suffix. A prefix given with its .bin or .idx is taken without; Path.with_suffix would eat other dots."""
    text = str(prefix)
    return Path((text[:-4] if text.endswith((".bin", ".idx")) else text) + suffix)


class IndexedDataset:
    """Sequences of tokens behind a prefix, read through memory maps (nothing is loaded until it is looked at).

    `lengths` [N] int32, `pointers` [N] int64 (bytes), `documents` [D+1] int64, `tokens` [T] (the whole .bin).
    Opening costs one pass over the index (12 bytes a sequence), which finds truncated and overflowed files at start.
    FileNotFoundError for a missing file, ValueError for a truncated or foreign one; both name the file and the remedy.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = part(prefix, "")
        self.idx, self.bin = part(prefix, ".idx"), part(prefix, ".bin")
        for path in (self.idx, self.bin):
            if not path.is_file():
                raise FileNotFoundError(
                    f"data file {path} is missing; an indexed dataset is the pair {self.prefix}.bin and .idx: "
                    f"make it with `megacore prepare TEXT --out {self.prefix.parent}`, or correct the prefix"
                )
        self.dtype, counts = _read_header(self.idx)
        self.lengths, self.pointers, self.documents = _read_index(self.idx, *counts)
        size = self.bin.stat().st_size
        self.tokens = np.empty(0, self.dtype)  # an empty file cannot be mapped
        if size:
            self.tokens = np.memmap(self.bin, self.dtype, "r", shape=(size // self.dtype.itemsize,)).view(np.ndarray)
        self.num_tokens, self.end_to_end = self._check(size)

    def _check(self, size: int) -> tuple[int, bool]:
        """(number of tokens, do the sequences fill .bin end to end), refusing pointers outside the file."""
        expected, end_to_end, item = 0, True, self.dtype.itemsize
        for start in range(0, len(self.lengths), CHUNK):
            length = self.lengths[start : start + CHUNK].astype(np.int64)
            pointer = self.pointers[start : start + CHUNK]
            ends = np.cumsum(length * item) + expected
            wrong = (length < 0) | (pointer < 0) | (pointer % item != 0) | (pointer + length * item > size)
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                raise ValueError(
                    f"{self.bin}: sequence {start + i} is at byte {int(pointer[i])} with {int(length[i])} tokens of "
                    f"{item} bytes, outside the {size} bytes of the file: truncated, or written with another "
                    f"{self.idx.name}; prepare or copy both again"
                )
            end_to_end &= bool((pointer == ends - length * item).all())
            expected = int(ends[-1])
        ordered = len(self.documents) == 0 or (
            self.documents[0] == 0 and self.documents[-1] <= len(self.lengths) and (np.diff(self.documents) >= 0).all()
        )
        if not ordered:
            raise ValueError(
                f"{self.idx}: document indices do not rise from 0 to the {len(self.lengths)} sequences (an overflow of "
                "the tool that wrote it?); prepare the data again"
            )
        return expected // item, end_to_end and expected == size

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return max(len(self.documents) - 1, 0)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one sequence: a read-only view of the file."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document: a copy where it has several sequences."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.prefix}, which has {self.num_documents}")
        parts = [self[i] for i in range(int(self.documents[index]), int(self.documents[index + 1]))]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, self.dtype)])

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The sidecar PREFIX.json, {} where there is none; ValueError where it describes other files."""
        path = part(self.prefix, ".json")
        if not path.is_file():
            return {}
        try:
            meta = json.loads(path.read_text("utf-8"))
            stated = meta["tokens"], meta["documents"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a sidecar of megacore ({error!r}); delete it or prepare again") from None
        if stated != (self.num_tokens, self.num_documents):
            raise ValueError(
                f"{path} describes {stated[0]} tokens in {stated[1]} documents but {self.idx.name} has "
                f"{self.num_tokens} in {self.num_documents}: it belongs to other files; delete it or prepare again"
            )
        return meta

    @cached_property
    def largest_token_id(self) -> int:
        """From the sidecar; else by one scan of the whole .bin, at the disk's speed. -1 where there are no tokens."""
        recorded = self.meta.get("largest_token_id")
        if recorded is not None:
            return int(recorded)
        chunks = (self.tokens[start : start + CHUNK] for start in range(0, len(self.tokens), CHUNK))
        return max((int(chunk.max()) for chunk in chunks), default=-1)

    def chunks(self) -> Iterator[np.ndarray]:
        """The sequences in order, as views: for writers that copy."""
        return (self[i] for i in range(len(self)))


def _read_header(idx: Path) -> tuple[np.dtype, tuple[int, int]]:
    with idx.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{idx} begins with {raw[:9]!r}, not with {MAGIC!r} of a Megatron index; give the prefix of files made by "
            "`megacore prepare` or Megatron's preprocess_data.py"
        )
    if len(raw) < HEADER.size:
        raise ValueError(
            f"{idx} is truncated: {len(raw)} bytes, the header alone has {HEADER.size}; prepare or copy it again"
        )
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise ValueError(f"{idx}: index version {version}, this reader knows version {VERSION}; prepare the data again")
    if code not in DTYPES:
        kind = "floats, which are no tokens" if code in FLOAT_CODES else "no dtype of the format"
        raise ValueError(
            f"{idx}: dtype code {code} stands for {kind}; expected one of {sorted(DTYPES)}: prepare the data again"
        )
    return DTYPES[code], (sequences, documents)


def _read_index(idx: Path, sequences: int, documents: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    needed, size = HEADER.size + 12 * sequences + 8 * documents, idx.stat().st_size
    if size < needed:
        raise ValueError(
            f"{idx} is truncated: {size} bytes, {sequences} sequences and {documents} document indices need {needed}; "
            "prepare or copy it again"
        )
    raw = np.memmap(idx, np.uint8, "r").view(np.ndarray)
    at, parts = HEADER.size, []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", documents)):
        end = at + count * np.dtype(dtype).itemsize
        parts.append(raw[at:end].view(dtype))
        at = end
    return parts[0], parts[1], parts[2]
