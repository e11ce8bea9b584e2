"""Byte-level BPE by the `tokenizers` library: train, load, encode, and the id that ends a document."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
BATCH = 1 << 20  # characters encoded at once: the encoder's memory is about 100 bytes a token
SMALLEST = 257  # the 256 bytes and <|endoftext|>


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens with <|endoftext|> as id 0. Depends on the texts alone."""
    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size={vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}; give vocab_size >= {SMALLEST}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: str | Path) -> Tokenizer:
    """A tokenizer.json; one-line FileNotFoundError or ValueError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer {path} is missing; give the tokenizer.json of a `tokenizers` tokenizer, or none to train one"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        why = str(error).splitlines()[0]
        raise ValueError(
            f"tokenizer {path} cannot be read ({why}); expected a tokenizer.json of the `tokenizers` library"
        ) from None


def save(spelled: str, path: Path) -> None:
    """Write the JSON text of a tokenizer, committed by rename."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(spelled, encoding="utf-8")
    os.replace(partial, path)


def size(tokenizer: Tokenizer) -> int:
    """Vocabulary size: largest id + 1, added tokens included (a tokenizer may leave ids out)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_document(tokenizer: Tokenizer) -> int:
    """The id that ends each document: the first of END_NAMES that the tokenizer knows."""
    for name in END_NAMES:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    raise ValueError(
        f"the tokenizer has none of {', '.join(END_NAMES)} to end a document with; "
        f"add {END_OF_TEXT} to its special tokens"
    )


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text, no special tokens: `<|endoftext|>` inside a text is those thirteen characters, not an end."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    try:
        batch = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    finally:
        tokenizer.encode_special_tokens = before
    return [np.array(encoding.ids, dtype=np.int64) for encoding in batch]


def encode_documents(
    tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], end: int
) -> Iterator[tuple[str, np.ndarray, int]]:
    """(side, ids with the end id, characters) of each document in order, about BATCH characters encoded at a time."""
    queue: list[tuple[str, bool]] = []
    sides: list[tuple[str, int]] = []
    parts: list[np.ndarray] = []
    waiting = 0

    def flush() -> Iterator[tuple[str, np.ndarray, int]]:
        for ids, (_, last) in zip(encode(tokenizer, [piece for piece, _ in queue]), queue, strict=True):
            parts.append(ids)
            if last:
                side, length = sides.pop(0)
                yield side, np.append(np.concatenate(parts), np.int64(end)), length
                parts.clear()
        queue.clear()

    for side, text in texts:
        sides.append((side, len(text)))
        for piece, last in pieces(text):
            queue.append((piece, last))
            waiting += len(piece)
            if waiting >= BATCH:
                yield from flush()
                waiting = 0
    yield from flush()


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """(piece, is it the last) of a document, cut at line breaks after about BATCH characters."""
    start = 0
    while len(text) - start > BATCH:
        stop = line_break(text, start + BATCH)
        if stop >= len(text):
            break
        yield text[start:stop], False
        start = stop
    yield text[start:], True


def line_break(text: str, near: int) -> int:
    """Just after the first newline from `near` on that stands between two visible characters, else `near`.

    Byte-level BPE never merges across such a place, so a document cut there has the tokens it would have in one piece.
    """
    at = text.find("\n", near, near + BATCH)
    while at > 0:
        if at + 1 < len(text) and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at = text.find("\n", at + 1, near + BATCH)
    return near
