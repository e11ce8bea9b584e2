"""Megatron's indexed dataset: PREFIX.bin holds the tokens end to end, PREFIX.idx says where each sequence begins.

The .idx file, little-endian, N sequences in D documents:
    9 bytes  MMIDIDX\\0\\0      uint64 version = 1      uint8 dtype code      uint64 N      uint64 D + 1
    int32 lengths[N] (tokens)  int64 pointers[N] (bytes into .bin)  int64 documents[D + 1] (sequence indices, 0 first)
Beside them PREFIX.json, our sidecar, keeps what a training run must know before it starts (largest token id,
vocabulary, tokenizer); files of Megatron have none and are read all the same. All arithmetic on offsets is int64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megacore.train.jsonfile import field, read
from megacore.train.plain import plain
from megacore.train.regular import exists, open_regular

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
LIMITS = {"largest_token_id": -1, "vocab_size": 1, "eod_id": 0}  # of a sidecar: least value; none passes int32
TEXTS = ("tokenizer", "tokenizer_hash", "source_hash", "split")
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
            if not exists(path):
                raise FileNotFoundError(
                    f"data file {plain(path)} is missing; an indexed dataset is the pair {plain(self.prefix)}.bin "
                    f"and .idx: make it with `megacore prepare TEXT --out {plain(self.prefix.parent)}`, or correct the "
                    "prefix"
                )
            open_regular(path).close()  # a FIFO or a device would hold up whoever reads it
        self.dtype, counts = _read_header(self.idx)
        self.lengths, self.pointers, self.documents = _read_index(self.idx, *counts)
        size = self.bin.stat().st_size
        self.tokens = np.empty(0, self.dtype)  # an empty file cannot be mapped
        if size:
            self.tokens = np.memmap(self.bin, self.dtype, "r", shape=(size // self.dtype.itemsize,)).view(np.ndarray)
        self.num_tokens, self.end_to_end = self._check(size)

    def _check(self, size: int) -> tuple[int, bool]:
        """(number of tokens, do the sequences fill .bin end to end), refusing pointers outside the file."""
        expected, end_to_end, item, before = 0, True, self.dtype.itemsize, 0
        for start in range(0, len(self.lengths), CHUNK):
            size_of = self.lengths[start : start + CHUNK].astype(np.int64) * item
            pointer = self.pointers[start : start + CHUNK]
            # No sum with a pointer in it: one near 2^63 would wrap and look small
            wrong = (size_of < 0) | (pointer < 0) | (pointer % item != 0) | (pointer > size - size_of)
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                raise ValueError(
                    f"{plain(self.bin)}: sequence {start + i} is at byte {int(pointer[i])} with "
                    f"{int(size_of[i]) // item} tokens of {item} bytes, outside the {size} bytes of the file: "
                    f"truncated, or written with another {plain(self.idx.name)}; prepare or copy both again"
                )
            back = np.diff(pointer, prepend=before) < 0
            if back.any():
                i = int(np.flatnonzero(back)[0])
                raise ValueError(
                    f"{plain(self.idx)}: sequence {start + i} begins at byte {int(pointer[i])}, before the one ahead "
                    "of it (an overflow of the tool that wrote it?); prepare the data again"
                )
            ends = np.cumsum(size_of) + min(expected, size)  # past the file they are end to end with nothing
            end_to_end &= expected <= size and bool((pointer == ends - size_of).all())
            expected, before = expected + int(size_of.sum()), int(pointer[-1])
        self._check_documents()
        return expected // item, end_to_end and expected == size

    def _check_documents(self) -> None:
        """Every sequence belongs to one document: the table rises from 0 to N."""
        table, count = self.documents, len(self.lengths)
        if len(table) and table[0] == 0 and table[-1] == count and (table[1:] >= table[:-1]).all():
            return
        ends = f"from {int(table[0])} to {int(table[-1])}" if len(table) else "nowhere, it is empty"
        raise ValueError(
            f"{plain(self.idx)}: document indices must rise from 0 to the {count} sequences, and go {ends} (a document "
            "that was never ended, or an overflow of the tool that wrote it?); prepare the data again"
        )

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
        if not exists(path):
            return {}
        try:
            meta = read(path)
            stated = tuple(field(meta, name, int, path, least=0) for name in ("tokens", "documents"))
            for name, least in LIMITS.items():
                if meta.get(name) is not None:
                    field(meta, name, int, path, least=least, most=2**31 - 1)
            for name in TEXTS:
                if name in meta:
                    field(meta, name, str, path)
        except (ValueError, OSError) as error:
            why = f"{plain(path)}: {error.strerror}" if isinstance(error, OSError) else error
            raise ValueError(f"{why}: not a sidecar of megacore; delete it or prepare again") from None
        if stated != (self.num_tokens, self.num_documents):
            raise ValueError(
                f"{plain(path)} describes {stated[0]} tokens in {stated[1]} documents but {plain(self.idx.name)} has "
                f"{self.num_tokens} in {self.num_documents}: it belongs to other files; delete it or prepare again"
            )
        return meta

    @cached_property
    def largest_token_id(self) -> int:
        """From the sidecar; else by one scan of the whole .bin, at the disk's speed, which finds negative ids as well
        (ValueError). -1 where there are no tokens."""
        recorded = self.meta.get("largest_token_id")
        if recorded is not None:
            return recorded
        largest = -1
        for start in range(0, len(self.tokens), CHUNK):
            chunk = self.tokens[start : start + CHUNK]
            largest = max(largest, int(chunk.max()))
            if (lowest := int(chunk.min())) < 0:
                raise ValueError(f"{plain(self.bin)} holds token id {lowest}; ids count from 0: prepare the data again")
        return largest

    def chunks(self) -> Iterator[np.ndarray]:
        """The sequences in order, as views: for writers that copy."""
        return (self[i] for i in range(len(self)))


def _read_header(idx: Path) -> tuple[np.dtype, tuple[int, int]]:
    with open_regular(idx) as stream:
        raw = stream.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{plain(idx)} begins with {raw[:9]!r}, not with {MAGIC!r} of a Megatron index; give the prefix of files "
            "made by `megacore prepare` or Megatron's preprocess_data.py"
        )
    if len(raw) < HEADER.size:
        raise ValueError(
            f"{plain(idx)} is truncated: {len(raw)} bytes, the header alone has {HEADER.size}; prepare or copy it again"
        )
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise ValueError(f"{plain(idx)}: index version {version}, this reader knows {VERSION}; prepare the data again")
    if code not in DTYPES:
        kind = "floats, which are no tokens" if code in FLOAT_CODES else "no dtype of the format"
        raise ValueError(
            f"{plain(idx)}: dtype code {code} stands for {kind}; one of {sorted(DTYPES)} is expected: "
            "prepare the data again"
        )
    return DTYPES[code], (sequences, documents)


def _read_index(idx: Path, sequences: int, documents: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    needed, size = HEADER.size + 12 * sequences + 8 * documents, idx.stat().st_size
    if size < needed:
        raise ValueError(
            f"{plain(idx)} is truncated: {size} bytes, {sequences} sequences and {documents} document indices need "
            f"{needed}; prepare or copy it again"
        )
    if size > needed:  # counts that are too small would read lengths as pointers
        raise ValueError(
            f"{plain(idx)} has {size} bytes, {sequences} sequences and {documents} document indices only {needed}; "
            "prepare or copy it again"
        )
    raw = np.memmap(idx, np.uint8, "r").view(np.ndarray)
    at, parts = HEADER.size, []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", documents)):
        end = at + count * np.dtype(dtype).itemsize
        parts.append(raw[at:end].view(dtype))
        at = end
    return parts[0], parts[1], parts[2]
