"""Text to tokens: inputs -> OUT/train.bin/.idx/.json, OUT/valid.bin/.idx/.json, OUT/tokenizer.json.

Three passes over the text, none of which holds more than one file: survey (count, hash, find the split), train the BPE
on a sample of the training part, encode. The output depends on the texts, their order and the arguments alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from stat import S_ISREG

from tokenizers import Tokenizer

from megacore.train.plain import plain
from megacore.train.ranges import Range, check_value

from . import tokenizer as bpe
from .indexed import part, token_dtype
from .order import mix
from .sources import EXCLUDE, SUFFIXES, Skips, documents, find_files
from .writer import IndexedWriter

SAMPLE = 16 << 20  # characters the BPE is trained on: 4 s of one core, and more changes few merges
SLICE = 1 << 16  # the sample is drawn in slices, so that one huge file is sampled as evenly as many small ones
SEEDS = Range(-(2**63), 2**63 - 1)  # what the sidecar can hold as a number
Progress = Callable[[str, int, int], None]  # (phase, done, total); phases: read (bytes), tokenizer, encode (characters)


@dataclass(frozen=True)
class Report:
    """What prepare did. `files` gave text, `files_skipped` did not (unreadable, binary, empty); `skipped` counts by
    reason whatever was left out, and `examples` names a few of each."""

    files: int
    characters: int
    train_documents: int
    train_tokens: int
    valid_documents: int
    valid_tokens: int
    vocab_size: int
    skipped: dict[str, int]
    examples: dict[str, list[str]]
    files_skipped: int = 0


@dataclass(frozen=True)
class Split:
    """What is held out: documents whose keyed hash is below `threshold`, or the last `tail` of each if not 0."""

    seed: int
    threshold: int
    tail: float = 0.0

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        if self.tail:
            cut = bpe.line_break(text, int(len(text) * (1 - self.tail)))
            yield from (("train", text[:cut]), ("valid", text[cut:]))
        else:
            yield ("valid" if _hash(text, self.seed) < self.threshold else "train"), text


@dataclass(frozen=True)
class Survey:
    files: int  # that gave some text
    documents: int
    characters: int
    lowest: int  # of the keyed hashes
    highest: int
    source_hash: str  # of all texts in order

    def split(self, seed: int, fraction: float) -> Split:
        """Each side gets at least one document; where all text is one document, its tail is held out."""
        if fraction and self.lowest == self.highest:
            return Split(seed, 0, tail=fraction)
        threshold = int(fraction * 2**64)
        if fraction:
            threshold = min(max(threshold, self.lowest + 1), self.highest)
        return Split(seed, threshold)


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32768,
    valid_fraction: float = 0.05,
    suffixes: Sequence[str] = SUFFIXES,
    exclude: Sequence[str] = EXCLUDE,
    jsonl_key: str = "text",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Tokenize text files, JSON lines or directory trees.

    tokenizer: a tokenizer.json to use; None trains a byte-level BPE of at most `vocab_size` tokens. Documents are held
    out whole, by a hash of (seed, text), so that copies of one text are on one side. Each ends with the end-of-text id.
    ValueError for arguments that cannot work or where no text is found, naming what was skipped and why.
    """
    if not 0 <= valid_fraction < 1:
        raise ValueError(f"valid_fraction={valid_fraction} is not in [0, 1); 0 holds nothing out")
    if tokenizer is None:
        bpe.check_size(vocab_size)
    check_value("seed", seed, SEEDS)
    _check_out(Path(out))
    given = None if tokenizer is None else bpe.load_spelled(tokenizer)
    show, out, skips = progress or (lambda *_: None), Path(out), Skips()
    files = find_files([Path(i) for i in inputs], suffixes, exclude, skips)
    found = _survey(files, jsonl_key, skips, seed, show)
    if not found.documents:
        raise ValueError(
            f"no text in {', '.join(map(plain, inputs)) or 'no inputs'}: {skips}; "
            f"expected files, directories with {' '.join(suffixes)}, or JSON lines with a text under {jsonl_key!r}"
        )
    split = found.split(seed, valid_fraction)

    def texts() -> Iterator[tuple[str, str]]:
        return (side for file in files for text in documents(file, jsonl_key, Skips()) for side in split.parts(text))

    trained, spelled = given or _train(texts(), found.characters, vocab_size, show)
    meta = {
        "vocab_size": bpe.size(trained),
        "tokenizer": "tokenizer.json",
        "tokenizer_hash": _digest(spelled).hex(),
        "eod_id": bpe.end_of_document(trained),
        "source_hash": found.source_hash,
        "seed": seed,
        "valid_fraction": valid_fraction,
    }
    counts = _write(out, trained, spelled, meta, texts(), found, valid_fraction > 0, show)
    return Report(
        found.files, found.characters, *counts, meta["vocab_size"], dict(skips.counts), skips.examples,
        files_skipped=len(files) - found.files,
    )  # fmt: skip


def _check_out(out: Path) -> None:
    """Before the minutes that reading and training a tokenizer may take."""
    there = next(p for p in (out.absolute(), *out.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise ValueError(f"out='{plain(out)}': {plain(there)} is a file; give a folder to write to")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"out='{plain(out)}': {plain(there)} is not writable; give a folder to write to")


def _survey(files: Sequence[Path], key: str, skips: Skips, seed: int, show: Progress) -> Survey:
    sizes = [_size(f) for f in files]
    read, total = accumulate(sizes), sum(sizes)
    sources, count, characters, low, high = hashlib.blake2b(digest_size=16), 0, 0, 2**64, -1
    gave = 0
    for file in files:
        before = count
        for text in documents(file, key, skips):
            digest = _digest(text)
            sources.update(digest)
            value = mix(int.from_bytes(digest, "little"), seed)
            count, characters, low, high = count + 1, characters + len(text), min(low, value), max(high, value)
        gave += count > before
        show("read", next(read), total)
    return Survey(gave, count, characters, low, high, sources.hexdigest())


def _size(file: Path) -> int:
    """0 for what cannot be looked at, or is no file: it is skipped with its reason when it is to be read."""
    try:
        seen = os.stat(file)
    except OSError:
        return 0
    return seen.st_size if S_ISREG(seen.st_mode) else 0


def _train(texts: Iterator[tuple[str, str]], characters: int, vocab_size: int, show: Progress) -> tuple[Tokenizer, str]:
    ratio = min(1.0, SAMPLE / characters)
    chosen = int(ratio * 2**64)

    def sample() -> Iterator[str]:
        taken = 0
        for side, text in texts:
            key = _hash(text, 0)
            for i, start in enumerate(range(0, len(text), SLICE) if side == "train" else ()):
                if mix(key, i) < chosen:
                    taken += min(SLICE, len(text) - start)
                    yield text[start : start + SLICE]
            show("tokenizer", min(taken, int(ratio * characters)), int(ratio * characters))

    trained = bpe.train(sample(), vocab_size)
    show("tokenizer", int(ratio * characters), int(ratio * characters))  # held-out text is not in the sample
    return trained, trained.to_str(pretty=True)


def _write(
    out: Path,
    trained: Tokenizer,
    spelled: str,
    meta: dict,
    texts: Iterator[tuple[str, str]],
    found: Survey,
    valid: bool,
    show: Progress,
) -> tuple[int, int, int, int]:
    """Encode and commit; (documents, tokens) of train and of valid."""
    out.mkdir(parents=True, exist_ok=True)
    dtype, done = token_dtype(meta["vocab_size"]), 0
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(IndexedWriter(out / side, dtype))
            for side in (("train", "valid") if valid else ("train",))
        }
        for side, ids, length in bpe.encode_documents(trained, texts, meta["eod_id"]):
            writers[side].add_document(ids)
            done += length
            show("encode", min(done, found.characters), found.characters)
        if done != found.characters:
            raise ValueError(
                f"the inputs changed while they were read ({found.characters} characters, then {done}); prepare again"
            )
        for suffix in (".idx", ".bin", ".json"):  # of an earlier run: old tokens must never meet the new tokenizer
            for side in ("train", "valid"):
                part(out / side, suffix).unlink(missing_ok=True)
        bpe.save(spelled, out / "tokenizer.json")
        for side, writer in reversed(writers.items()):  # train last: where it is, all is
            writer.commit({**meta, "split": side, "largest_token_id": writer.largest})
    sides = [writers.get(side) for side in ("train", "valid")]
    return tuple(n for w in sides for n in ((w.num_documents, w.num_tokens) if w else (0, 0)))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def _hash(text: str, seed: int) -> int:
    return mix(int.from_bytes(_digest(text), "little"), seed)
