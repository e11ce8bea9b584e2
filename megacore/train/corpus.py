"""The data of a run: what `megacore prepare` wrote, opened and checked on every rank before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megacore.parallel.batch import MicroBatch
from megacore.train.config import Settings
from megacore.train.data.batches import micro_batches, valid_tokens
from megacore.train.data.dataset import Dataset, GPTDataset, check_vocabulary
from megacore.train.data.order import Order
from megacore.train.jsonfile import field, read
from megacore.train.plain import plain
from megacore.train.regular import exists


@dataclass(frozen=True)
class Corpus:
    """Training samples in the order of the seed. Validation samples in a shuffled order of their own, from its first at
    every evaluation: the same ones each time, in every run, and spread over all files held out."""

    train: Dataset
    valid: Dataset | None
    seed: int = 0
    shuffle: bool = True

    def batch(self, consumed: int, size: int, **rank: object) -> list[MicroBatch]:
        """This rank's micro-batches of the global batch that begins after `consumed` samples."""
        return micro_batches(self.train, self.order, consumed, size, **rank)

    def counted(self, consumed: int, size: int) -> int:
        """Targets of that whole global batch that count."""
        return valid_tokens(self.train, self.order, consumed, size)

    @property
    def order(self) -> Order:
        return Order(len(self.train), self.seed, self.shuffle)

    @property
    def source_hash(self) -> str:
        """Of the texts that the training data was made from; empty where it is not known."""
        return self._meta("source_hash")

    @property
    def tokenizer_hash(self) -> str:
        return self._meta("tokenizer_hash")

    @property
    def tokens(self) -> int:
        """Of the training data; 0 where they are not stored."""
        return int(getattr(getattr(self.train, "data", None), "num_tokens", 0))

    def _meta(self, key: str) -> str:
        return str(getattr(getattr(self.train, "data", None), "meta", {}).get(key, ""))

    def held_out(self) -> Corpus | None:
        """The validation samples as a corpus of their own."""
        return None if self.valid is None else Corpus(self.valid, None)


def open_corpus(settings: Settings) -> Corpus:
    """FileNotFoundError or ValueError, one line, for a missing or truncated file, for data whose largest token id is
    outside the vocabulary, and for too little data."""
    folder = check_data(settings)
    size, vocabulary = settings.model.seq_length, settings.model.vocab_size
    train = GPTDataset(folder / "train", size, vocabulary)
    check_vocabulary(train, settings.model.vocab_size)
    valid = None
    if exists(folder / "valid.idx") or exists(folder / "valid.bin"):
        valid = GPTDataset(folder / "valid", size, vocabulary)
        check_vocabulary(valid, settings.model.vocab_size)
        if len(valid) < settings.parallel.dp:
            raise ValueError(
                f"data.dir='{plain(settings.data.dir)}': valid has {len(valid)} samples, fewer than parallel.dp="
                f"{settings.parallel.dp}; prepare with a larger --valid-fraction"
            )
    return Corpus(train, valid, settings.run.seed, settings.data.shuffle)


def check_data(settings: Settings) -> Path:
    """The data folder, or a one-line error when it is not what `megacore prepare` wrote."""
    folder, remedy = Path(settings.data.dir), "run megacore prepare TEXT --out DIR and give that DIR"
    if not settings.data.dir:
        raise ValueError(f"data.dir is empty; {remedy}")
    if not folder.is_dir():
        raise ValueError(
            f"data.dir='{plain(settings.data.dir)}' {'is a file' if folder.exists() else 'does not exist'}; {remedy}"
        )
    if not exists(folder / "train.idx"):
        raise ValueError(f"data.dir='{plain(settings.data.dir)}': {plain(folder / 'train.idx')} is missing; {remedy}")
    return folder


def with_vocabulary(settings: Settings) -> Settings:
    """model.vocab_size = 0 is replaced by the size of the tokenizer that the data was made with."""
    if settings.model.vocab_size:
        return settings
    sidecar = check_data(settings) / "train.json"
    try:
        size = field(read(sidecar), "vocab_size", int, sidecar, least=1, most=2**31 - 1)
    except (OSError, ValueError) as error:
        why = f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"
        if isinstance(error, FileNotFoundError):
            why = "is missing"
        raise ValueError(
            f"model.vocab_size=0 asks for the tokenizer's size, and {plain(sidecar)} {why}; "
            "prepare the data again, or set model.vocab_size"
        ) from None
    return replace(settings, model=replace(settings.model, vocab_size=size))
