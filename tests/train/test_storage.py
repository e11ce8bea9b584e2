"""The storage layer: files that others can read, and what the writer refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.record import Box, ParamRecord
from megacore.train import checkpoint, manifest, storage
from megacore.train.agreement import CheckpointError, by_first, reason, together
from megacore.train.logical import LogicalTensor


def part(name, shape, ranges, local=None, first=True, tie_first=True, fill=1.0):
    """A tensor with one box."""
    sizes = tuple(b - a for a, b in ranges)
    local = tuple((0, n) for n in sizes) if local is None else local
    record = ParamRecord(name, shape, sizes, (Box(tuple(ranges), local, first),), tie_first=tie_first)
    return LogicalTensor(record, torch.full(sizes, fill))


def test_files_are_plain_json_and_safetensors(tmp_path):
    tensors = {
        "model/w": LogicalTensor.whole("w", torch.arange(6.0).view(2, 3)),
        "model/step": LogicalTensor.whole("step", torch.tensor(2**40)),
    }
    path = checkpoint.save(tmp_path, 3, tensors, {"seed": 1})
    body = json.loads((path / "metadata.json").read_text())
    assert (body["format"], body["version"], body["step"], body["extra"]) == ("megacore checkpoint", 1, 3, {"seed": 1})
    assert body["tensors"]["model/w"]["shape"] == [2, 3] and body["tensors"]["model/step"]["dtype"] == "int64"
    stored = load_file(path / "rank-00000-0.safetensors")  # safetensors' own reader; a whole tensor bears its name
    assert torch.equal(stored["model/w"], torch.arange(6.0).view(2, 3)) and stored["model/step"].item() == 2**40
    assert body["files"] == {p.name: p.stat().st_size for p in path.glob("*.safetensors")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    want = torch.randn(3, 5).mul(3).to(dtype)
    checkpoint.save(tmp_path, 1, {"model/w": LogicalTensor.whole("w", want)}, {})
    got = torch.zeros_like(want)
    checkpoint.load(checkpoint.find(tmp_path), {"model/w": LogicalTensor.whole("w", got)})
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_a_tensor_without_elements_is_there(tmp_path):
    checkpoint.save(tmp_path, 1, {"model/w": LogicalTensor.whole("w", torch.zeros(0, 4))}, {})
    assert checkpoint.read_full(checkpoint.find(tmp_path))["model/w"].shape == (0, 4)


def test_parameters_that_need_gradients_are_loaded_in_place(tmp_path):
    param = torch.nn.Parameter(torch.ones(2, 2))
    checkpoint.save(tmp_path, 1, {"model/w": LogicalTensor.whole("w", param)}, {})
    with torch.no_grad():
        param.zero_()
    checkpoint.load(checkpoint.find(tmp_path), {"model/w": LogicalTensor.whole("w", param)})
    assert torch.equal(param, torch.ones(2, 2)) and param.requires_grad


def test_memory_is_bounded_by_cutting_files(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 64)
    tensors = {
        f"model/{n}": LogicalTensor.whole(n, torch.full((8,), i + 0.5)) for i, n in enumerate("abcde")
    }  # 32 bytes each
    tensors["model/large"] = LogicalTensor.whole("large", torch.ones(100))
    path = checkpoint.save(tmp_path, 1, tensors, {})
    held = [sum(t.numel() * 4 for t in load_file(f).values()) for f in path.glob("*.safetensors")]
    assert sorted(held) == [32, 64, 64, 400]
    full = checkpoint.read_full(checkpoint.find(tmp_path))
    assert all(torch.equal(full[name], t.local) for name, t in tensors.items())


@pytest.mark.parametrize(
    "tensor, says",
    [
        (part("w", (4,), [(0, 3)]), "model/w: 3 of 4 elements are written; its records do not cover it"),
        (part("w", (4,), [(0, 4)], first=False), "no rank writes model/w"),
        (part("w", (4,), [(0, 4)], tie_first=False), "no rank writes model/w"),
    ],
)
def test_a_tensor_that_the_ranks_do_not_cover_is_refused(tmp_path, tensor, says):
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path, 1, {"model/w": tensor}, {})
    assert says in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []  # neither a checkpoint nor a leftover


def test_boxes_that_overlap_are_refused(tmp_path):
    boxes = (Box(((0, 3),), ((0, 3),)), Box(((2, 4),), ((3, 5),)))
    tensor = LogicalTensor(ParamRecord("w", (4,), (5,), boxes), torch.zeros(5))
    with pytest.raises(CheckpointError, match="overlapping"):
        checkpoint.save(tmp_path, 1, {"model/w": tensor}, {})


def test_metadata_that_was_edited_does_not_match_its_checksum(tmp_path):
    head = {"format": manifest.FORMAT, "version": manifest.VERSION, "step": 1, "files": {}, "tensors": {}}
    manifest.write_metadata(tmp_path, head | {"extra": {"loss": 0.1}})
    assert manifest.read_metadata(tmp_path)["extra"] == {"loss": 0.1}
    file = tmp_path / "metadata.json"
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(CheckpointError, match="corrupt: .*metadata.json does not match its checksum"):
        manifest.read_metadata(tmp_path)


# one outcome for all


def agree_or_not(group_of, failing):
    group = Mesh.build(Layout(dp=group_of)).world

    def act():
        if group.index in failing:
            raise OSError(28, "No space left\non device")
        return group.index * 10

    said = []
    for call in (together, by_first):
        try:
            said.append(call(group, "cannot act", act))
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_what_one_rank_cannot_do_no_rank_has_done(pool):
    assert pool.run(agree_or_not, 3, (), world=3) == [[[0, 10, 20], 0]] * 3
    late = "cannot act: rank 1: OSError: [Errno 28] No space left on device"
    assert pool.run(agree_or_not, 3, (1, 2), world=3) == [[late, 0]] * 3
    first = "cannot act: rank 0: OSError: [Errno 28] No space left on device"
    assert pool.run(agree_or_not, 3, (0,), world=3) == [[first, first]] * 3
    assert pool.run(agree_or_not, 1, (0,), world=1) == [[first.replace("rank 0: ", "")] * 2]


def test_a_reason_is_one_line():
    assert reason(ValueError("a\n  b")) == "a b"
    assert reason(KeyError()) == "KeyError: KeyError"
