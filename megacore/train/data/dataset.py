"""Samples for training. S = seq_length: a sample is S + 1 tokens, inputs the first S and targets the last S.

    stream     all documents end to end, T tokens (each document ends with the end-of-document id)
    sample i   stream[i*S : i*S + S + 1],   i = 0 .. n-1,   n = (T - 1) // S
Neighbours share one token, the last target of one being the first input of the next, so every token but the first is
a target exactly once an epoch (the last (T-1) % S are left over). Shuffling is the business of `Order`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from megacore.parallel.batch import IGNORE
from megacore.train.plain import plain

from .indexed import IndexedDataset

__all__ = ["IGNORE", "Dataset", "GPTDataset", "check_vocabulary"]


class Dataset(Protocol):
    """What the loop needs of data. Any class with these four will do; targets of IGNORE do not count in the loss."""

    seq_length: int

    def __len__(self) -> int: ...

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of one sample, int64 [S] each."""
        ...

    def valid(self, index: int) -> int:
        """Number of targets of one sample that count; must equal (pair(index)[1] != IGNORE).sum()."""
        ...


class GPTDataset:
    """Next-token samples cut from the contiguous token stream of an indexed dataset; no memory but the file's map.

    Each sample is looked at when it is read: a token id that is negative, or not below `vocab_size` (0: none is known),
    is a ValueError that names the place. A sidecar may be wrong about the ids, and a file may be damaged later."""

    def __init__(self, data: IndexedDataset | str | Path, seq_length: int, vocab_size: int = 0) -> None:
        self.data = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self.seq_length, self.vocab_size = seq_length, vocab_size
        if seq_length < 1:
            raise ValueError(f"seq_length={seq_length}: a sample needs at least one target; give seq_length >= 1")
        if not self.data.end_to_end:
            raise ValueError(
                f"{self.data.prefix}: sequences do not lie end to end in {self.data.bin.name}, so they are no stream; "
                "write it again with megacore.train.data.merge"
            )
        if self.data.num_tokens <= seq_length:
            raise ValueError(
                f"{self.data.prefix} has {self.data.num_tokens} tokens, fewer than one sample of seq_length + 1 = "
                f"{seq_length + 1}; give more text or a shorter seq_length"
            )

    def __len__(self) -> int:
        return (self.data.num_tokens - 1) // self.seq_length

    def sample(self, index: int) -> np.ndarray:
        """Tokens of sample `index`: int64 [S+1]."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample {index} of {self.data.prefix}, which has {len(self)} of seq_length={self.seq_length}"
            )
        start = int(index) * self.seq_length  # a Python int: never wraps
        tokens = self.data.tokens[start : start + self.seq_length + 1].astype(np.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (self.vocab_size and high >= self.vocab_size):
            wrong = low if low < 0 else high
            at = start + int((tokens == wrong).argmax())
            raise ValueError(
                f"{plain(self.data.bin)}: token {at} has id {wrong}, and the vocabulary has ids from 0 "
                f"{f'to {self.vocab_size - 1}' if self.vocab_size else 'on'}; prepare the data again"
            )
        return tokens

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), int64 [S] each: views of one sample."""
        tokens = self.sample(index)
        return tokens[:-1], tokens[1:]

    def valid(self, index: int) -> int:
        """All S targets count: text is packed."""
        return self.seq_length


def check_vocabulary(data: GPTDataset | IndexedDataset, vocab_size: int) -> None:
    """ValueError where the largest token id is outside the vocabulary: called at start, before any collective."""
    data = data.data if isinstance(data, GPTDataset) else data
    largest = data.largest_token_id
    if largest >= vocab_size:
        enough = max(largest + 1, int(data.meta.get("vocab_size") or 0))
        raise ValueError(
            f"vocab_size={vocab_size}: {data.prefix} holds token id {largest}, no id of the model's vocabulary; "
            f"set vocab_size >= {enough} or prepare the data with a smaller vocabulary"
        )
