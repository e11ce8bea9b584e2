"""A manifest that is sealed and wrong: its checksum matches, and what it says would leave memory as it was found."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import product

import pytest
import torch

from megacore.comm.mesh import Layout
from megacore.train import checkpoint, manifest
from megacore.train.agreement import CheckpointError
from megacore.train.coverage import overlap
from megacore.train.logical import LogicalTensor
from tests.train import sharded_model as sm
from tests.train.checkpoint_tasks import save_step

QKV = "model/blocks.0.qkv.weight"  # six chunks of (3, 6), of two ranks


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sealed")
    pool.run(save_step, folder, Layout(tp=2), world=2)
    return folder / "step-00000010"


def chunk(body, number=1):
    return body["tensors"][QKV]["chunks"][number]


def drop(body):
    del body["tensors"][QKV]["chunks"][2]


def drop_all(body):
    body["tensors"][QKV]["chunks"] = []


def move(body):
    chunk(body)["offsets"] = [1, 0]


def swap(body):  # every element is covered; two chunks stand in each other's place
    a, b = chunk(body, 0), chunk(body, 1)
    a["offsets"], b["offsets"] = b["offsets"], a["offsets"]


def repeat(body):
    body["tensors"][QKV]["chunks"][2] = deepcopy(chunk(body, 0))


def put(key, value):
    def change(body):
        chunk(body)[key] = value

    return change


def without(key):
    def change(body):
        del chunk(body)[key]

    return change


def tensor(key, value):
    def change(body):
        body["tensors"][QKV][key] = value

    return change


def top(key, value):
    def change(body):
        body[key] = value

    return change


def shrink_file(body):
    body["files"][chunk(body)["file"]] = 8


FAULTS = {
    "left out": (drop, "its chunks hold 90 of 108 elements; the rest is in no chunk"),
    "none": (drop_all, "its chunks hold 0 of 108 elements"),
    "moved": (move, "is not that of offsets (1, 0)"),
    "swapped": (swap, "is not that of offsets"),
    "twice": (repeat, "both hold some of its elements"),
    "negative": (put("offsets", [-3, 0]), "offsets=[-3, 0]"),
    "huge offset": (put("offsets", [2**62, 0]), "reach outside of shape (18, 6)"),
    "past 64 bits": (put("offsets", [2**64, 0]), "are no place in shape"),
    "too large": (put("sizes", [30, 6]), "reach outside of shape (18, 6)"),
    "empty": (put("sizes", [0, 6]), "sizes=(0, 6) is empty"),
    "rank": (put("sizes", [18]), "are no place in shape (18, 6)"),
    "float": (put("sizes", [3.0, 6]), "are no place in shape"),
    "true": (put("offsets", [True, 0]), "are no place in shape"),
    "other file": (put("file", "rank-00009-0.safetensors"), "is not among the checkpoint's files"),
    "path": (put("file", "../x.safetensors"), "is not among the checkpoint's files"),
    "other key": (put("key", "model/scale"), "key='model/scale'"),
    "digest": (put("blake2b", None), "blake2b=None is no digest"),
    "no key": (without("key"), "is not blake2b, file, key, offsets, sizes"),
    "no offsets": (without("offsets"), "is not blake2b, file, key, offsets, sizes"),
    "chunk": (tensor("chunks", [7]), "chunk 0: 7 is not"),
    "chunks": (tensor("chunks", {}), "chunks={} is no list"),
    "shape": (tensor("shape", [18, -6]), "shape=[18, -6] is no shape"),
    "huge shape": (tensor("shape", [2**40, 2**40]), "is no shape"),
    "larger shape": (tensor("shape", [19, 6]), "elements; the rest is in no chunk"),
    "smaller shape": (tensor("shape", [17, 6]), "reach outside of shape (17, 6)"),
    "dtype": (tensor("dtype", "load"), "dtype='load' is unknown"),
    "entry": (lambda body: body["tensors"].update({QKV: []}), "[] is not a dtype, a shape and chunks"),
    "step": (top("step", -1), "step=-1 is negative"),
    "step true": (top("step", True), "step=True is no int"),
    "extra": (top("extra", []), "extra=[] is no dict"),
    "tensors": (lambda body: body.pop("tensors"), "tensors is missing"),
    "files": (top("files", {"../a.safetensors": 1}), "is no plain name"),
    "bytes": (shrink_file, "bytes of chunks in 8"),
}
ABOVE = {"step", "step true", "extra", "tensors", "files", "bytes"}  # of the whole, not of one tensor


def forge(saved, folder, change):
    """A copy of the checkpoint whose manifest was changed and sealed again."""
    path = folder / saved.name
    path.mkdir()
    for file in saved.glob("*.safetensors"):
        (path / file.name).hardlink_to(file)
    body = json.loads((saved / "metadata.json").read_text())
    change(body)
    manifest.write_metadata(path, body)
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_a_sealed_manifest_that_is_wrong_is_refused_before_anything_is_read(saved, tmp_path, name):
    change, says = FAULTS[name]
    path = forge(saved, tmp_path, change)
    for verify in (True, False):
        with pytest.raises(CheckpointError) as error:
            checkpoint.find(tmp_path, verify=verify)
        text = str(error.value)
        assert says in text and str(path / "metadata.json") in text and "\n" not in text and len(text) < 700
        assert (QKV in text) == (name not in ABOVE), text


def test_what_was_not_changed_passes(saved, tmp_path):
    forge(saved, tmp_path, lambda body: None)
    found = checkpoint.find(tmp_path)
    assert sm.same_bits(checkpoint.read_full(found)[QKV], sm.full("model", QKV.removeprefix("model/")))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_a_dtype_that_the_file_does_not_have(saved, tmp_path, dtype):
    """Of the same size or another: the file's own header is what counts."""
    path = forge(saved, tmp_path, tensor("dtype", dtype))
    with pytest.raises(CheckpointError, match=rf"{QKV}@0,0 is \(3, 6\) torch.bfloat16, its manifest says|bytes of"):
        checkpoint.find(tmp_path)
    if dtype == "float16":
        found = checkpoint.read(path, verify=False)
        with pytest.raises(CheckpointError, match="its manifest says"):
            checkpoint.read_full(found, [QKV])


def test_a_huge_tensor_asks_for_no_memory(saved, tmp_path):
    """Whole and covered, by a file that is said to be as large: refused by the file's size, not by the allocator."""

    def huge(body):
        n = 2**40
        one = {"offsets": [0], "sizes": [n], "file": "rank-00000-0.safetensors", "key": QKV, "blake2b": "0" * 32}
        body["files"][one["file"]] = 2**50
        body["tensors"][QKV] = {"dtype": "float32", "shape": [n], "chunks": [one]}

    found = checkpoint.read(forge(saved, tmp_path, huge), verify=False)
    with pytest.raises(CheckpointError, match=f"bytes, {2**50} were written"):
        checkpoint.read_full(found, [QKV])


def test_a_manifest_that_is_nested_without_end_is_one_line(saved, tmp_path):
    path = forge(saved, tmp_path, lambda body: None)
    (path / "metadata.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="RecursionError"):
        checkpoint.find(tmp_path)


def test_a_copy_under_another_steps_name_is_not_that_step(saved, tmp_path):
    forge(saved, tmp_path, lambda body: None)
    (tmp_path / "step-00000030").mkdir()
    for file in (tmp_path / saved.name).iterdir():
        (tmp_path / "step-00000030" / file.name).hardlink_to(file)
    found = checkpoint.find(tmp_path)
    assert found.step == 10 and found.path.name == saved.name
    assert "step-00000030 holds step 10; rename it to step-00000010" in found.skipped[0]


# boxes


def count(boxes, shape):
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        seen[tuple(slice(a, b) for a, b in box)] += 1
    return seen


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_overlap_is_what_counting_says(dims):
    draw, outcomes = torch.Generator().manual_seed(dims), set()
    for _ in range(400):
        boxes = []
        for _ in range(int(torch.randint(1, 5, (), generator=draw))):
            ends = torch.randint(0, 6, (dims, 2), generator=draw).sort(dim=1).values.tolist()
            boxes.append(tuple((a, max(b, a + 1)) for a, b in ends))
        found = overlap(boxes)
        assert (found is not None) == bool((count(boxes, (7,) * dims) > 1).any()), boxes
        if found is not None:
            a, b = found
            assert a != b and all(p < s and r < q for (p, q), (r, s) in zip(boxes[a], boxes[b], strict=True))
        outcomes.add(found is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("columns", [1, 80])
def test_many_boxes_take_no_time(columns):
    """20,000 boxes in a row, and a grid of 80 x 80: a comparison of all pairs would take minutes."""
    rows = 20_000 if columns == 1 else 80
    boxes = [((r, r + 1), (c, c + 1)) for r, c in product(range(rows), range(columns))]
    assert overlap(boxes) is None
    assert overlap([*boxes, ((rows - 1, rows), (columns - 1, columns))]) is not None


def test_a_tensor_without_elements_and_a_scalar(tmp_path):
    tensors = {"model/none": torch.zeros(0, 4), "model/one": torch.tensor(3.0)}
    checkpoint.save(tmp_path, 1, {n: LogicalTensor.whole(n, t) for n, t in tensors.items()}, {})
    full = checkpoint.read_full(checkpoint.find(tmp_path))
    assert full["model/none"].shape == (0, 4) and full["model/one"].item() == 3.0
