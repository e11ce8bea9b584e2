"""Text to tokens: what is read, what is left out, what is held out; the same bytes whatever the file system's order."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megacore.train.data import GPTDataset, IndexedDataset, check_vocabulary, prepare
from megacore.train.data import tokenizer as bpe
from megacore.train.data.tokenizer import END_OF_TEXT

ROOT = Path(__file__).parents[3]
TEXTS = {f"dir{i % 3}/file{i:02}.py": f"def f{i}(x):\n    return x + {i}\n" * (i + 1) for i in range(30)}
NAMES = [f"{side}{suffix}" for side in ("train", "valid") for suffix in (".bin", ".idx", ".json")] + ["tokenizer.json"]


def tree(root, texts=None):
    for name, text in (texts or TEXTS).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def read(out, side):
    """Documents of one side as text, each without its end."""
    data, tokenizer = IndexedDataset(out / side), bpe.load(out / "tokenizer.json")
    ids = [data.document(i).tolist() for i in range(data.num_documents)]
    assert all(d[-1] == data.meta["eod_id"] and data.meta["eod_id"] not in d[:-1] for d in ids)
    return [tokenizer.decode(d[:-1], skip_special_tokens=False) for d in ids]


def test_every_document_comes_back_exactly_once(tmp_path):
    report = prepare([tree(tmp_path / "in")], tmp_path / "out", vocab_size=300, valid_fraction=0.2)
    train, valid = read(tmp_path / "out", "train"), read(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted(TEXTS.values()) and len(valid) > 0
    assert (report.train_documents, report.valid_documents, report.files) == (len(train), len(valid), 30)
    assert report.characters == sum(map(len, TEXTS.values())) and report.skipped == {}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(NAMES)


def test_sidecar_records_what_training_must_know(tmp_path):
    report = prepare([tree(tmp_path / "in")], tmp_path / "out", vocab_size=300, seed=3)
    data = IndexedDataset(tmp_path / "out/train")
    tokens = np.concatenate([data[i] for i in range(len(data))])
    assert data.meta["largest_token_id"] == tokens.max() == data.largest_token_id < report.vocab_size <= 300
    assert (data.meta["tokens"], data.meta["documents"]) == (len(tokens), len(data)) == (report.train_tokens, len(data))
    assert data.meta["vocab_size"] == report.vocab_size and data.meta["tokenizer"] == "tokenizer.json"
    assert data.meta["source_hash"] == IndexedDataset(tmp_path / "out/valid").meta["source_hash"]
    assert data.dtype == np.uint16 and (data.meta["seed"], data.meta["split"]) == (3, "train")
    check_vocabulary(GPTDataset(data, 8), report.vocab_size)


def bytes_of(out):
    return {p.name: p.read_bytes() for p in out.iterdir()}


def test_output_does_not_depend_on_the_file_systems_order_or_place(tmp_path, monkeypatch):
    prepare([tree(tmp_path / "a")], tmp_path / "out1", vocab_size=400)
    tree(tmp_path / "elsewhere/b", dict(reversed(TEXTS.items())))
    walk = os.walk

    def backwards(root):
        for directory, names, leaves in walk(root):
            names.sort(reverse=True)
            yield directory, names, sorted(leaves, reverse=True)

    monkeypatch.setattr("megacore.train.data.sources.os.walk", backwards)
    prepare([tmp_path / "elsewhere/b"], tmp_path / "out2", vocab_size=400)
    assert bytes_of(tmp_path / "out1") == bytes_of(tmp_path / "out2")
    prepare([tmp_path / "a"], tmp_path / "out3", vocab_size=400, seed=1)
    assert read(tmp_path / "out1", "valid") != read(tmp_path / "out3", "valid"), "the seed does not move the split"


def test_the_split_of_a_text_does_not_depend_on_its_neighbours(tmp_path):
    tree(tmp_path / "in")
    prepare([tmp_path / "in"], tmp_path / "out", vocab_size=300, valid_fraction=0.3)
    tree(tmp_path / "in", {"dir0/new.py": "print('new')\n", "copy/of.py": TEXTS["dir0/file00.py"]})
    prepare([tmp_path / "in"], tmp_path / "more", vocab_size=300, valid_fraction=0.3)
    assert set(read(tmp_path / "out", "valid")) <= set(read(tmp_path / "more", "valid"))
    assert not set(read(tmp_path / "more", "valid")) & set(read(tmp_path / "more", "train")), "a copy was split off"


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_few_documents_leave_neither_side_empty(tmp_path, count, fraction):
    texts = {f"{i}.txt": f"text number {i}\n" for i in range(count)}
    prepare([tree(tmp_path / "in", texts)], tmp_path / "out", vocab_size=257, valid_fraction=fraction)
    train, valid = read(tmp_path / "out", "train"), read(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted(texts.values()) and train and valid


def test_one_file_is_cut_at_a_line_and_its_tail_held_out(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    prepare([tree(tmp_path / "in", {"all.txt": text})], tmp_path / "out", vocab_size=300, valid_fraction=0.1)
    (train,), (valid,) = read(tmp_path / "out", "train"), read(tmp_path / "out", "valid")
    assert train + valid == text and valid.startswith("line ") and 0.08 < len(valid) / len(text) <= 0.1


def test_nothing_held_out(tmp_path):
    tree(tmp_path / "in")
    prepare([tmp_path / "in"], tmp_path / "out", vocab_size=300)
    report = prepare([tmp_path / "in"], tmp_path / "out", vocab_size=300, valid_fraction=0)
    assert report.valid_documents == 0 and sorted(read(tmp_path / "out", "train")) == sorted(TEXTS.values())
    assert not list((tmp_path / "out").glob("valid*")), "held-out files of the earlier run stand beside the new ones"


def test_json_lines(tmp_path):
    lines = [json.dumps({"body": f"héllo {i}\n\nwörld", "n": i}) for i in range(20)]
    lines += ["", "not json", '{"other": 1}', "[1]", '{"body": 3}', '{"body": " "}', '{"body": "\\ud800"}']
    tree(tmp_path, {"x.jsonl": "\n".join(lines)})
    report = prepare([tmp_path / "x.jsonl"], tmp_path / "out", vocab_size=280, jsonl_key="body")
    got = read(tmp_path / "out", "train") + read(tmp_path / "out", "valid")
    assert sorted(got) == sorted(f"héllo {i}\n\nwörld" for i in range(20))
    assert report.skipped == {
        "lines that are not JSON": 1,
        "lines without a text under key 'body'": 3,
        "empty": 1,
        "lines with half a surrogate pair": 1,
    }
    assert report.examples["lines that are not JSON"] == [f"{tmp_path}/x.jsonl:22"]


def test_what_is_left_out_of_a_tree_is_counted(tmp_path):
    root = tree(tmp_path / "in", {"a.py": "x = 1\n", "b.TXT": "text\n", "c.dat": "data"})
    tree(root, {"bin.py": b"a\0b", "latin.py": "é".encode("latin-1"), "void.py": "\n", "__pycache__/d.py": "y"})
    tree(root, {".git/e.py": "z", "bom.md": b"\xef\xbb\xbfmarked\r\n"})
    (root / "gone.py").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    report = prepare([root, root / "a.py", root / "c.dat"], tmp_path / "out", vocab_size=257, valid_fraction=0)
    assert sorted(read(tmp_path / "out", "train")) == ["data", "marked\r\n", "text\n", "x = 1\n"]
    assert (report.files, report.files_skipped) == (4, 4)
    assert report.skipped == {
        "of another suffix": 1,
        "excluded directories": 2,
        "links to directories": 1,
        "given twice": 1,
        "binary": 1,
        "not UTF-8 text": 1,
        "empty": 1,
        "unreadable: No such file or directory": 1,
    }


def test_end_of_text_inside_a_text_is_text(tmp_path):
    texts = {"a.txt": f"one {END_OF_TEXT} two", "b.txt": f"{END_OF_TEXT}three"}
    prepare([tree(tmp_path / "in", texts)], tmp_path / "out", vocab_size=300, valid_fraction=0.5)
    assert sorted(read(tmp_path / "out", "train") + read(tmp_path / "out", "valid")) == sorted(texts.values())


def test_given_tokenizer_is_used_and_kept(tmp_path):
    prepare([tree(tmp_path / "in")], tmp_path / "one", vocab_size=350)
    mine = tmp_path / "mine.json"
    shutil.copy(tmp_path / "one/tokenizer.json", mine)
    other = tree(tmp_path / "other", {"a.txt": "entirely different text\n", "b.txt": "more of it\n"})
    report = prepare([other], tmp_path / "two", tokenizer=mine, vocab_size=5)
    assert (tmp_path / "two/tokenizer.json").read_bytes() == mine.read_bytes()
    assert report.vocab_size == IndexedDataset(tmp_path / "one/train").meta["vocab_size"] > 257
    assert sorted(read(tmp_path / "two", "train") + read(tmp_path / "two", "valid"))[0] == "entirely different text\n"
    prepare([tmp_path / "in"], tmp_path / "again", tokenizer=tmp_path / "one/tokenizer.json")
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "one")


def test_long_documents_have_the_tokens_of_one_piece(tmp_path, monkeypatch):
    text = "".join(f"def f{i}():\n\n    a = 1\n    return  {i}\nf{i}()\ny = {i}\n \n" for i in range(200))
    tokenizer = bpe.train([text], 400)
    whole = bpe.encode(tokenizer, [text])[0].tolist()
    monkeypatch.setattr(bpe, "BATCH", 300)
    assert len(list(bpe.pieces(text))) > 10 and "".join(p for p, _ in bpe.pieces(text)) == text
    texts = [("train", text), ("valid", "short"), ("train", ""), ("train", text)]
    got = list(bpe.encode_documents(tokenizer, texts, end=0))
    assert [(side, n) for side, _, n in got] == [(side, len(t)) for side, t in texts]
    assert [ids.tolist() for _, ids, _ in got] == [
        [*whole, 0],
        [*bpe.encode(tokenizer, ["short"])[0], 0],
        [0],
        [*whole, 0],
    ]
    unbroken = "wörd" * 500  # no line to cut at: cut anywhere, nothing lost
    ((_, ids, _),) = bpe.encode_documents(tokenizer, [("train", unbroken)], end=0)
    assert tokenizer.decode(ids.tolist()[:-1]) == unbroken and len(list(bpe.pieces(unbroken))) > 3


def test_progress_reaches_the_end_of_each_phase(tmp_path):
    seen = {}
    prepare([tree(tmp_path / "in")], tmp_path / "out", vocab_size=300, progress=lambda *a: seen.update({a[0]: a[1:]}))
    assert list(seen) == ["read", "tokenizer", "encode"] and seen["read"][0] == seen["read"][1]
    assert seen["encode"][0] == seen["encode"][1] == sum(map(len, TEXTS.values()))


KILLED = """
import os, signal, sys
from megacore.train.data import prepare
def die(phase, done, total):
    if phase == "encode" and done * 2 > total:
        os.kill(os.getpid(), signal.SIGKILL)
prepare([sys.argv[1]], sys.argv[2], vocab_size=300, progress=die)
"""


@pytest.mark.parametrize("before", [False, True])
def test_a_killed_prepare_leaves_no_half_file_under_a_final_name(tmp_path, before):
    tree(tmp_path / "in")
    out = tmp_path / "out"
    if before:
        prepare([tmp_path / "in"], out, vocab_size=260)
    kept = bytes_of(out) if before else {}
    argv = [sys.executable, "-c", KILLED, str(tmp_path / "in"), str(out)]
    run = subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert run.returncode == -9, run.stderr.decode()
    assert {n: b for n, b in bytes_of(out).items() if not n.endswith(".partial")} == kept
    prepare([tmp_path / "in"], out, vocab_size=300)
    assert sorted(p.name for p in out.iterdir()) == sorted(NAMES)
    assert sorted(read(out, "train") + read(out, "valid")) == sorted(TEXTS.values())


def test_inputs_that_change_meanwhile_are_refused(tmp_path):
    root = tree(tmp_path / "in")

    def grow(phase, done, total):
        if phase == "tokenizer":
            (root / "dir0/file00.py").write_text("longer than before " * 50)

    with pytest.raises(ValueError, match="changed while they were read"):
        prepare([root], tmp_path / "out", vocab_size=300, progress=grow)
    assert list((tmp_path / "out").iterdir()) == []


def test_refusals(tmp_path):
    root, out = tree(tmp_path / "in", {"a.cfg": "x", "x.jsonl": '{"content": "x"}'}), tmp_path / "out"
    cases = [
        (dict(vocab_size=256), ValueError, "vocab_size=256 cannot hold"),
        (dict(valid_fraction=1.0), ValueError, "valid_fraction=1.0 is not in"),
        (dict(tokenizer=tmp_path / "no.json"), FileNotFoundError, "no.json is missing"),
        (dict(tokenizer=root / "a.cfg"), ValueError, "a.cfg cannot be read"),
        (dict(suffixes=["py"]), ValueError, "no text in .* 2 of another suffix"),
        (dict(), ValueError, r"lines without a text under key 'text' \(.*x.jsonl:1 has content\)"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message) as error:
            prepare([root], out, **arguments)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        prepare([tmp_path / "nowhere"], out)
    with pytest.raises(ValueError, match="no text in no inputs"):
        prepare([], out)
    with pytest.raises(ValueError, match="to end a document with"):
        bpe.end_of_document(__import__("tokenizers").Tokenizer(__import__("tokenizers").models.BPE()))
    assert not out.exists()
