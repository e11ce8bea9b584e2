"""What is fuzzed: for each kind of input a good one, and what must hold of a changed one.

A target is made once in a folder of its own; `try_one(draw)` changes the good input, reads it, and returns "refused"
after a one-line error of a kind that callers expect, or "right" where what was read equals what an independent reading
gives. Anything else is an AssertionError, or the exception that got through.
"""

import contextlib
import io
import json
import math
import random
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megacore import cli
from megacore.train import config, metrics
from megacore.train.check import check
from megacore.train.corpus import with_vocabulary
from megacore.train.data import tokenizer as bpe
from megacore.train.data.dataset import GPTDataset, check_vocabulary
from megacore.train.data.indexed import IndexedDataset
from megacore.train.data.sources import Skips, documents
from megacore.train.data.writer import IndexedWriter

from . import mutate

DOCUMENTS = [[1, 2, 3], [], [40, 41, 42, 43, 44, 45, 46], [9] * 20, [0], []]
VOCABULARY = 50
EXPECTED = (ValueError, OSError)  # CheckpointError is a ValueError


def refusal(act: Callable[[], object]) -> str | None:
    """The words of the error with which `act` refuses; None where it does not. Other exceptions go on."""
    try:
        act()
    except UnicodeError as error:
        raise AssertionError(f"an error of the codec got through: {error}") from error
    except EXPECTED as error:
        said = str(error)
        assert said.strip() and "\n" not in said and len(said) < 2000, f"not one line: {said[:300]!r}"
        assert "\x1b" not in said and not any("\ud800" <= c < "\ue000" for c in said), f"unprintable: {said[:300]!r}"
        return said
    return None


class Index:
    """.idx and .bin: refused, or the documents that a reading with Python's own integers finds."""

    def __init__(self, folder: Path, dtype=np.int32):
        self.prefix = folder / "train"
        with IndexedWriter(self.prefix, dtype) as writer:
            for tokens in DOCUMENTS:
                writer.add_document(np.array(tokens, np.int64))
            writer.commit({"vocab_size": VOCABULARY})
        (folder / "train.json").unlink()
        self.good = {s: Path(f"{self.prefix}{s}").read_bytes() for s in (".idx", ".bin")}

    def try_one(self, draw: random.Random) -> str:
        changed = dict(self.good)
        for suffix in draw.choice(([".idx"], [".idx"], [".bin"], [".idx", ".bin"])):
            changed[suffix] = mutate.of_bytes(draw, changed[suffix])
        for suffix, data in changed.items():
            Path(f"{self.prefix}{suffix}").write_bytes(data)
        found: dict = {}

        def read() -> None:
            data = GPTDataset(self.prefix, 4, VOCABULARY)
            check_vocabulary(data, VOCABULARY)
            found["samples"] = [data.sample(i).tolist() for i in range(len(data))]
            found["documents"] = [data.data.document(i).tolist() for i in range(data.data.num_documents)]

        if refusal(read):
            return "refused"
        expected = self._by_hand(changed[".idx"], changed[".bin"])
        assert expected is not None, "an index that breaks the format was taken"
        stream = [t for document in expected for t in document]
        assert found["documents"] == expected
        assert found["samples"] == [stream[i : i + 5] for i in range(0, len(stream) - 4, 4)]
        assert all(0 <= t < VOCABULARY for t in stream)
        return "right"

    @staticmethod
    def _by_hand(idx: bytes, tokens: bytes) -> list[list[int]] | None:
        magic, version, code, count, entries = struct.unpack_from("<9sQBQQ", idx)
        form = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}.get(code)
        if magic != b"MMIDIDX\0\0" or version != 1 or form is None or len(idx) != 34 + 12 * count + 8 * entries:
            return None
        lengths = struct.unpack_from(f"<{count}i", idx, 34)
        pointers = struct.unpack_from(f"<{count}q", idx, 34 + 4 * count)
        table = struct.unpack_from(f"<{entries}q", idx, 34 + 12 * count)
        if not table or table[0] or table[-1] != count or list(table) != sorted(table) or min(lengths, default=0) < 0:
            return None
        parts = [list(struct.unpack_from(f"<{n}{form}", tokens, p)) for n, p in zip(lengths, pointers, strict=True)]
        return [sum(parts[a:b], []) for a, b in zip(table, table[1:], strict=False)]


class Sidecar(Index):
    """The .json beside .idx: refused, or the object that it holds, with a vocabulary that is a number."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        body = {
            "vocab_size": VOCABULARY, "tokenizer": "tokenizer.json", "tokenizer_hash": "ab", "eod_id": 0,
            "source_hash": "cd", "largest_token_id": 46, "tokens": 31, "documents": 6, "seed": 0,
        }  # fmt: skip
        self.body = json.dumps(body).encode()
        self.settings = config.Settings(data=config.DataSettings(dir=str(folder)))

    def try_one(self, draw: random.Random) -> str:
        text = mutate.of_json(draw, self.body)
        Path(f"{self.prefix}.json").write_bytes(text)
        found: dict = {}

        def read() -> None:
            data = IndexedDataset(self.prefix)
            found["meta"], found["largest"] = data.meta, data.largest_token_id

        said = refusal(read)
        size = refusal(lambda: found.update(size=with_vocabulary(self.settings).model.vocab_size))
        assert said is None or "train.json" in said
        if said is None:
            assert found["meta"] == json.loads(text.decode("utf-8-sig"))
            assert type(found["largest"]) is int and -1 <= found["largest"] < 2**31
        if size is None:
            assert type(found["size"]) is int and 1 <= found["size"] < 2**31
        return "refused" if said else "right"


class TokenizerFile:
    """tokenizer.json: refused, or ids within the vocabulary, the same each time, none cut off and none filled in."""

    def __init__(self, folder: Path):
        self.path = folder / "tokenizer.json"
        self.text = "the quick brown fox jumps over the lazy dog, 12 times " * 4
        made = bpe.train([self.text], 280)
        made.enable_truncation(7)
        made.enable_padding(length=99)
        made.model.dropout = 0.5
        self.good = made.to_str().encode()

    def try_one(self, draw: random.Random) -> str:
        text = mutate.of_json(draw, self.good)
        self.path.write_bytes(text)
        found: list = []

        def read() -> None:
            tokenizer, _ = bpe.load_spelled(self.path)
            bpe.end_of_document(tokenizer)
            assert tokenizer.truncation is None and tokenizer.padding is None
            found.extend(bpe.encode(tokenizer, [self.text, self.text]))
            found.append(bpe.size(tokenizer))

        if refusal(read):
            return "refused"
        first, second, size = found
        assert first.tolist() == second.tolist() and first.min() >= 0 and first.max() < size < 2**31
        whole = json.loads(text.decode("utf-8-sig"))
        whole["truncation"] = whole["padding"] = None
        if "dropout" in whole["model"]:
            whole["model"]["dropout"] = None
        plain = Tokenizer.from_str(json.dumps(whole))
        plain.encode_special_tokens = True
        assert first.tolist() == plain.encode(self.text, add_special_tokens=False).ids
        return "right"


TOML = """
[model]
layers = 2
hidden = 16
heads = 2
dropout = 0.1
tied = true
[parallel]
tp = 1
bucket_mb = 3.5
[data]
dir = "x"
global_batch = 4
[optim]
lr = 1e-3
warmup_steps = 2
[run]
out = "runs/x"
steps = 10
precision = "fp32"
timeout_s = 60.0
"""
VALUES_TOML = (
    "1", "-1", "0", "inf", "-inf", "nan", "1e308", "9223372036854775807", "99999999999999999999", "9" * 5000, "{}",
    "[]", "[1]", "true", '"x"', '""', '"\\u0000"', "1979-05-27", "0x10", "1_000", "1e-300", "{a = 1}", '"[/b]"',
    '"\\u001b"',
)  # fmt: skip


class Toml:
    """Settings: refused in one line that names the file, or the values that tomllib finds, within finite ranges."""

    def __init__(self, folder: Path):
        self.path = folder / "run.toml"

    def try_one(self, draw: random.Random) -> str:
        lines = TOML.splitlines()
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(lines))
            name = lines[at].partition("=")[0]
            value = draw.choice(VALUES_TOML if draw.random() < 0.5 else ("1", "2", "0.5", '"x"', "true", "8"))
            lines[at] = f"{name}= {value}" if draw.random() < 0.8 else draw.choice(lines)
        text = "\n".join(lines).encode()
        text = mutate.of_bytes(draw, text) if draw.random() < 0.3 else text
        self.path.write_bytes(text)
        found: list = []
        if said := refusal(lambda: found.append(config.load(self.path))):
            assert "run.toml" in said
            return "refused"
        (settings,) = found
        given = tomllib.loads(text.decode("utf-8-sig").replace("\r\n", "\n"))
        for section, values in given.items():
            for name, value in values.items() if isinstance(values, dict) else ():
                if f"{section}.{name}" in config.field_names():
                    got = getattr(getattr(settings, section), name)
                    want = float(value) if type(got) is float and type(value) is int else value
                    assert got == want or want != want, (section, name, got, want)  # check refuses NaN
        if refusal(lambda: check(settings, draw.choice((1, 2, 8)))):
            return "refused"
        for section in config.describe(settings).values():
            assert all(abs(v) < 2**63 for v in section.values() if isinstance(v, int))
            assert all(math.isfinite(v) for v in section.values() if isinstance(v, float))
        return "right"


class CommandLine:
    """Overrides through cli.main: code 2, one line, no traceback. (The data folder does not exist: no run begins.)"""

    def __init__(self, folder: Path):
        self.path = folder / "run.toml"
        self.path.write_text(TOML)
        self.names = [*config.field_names(), *config.ALIASES, "nproc", "fresh", "run.recompute", "x", "", "h-", "[/b]"]

    def try_one(self, draw: random.Random) -> str:
        values = [*VALUES_TOML, "--", "-", "-1e-5", "--fresh", "\ud800", "\x1b[2J", "a.toml", "two words", "-x", "é"]
        arguments = ["train"] + [str(self.path)] * draw.choice((1, 1, 1, 1, 0, 2))
        for _ in range(draw.randint(1, 3)):
            name, value = draw.choice(self.names), draw.choice(values)
            name = draw.choice((name, name.replace("_", "-"), name.upper(), name[:-1]))
            option = [f"--{name}={value}"] if draw.random() < 0.5 else [f"--{name}", value]
            at = draw.randint(1, len(arguments))
            arguments[at:at] = option
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(arguments)
        lines = err.getvalue().splitlines()
        assert code == 2 and len(lines) == 1 and lines[0].startswith("megacore train: error: "), (
            arguments,
            code,
            lines,
        )
        assert lines[0].isprintable() and len(lines[0]) < 2500, (arguments, lines)
        return "refused"


class JsonLines:
    """Lines of text: each good one is kept, each bad one is counted with its place."""

    def __init__(self, folder: Path):
        self.path = folder / "x.jsonl"

    def try_one(self, draw: random.Random) -> str:
        lines = [json.dumps({"text": f"text {i} é", "n": i}, ensure_ascii=i % 2 == 0).encode() for i in range(8)]
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(lines))
            lines[at] = mutate.of_json(draw, json.dumps({"text": "some text", "n": [1.5, 2]}).encode())
        data = b"\n".join(lines)
        self.path.write_bytes(data)
        skips = Skips()
        got = list(documents(self.path, "text", skips))
        wanted = [text for line in data.split(b"\n") if (text := self._by_hand(line)) is not None]
        empty = sum(not line.strip() for line in data.split(b"\n"))
        assert got == wanted
        assert sum(skips.counts.values()) == len(data.split(b"\n")) - empty - len(got)
        assert str(skips).isprintable() and all(f"{self.path.name}:" in n for e in skips.examples.values() for n in e)
        return "refused" if skips.counts else "right"

    @staticmethod
    def _by_hand(line: bytes) -> str | None:
        try:
            value = json.loads(line.decode("utf-8-sig"), parse_int=float, parse_float=float)
        except (ValueError, RecursionError):
            return None
        text = value.get("text") if isinstance(value, dict) else None
        half = isinstance(text, str) and any("\ud800" <= c < "\ue000" for c in text)
        return text if isinstance(text, str) and text.strip() and not half else None


class Metrics:
    """metrics.jsonl at a resume: no line ends the run, and what is kept are whole lines of steps already done."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"
        rows = [{"step": s, "loss": 1.0 / s, "grad_norm": 0.5} for s in range(1, 9)]
        self.good = "".join(json.dumps(r) + "\n" for r in rows).encode()

    def try_one(self, draw: random.Random) -> str:
        lines = self.good.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        lines[at] = mutate.of_json(draw, lines[at].strip()) + b"\n"
        self.path.write_bytes(mutate.of_bytes(draw, self.good) if draw.random() < 0.4 else b"".join(lines))
        metrics.MetricsFile(self.path, 5).close()
        kept = metrics.read(self.path)
        assert all(isinstance(row, dict) and row["step"] <= 5 for row in kept)
        return "right"
