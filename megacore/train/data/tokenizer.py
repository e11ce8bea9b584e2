"""Byte-level BPE by the `tokenizers` library: train, load, encode, and the id that ends a document."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megacore.train.plain import plain
from megacore.train.regular import exists, read_bytes

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
BATCH = 1 << 20  # characters encoded at once: the encoder's memory is about 100 bytes a token
SMALLEST = 257  # the 256 bytes and <|endoftext|>
LARGEST = 1 << 20  # tokens of a tokenizer that is trained: the largest in use have a quarter of it
LARGEST_ID = 1 << 24
FILE_BYTES = 1 << 30  # of a tokenizer.json: those of 256,000 tokens have 30 MB


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens with <|endoftext|> as id 0. Depends on the texts alone."""
    check_size(vocab_size)
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


def check_size(vocab_size: int) -> None:
    """ValueError unless a tokenizer of so many tokens can be trained."""
    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size={vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}; give vocab_size >= {SMALLEST}"
        )
    if vocab_size > LARGEST:  # the trainer reserves memory for all of them, and ends the process where there is none
        raise ValueError(f"vocab_size={vocab_size} is above {LARGEST}; give vocab_size <= {LARGEST}")


def load(path: str | Path) -> Tokenizer:
    """A tokenizer.json as a corpus and a prompt need it; one-line FileNotFoundError, OSError or ValueError."""
    return load_spelled(path)[0]


def load_spelled(path: str | Path) -> tuple[Tokenizer, str]:
    """(tokenizer, its JSON text) of a tokenizer.json. Settings that are meant for inference are taken out of both:
    truncation and padding would cut or fill documents, dropout of merges would make encoding random. The text of a file
    without them is the file's own. ValueError for a file that cannot encode every text, or leaves some of it out."""
    path = Path(path)
    if not exists(path):
        raise FileNotFoundError(
            f"tokenizer {plain(path)} is missing; give the tokenizer.json of a `tokenizers` tokenizer, or none to "
            "train one"
        )
    named = f"tokenizer {plain(path)}"
    try:
        spelled = read_bytes(path, FILE_BYTES).decode("utf-8-sig")
        whole = json.loads(spelled)
        _check_spelled_ids(whole)
        tokenizer = Tokenizer.from_str(spelled)
    except OSError as error:
        raise ValueError(f"{named} cannot be read ({error.strerror})") from None
    except BaseException as error:  # the library raises bare Exception, and PanicException where Rust gave up
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        why = "nested too deeply" if isinstance(error, RecursionError) else plain((str(error) or "?").splitlines()[0])
        raise ValueError(
            f"{named} cannot be read ({why[:200]}); expected a tokenizer.json of the `tokenizers` library"
        ) from None
    _check_unknown(whole, named)
    if _for_inference(whole):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        spelled = tokenizer.to_str(pretty="\n" in spelled.strip())
        if left := _for_inference(json.loads(spelled)):
            raise ValueError(f"{named} has {left}, which would act on the corpus; take it out of the file")
    _check_ids(tokenizer, named)
    return tokenizer, spelled


def _check_spelled_ids(whole: dict) -> None:
    """Before the library sees them: it lists every id up to the largest, and ends the process without memory."""
    vocabulary = (whole.get("model") or {}).get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in whole.get("added_tokens") or () if isinstance(token, dict)]
    for value in ids:
        if isinstance(value, int | float) and not 0 <= value < LARGEST_ID:
            raise ValueError(f"token id {value} is outside 0 to {LARGEST_ID - 1}")


def _for_inference(whole: dict) -> str:
    """Which settings of a tokenizer.json must not act on a corpus, by name."""
    model = whole.get("model") or {}
    found = [name for name in ("truncation", "padding") if whole.get(name) is not None]
    # BPE's dropout of merges; Unigram's sampling, where a version of the library writes it down
    return ", ".join(found + [f"model.{name}" for name in ("dropout", "alpha", "nbest_size") if model.get(name)])


def _check_unknown(whole: dict, named: str) -> None:
    """A model that has no token for what it does not know stops at such text, or (BPE) leaves it out in silence."""
    model = whole.get("model") or {}
    unknown, vocabulary = model.get("unk_token"), model.get("vocab") or {}
    if (
        unknown is not None
        and unknown not in vocabulary
        and not any(token.get("content") == unknown for token in whole.get("added_tokens") or ())
    ):
        raise ValueError(f"{named}: unk_token='{plain(unknown)}' is not in its vocabulary; add it, or set it to null")
    bytewise = model.get("byte_fallback") or '"ByteLevel"' in json.dumps(
        [whole.get("pre_tokenizer"), whole.get("normalizer")]
    )
    if (model.get("type", "BPE") == "BPE" and unknown is None and not bytewise) and vocabulary:
        raise ValueError(
            f"{named}: BPE without unk_token, byte_fallback or ByteLevel leaves out what it does not know, in silence; "
            "give it an unk_token"
        )


def _check_ids(tokenizer: Tokenizer, named: str) -> None:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise ValueError(f"{named} has no tokens; expected a trained tokenizer")
    if max(ids) >= 2**31 - 1:
        raise ValueError(f"{named} has token id {max(ids)}; ids of a dataset are int32, below {2**31 - 1}")


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
    except BaseException as error:  # bare Exception, and PanicException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        why = plain((str(error) or "?").splitlines()[0])[:200]
        raise ValueError(f"the tokenizer cannot encode a text ({why}); give one that knows every character") from None
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
