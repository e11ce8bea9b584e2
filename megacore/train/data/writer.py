"""Writing indexed datasets: streamed, merged, and committed by rename, so that no half file ever has the final name."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .indexed import HEADER, MAGIC, VERSION, IndexedDataset, dtype_code, part

LONGEST = 2**31 - 1  # lengths are int32 in the format: a longer document becomes several sequences of one document
PARTIAL = ".partial"
COPY = 1 << 24


def write_index(idx: str | Path, dtype: np.dtype, lengths: Sequence[int], documents: Sequence[int]) -> None:
    """Write a .idx for sequences that lie end to end. lengths [N] in tokens, documents [D+1] in sequences, 0 first."""
    count = np.asarray(lengths, dtype=np.int64)
    # int64 before the product: numpy would keep int32 and wrap at 2 GiB (EleutherAI/gpt-neox#493, Megatron-LM#1672)
    pointers = np.cumsum(count * np.dtype(dtype).itemsize)
    pointers = np.concatenate([np.zeros(1, np.int64), pointers])[: len(count)]
    with open(idx, "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, dtype_code(dtype), len(count), len(documents)))
        stream.write(count.astype("<i4").tobytes())
        stream.write(pointers.astype("<i8").tobytes())
        stream.write(np.asarray(documents, dtype="<i8").tobytes())
        _to_disk(stream)


class IndexedWriter:
    """Streams documents into PREFIX.bin.partial; `commit` gives .bin, .json and .idx their names, the index last.

    As a context manager it removes its partial files unless `commit` was reached. Memory: 12 bytes a document.
    A killed writer leaves *.partial, which the next writer of the same prefix overwrites.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = part(prefix, ""), np.dtype(dtype)
        dtype_code(self.dtype)
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin: BinaryIO = part(prefix, ".bin" + PARTIAL).open("wb")
        self._lengths, self._documents = array("i"), array("q", [0])
        self.num_tokens, self.largest = 0, -1

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_document(self, tokens: np.ndarray) -> None:
        """Append one document, any integer dtype; ValueError where an id does not fit the file's dtype."""
        tokens = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > limits.max:
                raise ValueError(
                    f"{self.prefix}: token id {low if low < 0 else high} does not fit {self.dtype}, "
                    f"which holds 0 to {limits.max}; write with token_dtype(vocab_size)"
                )
            self.largest = max(self.largest, high)
        self._bin.write(tokens.astype(self.dtype, copy=False).tobytes())
        for start in range(0, max(len(tokens), 1), LONGEST):
            self._lengths.append(min(LONGEST, len(tokens) - start))
        self._documents.append(len(self._lengths))
        self.num_tokens += len(tokens)

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all of another dataset: its bytes are copied (holes stay holes), its index is shifted in int64."""
        if other.dtype != self.dtype:
            raise ValueError(
                f"{other.prefix} holds {other.dtype}, {self.prefix} holds {self.dtype}: a merge needs one dtype; "
                "prepare them with the same vocabulary"
            )
        if other.end_to_end:
            with other.bin.open("rb") as source:
                _copy(source, self._bin)
        else:
            for sequence in other.chunks():
                self._bin.write(sequence.tobytes())
        shift = len(self._lengths)
        self._lengths.frombytes(other.lengths.astype(np.int32).tobytes())
        self._documents.frombytes((other.documents[1:].astype(np.int64) + shift).tobytes())
        self.num_tokens += other.num_tokens

    def commit(self, meta: dict[str, Any] | None = None) -> None:
        """Finish: sync the three files, drop an old index of this name, rename data, sidecar, then index.

        A reader therefore sees the old dataset, a missing index, or the new dataset; never new data under an old index.
        """
        _to_disk(self._bin)
        self._bin.close()
        with part(self.prefix, ".json" + PARTIAL).open("w", encoding="utf-8") as stream:
            json.dump({**(meta or {}), "tokens": self.num_tokens, "documents": self.num_documents}, stream, indent=1)
            stream.write("\n")
            _to_disk(stream)
        write_index(part(self.prefix, ".idx" + PARTIAL), self.dtype, self._lengths, self._documents)
        part(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx"):
            os.replace(part(self.prefix, suffix + PARTIAL), part(self.prefix, suffix))
        _sync_directory(self.prefix.parent)

    def abandon(self) -> None:
        """Remove the partial files (nothing happens after a commit)."""
        self._bin.close()
        for suffix in (".bin", ".json", ".idx"):
            part(self.prefix, suffix + PARTIAL).unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


def merge(prefixes: Sequence[str | Path], out: str | Path) -> IndexedDataset:
    """Concatenate datasets of one dtype under a new prefix, in the order given; the sidecar keeps what all agree on."""
    if not prefixes:
        raise ValueError("prefixes=[]: nothing to merge; give at least one prefix")
    sources = [IndexedDataset(p) for p in prefixes]
    if part(out, "").resolve() in [s.prefix.resolve() for s in sources]:
        raise ValueError(f"out={out} is one of the datasets to merge; choose another prefix")
    metas = [s.meta for s in sources]
    known = {key: metas[0][key] for key in metas[0] if all(m.get(key) == metas[0][key] for m in metas)}
    largest = [m.get("largest_token_id") for m in metas]
    known.pop("largest_token_id", None)
    if None not in largest:
        known["largest_token_id"] = max(largest)
    with IndexedWriter(out, sources[0].dtype) as writer:
        for source in sources:
            writer.add_dataset(source)
        writer.commit({**known, "merged_from": [str(s.prefix) for s in sources]})
    return IndexedDataset(out)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """Append all of source. Holes of sparse files are skipped over, not written as zeros."""
    target.flush()
    base, size = target.tell(), os.fstat(source.fileno()).st_size
    at = 0
    while at < size:
        try:
            start = os.lseek(source.fileno(), at, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            break
        end = os.lseek(source.fileno(), start, os.SEEK_HOLE)
        source.seek(start)
        target.seek(base + start)
        for chunk in range(start, end, COPY):
            target.write(source.read(min(COPY, end - chunk)))
        at = end
    target.flush()
    target.truncate(base + size)
    target.seek(base + size)


def _to_disk(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
