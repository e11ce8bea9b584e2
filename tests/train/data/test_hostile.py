"""Inputs that nobody meant well: whatever is bad is counted with its place or refused in one line, the rest is kept."""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megacore.train.config import DataSettings, Settings
from megacore.train.corpus import with_vocabulary
from megacore.train.data import tokenizer as bpe
from megacore.train.data.dataset import GPTDataset, check_vocabulary
from megacore.train.data.indexed import IndexedDataset
from megacore.train.data.prepare import prepare
from megacore.train.data.sources import Skips, documents, find_files
from megacore.train.data.writer import IndexedWriter, merge, write_index

TEXTS = [f"line {i}: the quick brown fox jumps over the lazy dog {i * i}" for i in range(40)]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- MB-37: settings of a tokenizer.json that are meant for inference


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """(folder of texts, tokenizer.json without such settings, what prepare makes of both)"""
    root = tmp_path_factory.mktemp("clean")
    (root / "in").mkdir()
    for i, text in enumerate(TEXTS):
        (root / f"in/{i:02}.txt").write_text(text)
    bpe.train(TEXTS, 300).save(str(root / "tokenizer.json"))
    prepare([root / "in"], root / "out", tokenizer=root / "tokenizer.json", valid_fraction=0.2)
    return root / "in", root / "tokenizer.json", bytes_of(root / "out")


@pytest.mark.parametrize("setting", ["truncation", "padding", "padding to 64", "dropout", "all"])
def test_mb37_inference_settings_do_not_act_on_a_corpus(tmp_path, clean, setting):
    texts, path, expected = clean
    tokenizer = Tokenizer.from_file(str(path))
    if setting in ("truncation", "all"):
        tokenizer.enable_truncation(3)
    if setting in ("padding", "all"):
        tokenizer.enable_padding()
    if setting == "padding to 64":
        tokenizer.enable_padding(length=64)
    if setting in ("dropout", "all"):
        tokenizer.model.dropout = 0.5
    tokenizer.save(str(tmp_path / "it.json"))
    assert (tmp_path / "it.json").read_bytes() != path.read_bytes()
    prepare([texts], tmp_path / "out", tokenizer=tmp_path / "it.json", valid_fraction=0.2)
    assert bytes_of(tmp_path / "out") == expected


def test_mb37_a_post_processor_adds_nothing(tmp_path, clean):
    texts, path, expected = clean
    whole = json.loads(path.read_text())
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "it.json").write_text(json.dumps(whole))
    assert Tokenizer.from_file(str(tmp_path / "it.json")).encode("a").ids[0] == 0  # it does act where it is asked to
    prepare([texts], tmp_path / "out", tokenizer=tmp_path / "it.json", valid_fraction=0.2)
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx"):
        assert (tmp_path / "out" / name).read_bytes() == expected[name]


def test_a_tokenizer_that_cannot_encode_is_one_line(tmp_path, clean):
    texts, path, _ = clean
    whole = json.loads(path.read_text())

    def refused(change, said, **model):
        body = json.loads(json.dumps(whole))
        body.update(change)
        body["model"].update(model)
        (tmp_path / "it.json").write_text(json.dumps(body))
        with pytest.raises(ValueError, match=said) as error:
            prepare([texts], tmp_path / "out", tokenizer=tmp_path / "it.json")
        one_line(error)

    refused({}, r"unk_token='\[UNK\]' is not in its vocabulary", unk_token="[UNK]")
    refused({"pre_tokenizer": None}, "leaves out what it does not know")
    refused({"version": "9.9"}, "it.json cannot be read")
    refused({}, "it.json cannot be read", vocab={"a": -1})
    refused({}, "it.json cannot be read", merges=[["zz", "qq"]])
    words = Tokenizer(models.WordLevel({"line": 0, "</s>": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="unk_token"):
        bpe.load(tmp_path / "words.json")
    unigram = Tokenizer(models.Unigram([("line", 0.0), ("</s>", -1.0)]))
    unigram.save(str(tmp_path / "unigram.json"))
    with pytest.raises(ValueError, match="the tokenizer cannot encode a text"):
        prepare([texts], tmp_path / "out", tokenizer=tmp_path / "unigram.json")
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(ValueError, match="empty.json has no tokens"):
        bpe.load(tmp_path / "empty.json")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="deep.json cannot be read"):
        bpe.load(tmp_path / "deep.json")
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(ValueError, match="not a regular file but a FIFO"):
        bpe.load(tmp_path / "fifo.json")
    for size, said in ((1_000_000_000, "above 1048576"), (0, "cannot hold")):
        with pytest.raises(ValueError, match=said):
            prepare([texts], tmp_path / "out", vocab_size=size)


# ---- MB-38: hostile lines, closed folders


def test_mb38_a_hostile_line_is_counted_and_the_good_ones_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("megacore.train.data.sources.LONGEST_LINE", 1 << 20)
    bad = [
        (b"[" * 200_000, "lines that are nested too deeply"),
        (b'{"text": ' * 100_000, "lines that are nested too deeply"),
        (b'{"text": "' + b"x" * (3 << 20) + b'"}', "lines of more than 1,048,576 bytes"),
        (b'{"text": "\xff\xfe"}', "lines that are not UTF-8 text"),
        ('{"text": "wide"}'.encode("utf-16"), "lines that are not"),
        (b'{"text": "\\ud800"}', "lines with half a surrogate pair"),
        (b'{"[/INST]": 1}', "lines without a text under key 'text'"),
        (b'{"\\ud800\\u001b[2J": 1}', "lines without a text under key 'text'"),
        (b"\x00\x01", "lines that are not JSON"),
        (b'{"text": null}', "lines without a text under key 'text'"),
        (b"{}", "lines without a text under key 'text'"),
    ]
    good = [json.dumps({"text": t, "n": 0}).encode() for t in TEXTS]
    good[3] = b'{"text": "a long number", "n": ' + b"9" * 10_000 + b"}"
    lines = [line for i, g in enumerate(good) for line in (g, *(b for b, _ in bad[i : i + 1]))]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    skips = Skips()
    got = list(documents(tmp_path / "x.jsonl", "text", skips))
    assert got == [*TEXTS[:3], "a long number", *TEXTS[4:]]
    assert sum(skips.counts.values()) == len(bad)
    for i, (_, reason) in enumerate(bad):
        found = [r for r, names in skips.examples.items() if r.startswith(reason)]
        assert found, reason
        place = f"x.jsonl:{2 * i + 2}"
        assert any(place in n for r in found for n in skips.examples[r]) or skips.counts[found[0]] > 3, place
    assert str(skips).isprintable()
    report = prepare([tmp_path / "x.jsonl"], tmp_path / "out", vocab_size=300)
    assert report.train_documents + report.valid_documents == len(TEXTS)


def test_mb38_files_that_are_none(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    (root / "good.txt").write_text("good text\n")
    os.mkfifo(root / "fifo.txt")
    (root / "gone.txt").symlink_to("nowhere")
    (root / "loop.txt").symlink_to("loop.txt")
    (root / "device.txt").symlink_to("/dev/zero")
    (root / "binary.txt").write_bytes(b"a\0b")
    (root / "latin.txt").write_bytes(b"\xe9\xe8")
    (root / os.fsdecode(b"odd\xff\n\x1b[31m[red].jsonl")).write_text("[/x]\n")
    short = Path(tempfile.mkdtemp(dir="/tmp"))  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short / "s"))
        (root / "socket.txt").symlink_to(short / "s")
        report = prepare([root, root / "fifo.txt", root / "gone.txt"], tmp_path / "out", vocab_size=260)
    said = report.skipped
    assert report.train_documents + report.valid_documents >= 1 and report.files == 1
    for reason, name in (
        ("unreadable: not a regular file but a FIFO", "fifo.txt"),
        ("unreadable: not a regular file but a device", "device.txt"),
        ("unreadable: not a regular file but a socket", "socket.txt"),
        ("unreadable: No such file or directory", "gone.txt"),
        ("unreadable: Too many levels of symbolic links", "loop.txt"),
        ("binary", "binary.txt"),
        ("not UTF-8 text", "latin.txt"),
        ("lines that are not JSON", r"odd\udcff\n\x1b[31m[red].jsonl:1"),
    ):
        assert said[reason] >= 1 and any(name in n for n in report.examples[reason]), (reason, report.examples)
    with pytest.raises(ValueError, match="no text in .*fifo.txt.*not a regular file"):
        prepare([root / "fifo.txt"], tmp_path / "none")


LISTED = """
import sys
from pathlib import Path
from megacore.train.data.sources import *
skips = Skips()
files = find_files([Path(sys.argv[1])], [".txt"], [], skips)
texts = [t for f in files for t in documents(f, "text", skips)]
print(texts, dict(skips.counts))
"""


def test_mb38_a_closed_folder_is_counted():
    """Read by a user who may not: root may, so a process of another one looks."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chmod(root, 0o755)
    for name in ("open", "shut", "unsearchable"):
        (root / name).mkdir()
        (root / name / "a.txt").write_text(f"text in {name}\n")
    (root / "open/secret.txt").write_text("secret")
    os.chmod(root / "open/secret.txt", 0o000)
    os.chmod(root / "shut", 0o000)
    os.chmod(root / "unsearchable", 0o444)
    became = """
import os, sys
if os.getuid() == 0:
    import megacore.train.data.sources, encodings.utf_8_sig  # what root alone may read is imported first
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""
    done = subprocess.run(
        [sys.executable, "-c", became + LISTED, str(root)], capture_output=True, text=True, timeout=120
    )
    os.chmod(root / "shut", 0o755)
    assert done.returncode == 0, done.stderr
    assert "text in open" in done.stdout and "secret'" not in done.stdout
    assert "'folders that cannot be listed: Permission denied': 1" in done.stdout
    assert "'unreadable: Permission denied': 2" in done.stdout


def test_a_file_that_vanishes_is_no_crash(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    skips = Skips()
    (file,) = find_files([tmp_path], [".txt"], [], skips)
    file.unlink()
    assert list(documents(file, "text", skips)) == [] and sum(skips.counts.values()) == 1


# ---- MB-40 and the index


def table(prefix: Path, lengths, documents_, dtype=np.uint16) -> Path:
    count = max(sum(lengths), 0)
    Path(f"{prefix}.bin").write_bytes(np.arange(1, count + 1).astype(dtype).tobytes())
    write_index(f"{prefix}.idx", np.dtype(dtype), lengths, documents_)
    return prefix


@pytest.mark.parametrize(
    "wrong", [[0, 1, 3], [0], [], [1, 6], [0, 7], [0, 4, 2, 6], [0, 1, 2, 3, 4, 5, 5], [-1, 6], [0, 2**62, 6]]
)
def test_mb40_a_document_table_that_leaves_sequences_out_is_refused(tmp_path, wrong):
    lengths = [0, 3, 0, 0, 5, 0]
    right = IndexedDataset(table(tmp_path / "right", lengths, [0, 1, 3, 6]))
    assert [right.document(i).tolist() for i in range(3)] == [[], [1, 2, 3], [4, 5, 6, 7, 8]]
    other = table(tmp_path / "other", [2], [0, 1])
    both = merge([tmp_path / "right", other], tmp_path / "both")
    assert [both.document(i).tolist() for i in range(4)] == [[], [1, 2, 3], [4, 5, 6, 7, 8], [1, 2]]
    table(tmp_path / "wrong", lengths, wrong)
    for attempt in (IndexedDataset, lambda p: merge([p, other], tmp_path / "out")):
        with pytest.raises(
            ValueError, match="wrong.idx: document indices must rise from 0 to the 6 sequences"
        ) as error:
            attempt(tmp_path / "wrong")
        one_line(error)
    assert not (tmp_path / "out.idx").exists()


def patched(prefix: Path, at: int, raw: bytes) -> Path:
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    data[at : at + len(raw)] = raw
    path.write_bytes(data)
    return prefix


@pytest.mark.parametrize(
    ("at", "raw", "said"),
    [
        (34 + 4 * 3 + 16, struct.pack("<q", 2**63 - 2), "sequence 2 is at byte 9223372036854775806"),  # + 10 wraps
        (34 + 4 * 3, struct.pack("<q", 8), "sequence 1 begins at byte 6, before the one ahead"),
        (34 + 4 * 3 + 16, struct.pack("<q", 2), "sequence 2 begins at byte 2, before"),
        (34, struct.pack("<i", 2**31 - 1), "sequence 0 is at byte 0 with 2147483647 tokens"),
        (18, struct.pack("<Q", 2**63), "is truncated"),
        (26, struct.pack("<Q", 2**64 - 1), "is truncated"),
        (26, struct.pack("<Q", 3), "sequences and 3 document indices only"),
    ],
)
def test_an_index_whose_offsets_lie_is_refused(tmp_path, at, raw, said):
    table(tmp_path / "d", [3, 2, 5], [0, 1, 2, 3])
    with pytest.raises(ValueError, match=said) as error:
        IndexedDataset(patched(tmp_path / "d", at, raw))
    assert "d.idx" in one_line(error) or "d.bin" in one_line(error)


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path):
    table(tmp_path / "d", [8], [0, 1], np.int32)
    np.array([1, 2, -3, 4, 5, 6, 7, 8], np.int32).tofile(tmp_path / "d.bin")
    with pytest.raises(ValueError, match="d.bin holds token id -3; ids count from 0"):
        check_vocabulary(GPTDataset(tmp_path / "d", 3), 100)
    with pytest.raises(ValueError, match="d.bin: token 2 has id -3"):
        GPTDataset(tmp_path / "d", 3).pair(0)
    assert GPTDataset(tmp_path / "d", 3, vocab_size=8).pair(1)[0].tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match="d.bin: token 6 has id 7, and the vocabulary has ids from 0 to 5"):
        GPTDataset(tmp_path / "d", 3, vocab_size=6).pair(1)


@pytest.mark.parametrize(
    "spoilt",
    [
        "[" * 100_000, '{"tokens": 1e999}', "NaN", "null", '{"tokens": true}', '{"largest_token_id": "9"}',
        '{"largest_token_id": 1e3}', '{"largest_token_id": 99999999999999999999999}', '{"largest_token_id": -7}',
        '{"vocab_size": []}', '{"vocab_size": 0}', '{"source_hash": {}}', '{"eod_id": Infinity}', '{"tokens": -1}',
    ],
)  # fmt: skip
def test_a_sidecar_of_other_types_is_refused(tmp_path, spoilt):
    with IndexedWriter(tmp_path / "train", np.uint16) as writer:
        writer.add_document(np.arange(9))
        writer.commit({"vocab_size": 10})
    right = json.loads((tmp_path / "train.json").read_text())
    assert IndexedDataset(tmp_path / "train").meta == right
    if spoilt.startswith("{"):
        given = json.loads(spoilt, parse_constant=lambda _: 10**400)
        spoilt = json.dumps({**right, **given}).replace(str(10**400), "Infinity").replace("inf", "1e999")
    (tmp_path / "train.json").write_text(spoilt)
    with pytest.raises(ValueError, match="train.json.*not a sidecar of megacore; delete it or prepare again") as error:
        _ = IndexedDataset(tmp_path / "train").meta
    one_line(error)


def test_fifos_in_place_of_data_are_refused(tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        table(folder / "train", [9], [0, 1])
        (folder / f"train{suffix}").unlink(missing_ok=True)
        os.mkfifo(folder / f"train{suffix}")
        with pytest.raises((ValueError, OSError), match="not a regular file but a FIFO"):
            _ = IndexedDataset(folder / "train").meta
    with pytest.raises(ValueError, match="model.vocab_size=0 asks .*train.json cannot be read .not a regular file"):
        with_vocabulary(Settings(data=DataSettings(dir=str(tmp_path / "json"))))
