"""Checkpoints between layouts and models, and the directory they live in. Damage: test_torn_checkpoints."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

from megacore.comm.mesh import Layout, Mesh
from megacore.train import checkpoint, manifest
from megacore.train.agreement import CheckpointError
from megacore.train.logical import LogicalTensor, describe
from tests.train import sharded_model as sm
from tests.train.checkpoint_tasks import EXTRA, TWO, load_error, load_newest, save_step

ONE = Layout()
LAYOUTS = [
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=4, dp=2),
    Layout(pp=4),
    Layout(tp=8),  # ranks without a column of `out`, and without a row of the vocabulary
    Layout(tp=3, pp=2),
    ONE,
]


def ident(layout):
    return f"tp{layout.tp}pp{layout.pp}dp{layout.dp}"


def shared_error(directories):
    mesh = Mesh.build(Layout(dp=len(directories)))
    try:
        checkpoint.check_shared(directories[mesh.rank], mesh.world, wait=0.3)
    except CheckpointError as error:
        return str(error)


def save_error(directory, layout):
    try:
        save_step(directory, layout)
    except CheckpointError as error:
        return str(error)


def find_error_where_one_is_blind(directory, layout, blind):
    mesh = Mesh.build(layout)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == blind:
            patch.setattr(checkpoint, "read_metadata", lambda path: manifest.read_metadata(path / "elsewhere"))
        try:
            checkpoint.find(directory, group=mesh.world)
        except CheckpointError as error:
            return str(error)


# any layout to any other


@pytest.mark.parametrize("writer", LAYOUTS, ids=ident)
def test_any_layout_loads_any_other_bit_for_bit(pool, tmp_path, writer):
    path = set(pool.run(save_step, tmp_path, writer, world=writer.world))
    assert path == {str(tmp_path / "step-00000010")}
    for reader in LAYOUTS:
        answers = pool.run(load_newest, tmp_path, reader, world=reader.world)
        assert answers == [(10, EXTRA, [], ())] * reader.world, ident(reader)


@pytest.mark.parametrize("writer", [LAYOUTS[0], LAYOUTS[1]], ids=ident)
def test_one_process_reads_full_tensors_and_each_is_stored_once(pool, tmp_path, writer):
    pool.run(save_step, tmp_path, writer, world=writer.world)
    found = checkpoint.find(tmp_path)
    want = {f"model/{n}": sm.full("model", n) for n in sm.shapes()}
    want |= {f"optim/{n}/exp_avg": sm.full("optim", n) for n in sm.shapes()}
    got = checkpoint.read_full(found)
    assert got.keys() == want.keys() == found.shapes.keys()  # the tied head is not a parameter of its own
    assert [n for n in want if not sm.same_bits(got[n], want[n])] == []
    stored = sum(t.numel() for f in found.path.glob("*.safetensors") for t in load_file(f).values())
    assert stored == sum(t.numel() for t in want.values())
    assert list(checkpoint.read_full(found, ["model/scale"])) == ["model/scale"]
    with pytest.raises(CheckpointError, match="model/nothing is not in"):
        checkpoint.read_full(found, ["model/nothing"])


def test_replicas_share_out_the_writing(pool, tmp_path):
    pool.run(save_step, tmp_path, Layout(dp=4), world=4)
    sizes = [f.stat().st_size for f in sorted((tmp_path / "step-00000010").glob("*.safetensors"))]
    assert len(sizes) == 4 and max(sizes) < 2 * min(sizes)


def test_a_record_that_does_not_fit_its_tensor_is_refused():
    record = sm.records(TWO, 0)["wte.weight"]
    with pytest.raises(ValueError, match=r"wte.weight: local tensor has shape \(13, 6\), its record says \(7, 6\)"):
        LogicalTensor(record, torch.zeros(13, 6))


def test_describe_uses_the_name_of_the_first_tied_copy():
    recs = sm.records(Layout(pp=2), 1)
    local = {"head.weight": torch.zeros(recs["head.weight"].local_shape)}
    assert list(describe("model", recs, local)) == ["model/wte.weight"]
    assert list(describe("optim", recs, local, "exp_avg")) == ["optim/wte.weight/exp_avg"]


# another model


def _other_vocabulary(tensors, model, rank):
    model["vocab_size"] = 50


def _other_heads(tensors, model, rank):
    model["heads"] = 3


def _other_shape(tensors, model, rank):
    if rank == 1:
        tensors["model/wpe.weight"] = LogicalTensor.whole("wpe.weight", torch.zeros(9, 6, dtype=torch.bfloat16))


def _one_more(tensors, model, rank):
    if rank == 1:
        tensors["model/blocks.4.norm.weight"] = LogicalTensor.whole("blocks.4.norm.weight", torch.zeros(6))


def _one_less(tensors, model, rank):
    del tensors["model/blocks.3.norm.weight"]


def _other_dtype(tensors, model, rank):
    tensors["model/wpe.weight"] = LogicalTensor.whole("wpe.weight", torch.zeros(5, 6))


@pytest.mark.parametrize(
    "change, says",
    [
        (_other_vocabulary, "it has vocab_size=13, this model has vocab_size=50"),
        (_other_heads, "it has heads=2, this model has heads=3"),
        (_other_shape, "it has model/wpe.weight of shape (5, 6), this model has (9, 6)"),
        (_one_more, "it has no model/blocks.4.norm.weight, this model has one of shape (6,)"),
        (_one_less, "it has model/blocks.3.norm.weight of shape (6,), this model has none"),
        (_other_dtype, "it has model/wpe.weight in torch.bfloat16, here it is torch.float32"),
    ],
)
def test_another_model_is_refused_on_every_rank(pool, tmp_path, change, says):
    pool.run(save_step, tmp_path, TWO, world=2)
    messages = pool.run(load_error, tmp_path, TWO, change, world=2)
    assert len(set(messages)) == 1 and says in messages[0] and "\n" not in messages[0]


# the directory


def small(value=0.0):
    return {"model/w": LogicalTensor.whole("w", torch.full((4,), value))}


def test_retention_deletes_the_oldest_after_the_commit(tmp_path):
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, step, small(), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]
    checkpoint.save(tmp_path, 35, small(), {}, keep=1)  # a resume from 30: what it saved must not be the victim
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000035", "step-00000040"]
    with pytest.raises(CheckpointError, match="keep=0 would delete"):
        checkpoint.save(tmp_path, 50, small(), {}, keep=0)


def test_nothing_saved_yet_is_none_and_other_entries_are_left_alone(tmp_path):
    assert checkpoint.find(tmp_path / "absent") is None
    (tmp_path / "step-00000099.txt").write_text("notes")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "step-00000005.saving-abc").mkdir()
    assert checkpoint.find(tmp_path) is None
    checkpoint.save(tmp_path, 1, small(), {}, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000099.txt", "tensorboard"]


def test_each_skipped_checkpoint_has_a_reason(tmp_path):
    checkpoint.save(tmp_path, 10, small(3.0), {"a": 1})
    (tmp_path / "step-00000020").mkdir()
    for step, text in ((30, "{"), (40, json.dumps({"format": "other"})), (50, None)):
        path = checkpoint.save(tmp_path, step, small(), {})
        body = json.loads((path / "metadata.json").read_text())
        (path / "metadata.json").write_text(text or json.dumps(body | {"version": 2}))
    found = checkpoint.find(tmp_path)
    assert (found.step, found.extra) == (10, {"a": 1})
    for line, says in zip(found.skipped, ("version=2", "wrong format", "cannot be read", "unfinished"), strict=True):
        assert says in line and "\n" not in line
    assert checkpoint.find(tmp_path, step=10).skipped == ()
    with pytest.raises(CheckpointError, match="step=11 is not in"):
        checkpoint.find(tmp_path, step=11)
    with pytest.raises(CheckpointError, match="unfinished"):
        checkpoint.find(tmp_path, step=20)


def test_extra_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="extra is not JSON"):
        checkpoint.save(tmp_path, 1, small(), {"device": torch.device("cpu")})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_one_rank_does_not_share_is_refused_on_all(pool, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    assert pool.run(shared_error, [a, a, a], world=3) == [None] * 3
    assert list(a.iterdir()) == []
    for message in pool.run(shared_error, [a, a, b], world=3):
        assert "is not shared: rank 2: it does not see the first rank's file" in message and "\n" not in message


def test_a_directory_that_one_rank_cannot_write_is_refused_on_all(pool, tmp_path):
    (tmp_path / "file").write_text("")
    for at in (0, 1):
        directories = [tmp_path / "a", tmp_path / "a"]
        directories[at] = tmp_path / "file" / "a"
        for message in pool.run(shared_error, directories, world=2):
            assert f"is not writable: rank {at}: NotADirectoryError" in message and "\n" not in message


def test_the_first_rank_cannot_write_the_folder(pool, tmp_path):  # MB-22 c
    (tmp_path / "file").write_text("")
    messages = pool.run(save_error, tmp_path / "file" / "a", TWO, world=2)
    assert len(set(messages)) == 1 and "rank 0: NotADirectoryError" in messages[0] and "\n" not in messages[0]


def test_one_rank_does_not_find_what_the_others_do(pool, tmp_path):  # MB-22 d
    pool.run(save_step, tmp_path, TWO, world=2)
    messages = pool.run(find_error_where_one_is_blind, tmp_path, TWO, 1, world=2)
    assert len(set(messages)) == 1 and "step-00000010: rank 1: unfinished" in messages[0]


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    want = small(2.0)
    checkpoint.save(tmp_path, 1, want, EXTRA)

    def refuse(*args, **kwargs):
        raise AssertionError("a checkpoint was unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    found = checkpoint.find(tmp_path)
    got = small()
    checkpoint.load(found, got, model=EXTRA["model"])
    assert torch.equal(got["model/w"].local, want["model/w"].local)
    assert torch.equal(checkpoint.read_full(found)["model/w"], want["model/w"].local)
    assert {p.suffix for p in found.path.iterdir()} == {".json", ".safetensors"}


def flip(path):
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_corrupt_checkpoint_takes_no_good_ones_place(tmp_path):
    """15 good, 20 corrupt: the run goes on from 15, passes 20, and still keeps two good ones."""
    for step in (15, 20):
        checkpoint.save(tmp_path, step, small(float(step)), {}, keep=2)
    flip(tmp_path / "step-00000020")
    found = checkpoint.find(tmp_path)
    assert found.step == 15
    lines = checkpoint.continue_from(found)
    assert len(lines) == 1 and "step-00000020 is now step-00000020.skipped" in lines[0]
    for step in (18, 22):
        checkpoint.save(tmp_path, step, small(float(step)), {}, keep=2)
    assert names(tmp_path) == ["step-00000018", "step-00000020.skipped", "step-00000022"]
    flip(tmp_path / "step-00000022")
    assert checkpoint.find(tmp_path).step == 18


def test_what_is_later_than_the_step_resumed_from_is_renamed_and_kept(tmp_path):
    for _ in range(2):  # the second time, the name is taken
        checkpoint.save(tmp_path, 10, small(), {})
        checkpoint.save(tmp_path, 30, small(), {})
        checkpoint.continue_from(checkpoint.find(tmp_path, step=10))
    checkpoint.save(tmp_path, 40, small(), {}, keep=1)
    assert names(tmp_path) == ["step-00000030.skipped", "step-00000030.skipped-2", "step-00000040"]
    assert checkpoint.continue_from(checkpoint.find(tmp_path)) == []
