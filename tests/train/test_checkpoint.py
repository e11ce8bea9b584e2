"""Checkpoints between layouts, and what is left when something goes wrong (MB-19)."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megacore.comm.mesh import Layout
from megacore.comm.workers import WorkerError
from megacore.train import checkpoint, commit, storage
from megacore.train.agreement import CheckpointError
from megacore.train.logical import LogicalTensor, describe
from tests.train import sharded_model as sm

ONE = Layout()
TWO = Layout(tp=2)
LAYOUTS = [
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=4, dp=2),
    Layout(pp=4),
    Layout(tp=8),  # ranks without a column of `out`, and without a row of the vocabulary
    Layout(tp=3, pp=2),
    ONE,
]
EXTRA = {"step": 10, "tokens": 4096, "model": {"name": "gpt", "heads": 2, "vocab_size": sm.VOCAB}}


def ident(layout):
    return f"tp{layout.tp}pp{layout.pp}dp{layout.dp}"


# tasks of the workers


def save_step(directory, layout, step=10, salt=0, keep=None):
    mesh, rank = sm.mesh_of(layout)
    tensors = sm.logical(layout, rank, True, salt)
    return str(
        checkpoint.save(directory, step, tensors, EXTRA, group=mesh.world, replicas=mesh.dp_cp, keep=keep)
    )


def load_newest(directory, layout, salt=0):
    """The step that was loaded, and the names of the tensors that are not what they should be."""
    mesh, rank = sm.mesh_of(layout)
    found = checkpoint.find(directory, group=mesh.world)
    tensors = sm.logical(layout, rank, False)
    checkpoint.load(found, tensors, group=mesh.world, model=EXTRA["model"])
    want = sm.logical(layout, rank, True, salt)
    wrong = [name for name in want if not sm.same_bits(tensors[name].local, want[name].local)]
    return found.step, found.extra, wrong, found.skipped


def load_error(directory, layout, change=None, verify=False):
    """What loading says on this rank."""
    mesh, rank = sm.mesh_of(layout)
    tensors, model = sm.logical(layout, rank, False), dict(EXTRA["model"])
    if change is not None:
        change(tensors, model, rank)
    try:
        found = checkpoint.find(directory, group=mesh.world, verify=verify)
        checkpoint.load(found, tensors, group=mesh.world, model=model)
    except CheckpointError as error:
        return str(error)


def save_and_die(directory, layout, step, victim, place, salt):
    """SIGKILL of one rank at a place of the save: after its first file, before metadata.json, at the n-th rename."""
    mesh, rank = sm.mesh_of(layout)
    renames = []

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def rename(source, target):
        renames.append(source)
        die() if place == f"rename {len(renames)}" else real_rename(source, target)

    def save_file(*args):
        real_save_file(*args)
        die() if place == "first file" else None

    real_rename, real_save_file = os.rename, storage.save_file
    if rank == victim:
        storage.FILE_BYTES = 256  # several files a rank
        storage.save_file, commit.os.rename = save_file, rename
        if place == "metadata":
            storage.write_metadata = die
    save_step(directory, layout, step, salt)


def save_without_space(directory, layout, step):
    mesh, rank = sm.mesh_of(layout)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        save_step(directory, layout, step)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def shared_error(directories):
    mesh, rank = sm.mesh_of(Layout(dp=len(directories)))
    checkpoint.SHARED_WAIT = 0.3
    try:
        checkpoint.check_shared(directories[rank], mesh.world)
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
    stored = sum(t.numel() for f in found.path.glob("*.safetensors") for t in _open(f).values())
    assert stored == sum(t.numel() for t in want.values())
    assert list(checkpoint.read_full(found, ["model/scale"])) == ["model/scale"]
    with pytest.raises(CheckpointError, match="model/nothing is not in"):
        checkpoint.read_full(found, ["model/nothing"])


def _open(file):
    from safetensors.torch import load_file

    return load_file(file)


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


# MB-19: whole, of one moment, or not there


@pytest.mark.parametrize("victim, place", [(1, "first file"), (0, "metadata"), (0, "rename 1")])
def test_a_save_that_is_killed_leaves_the_older_checkpoint(pool, tmp_path, victim, place):
    pool.run(save_step, tmp_path, TWO, 10, world=2)
    with pytest.raises(WorkerError):
        pool.run(save_and_die, tmp_path, TWO, 20, victim, place, 1, world=2)
    left = [p.name for p in tmp_path.iterdir() if p.name.startswith("step-00000020")]
    assert len(left) == 1 and ".saving-" in left[0]
    for step, _, wrong, skipped in pool.run(load_newest, tmp_path, TWO, world=2):
        assert (step, wrong) == (10, [])
        assert skipped == (f"{tmp_path / left[0]}: unfinished: its save did not end",)
    pool.run(save_step, tmp_path, TWO, 20, 1, world=2)  # no manual repair: the next save clears the leftovers
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    assert pool.run(load_newest, tmp_path, TWO, 1, world=2) == [(20, EXTRA, [], ())] * 2


@pytest.mark.parametrize("victim, place", [(1, "first file"), (0, "rename 1"), (0, "rename 2")])
def test_a_step_saved_again_and_killed_is_the_old_one_whole(pool, tmp_path, victim, place):
    pool.run(save_step, tmp_path, TWO, 10, 5, world=2)
    pool.run(save_step, tmp_path, TWO, 20, 0, world=2)
    with pytest.raises(WorkerError):
        pool.run(save_and_die, tmp_path, TWO, 20, victim, place, 1, world=2)
    assert [a[0::2] for a in pool.run(load_newest, tmp_path, TWO, 0, world=2)] == [(20, [])] * 2
    pool.run(save_step, tmp_path, TWO, 30, 2, world=2)  # restores step 20 where it had stepped aside
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-000000{n}" for n in (10, 20, 30)]
    shutil.rmtree(tmp_path / "step-00000030")
    assert [a[0::2] for a in pool.run(load_newest, tmp_path, TWO, 0, world=2)] == [(20, [])] * 2


def test_a_step_saved_again_is_the_new_one(pool, tmp_path):
    pool.run(save_step, tmp_path, TWO, 20, 0, world=2)
    pool.run(save_step, tmp_path, TWO, 20, 1, world=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000020"]
    assert pool.run(load_newest, tmp_path, TWO, 1, world=2) == [(20, EXTRA, [], ())] * 2


def _truncate(file):
    os.truncate(file, file.stat().st_size - 100)


def _flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=["truncated", "flipped", "deleted"])
@pytest.mark.parametrize("name", ["rank-00001-0.safetensors", "metadata.json"])
def test_a_damaged_file_is_named_and_an_older_checkpoint_serves(pool, tmp_path, damage, name):
    pool.run(save_step, tmp_path, TWO, 10, 1, world=2)
    pool.run(save_step, tmp_path, TWO, 20, 0, world=2)
    bad = tmp_path / "step-00000020" / name
    damage(bad)
    for step, _, wrong, skipped in pool.run(load_newest, tmp_path, TWO, 1, world=2):
        assert (step, wrong) == (10, [])
        assert len(skipped) == 1 and str(bad) in skipped[0] and "\n" not in skipped[0]
    if name != "metadata.json":  # without verifying first, loading itself must see it, on every rank
        for message in pool.run(load_error, tmp_path, TWO, world=2):
            assert message.count(str(bad)) == 1 and "\n" not in message
    shutil.rmtree(tmp_path / "step-00000010")  # nothing left to fall back to: not a fresh start in silence
    for message in pool.run(load_error, tmp_path, TWO, None, True, world=2):
        assert message.startswith(f"no checkpoint in {tmp_path} can be loaded") and str(bad) in message


def test_no_flipped_byte_goes_unseen(tmp_path):
    """Anywhere in any file: found invalid, or (white space in a header) of no consequence."""
    tensors = {"model/w": LogicalTensor.whole("w", torch.randn(5, 3)), "model/b": LogicalTensor.whole("b", torch.ones(2))}
    path = checkpoint.save(tmp_path, 1, tensors, EXTRA)
    rng, unseen = random.Random(0), 0
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for at in rng.sample(range(len(data)), min(len(data), 150)):
            file.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
            try:
                found = checkpoint.find(tmp_path)
            except CheckpointError as error:
                assert str(file) in str(error)
                continue
            unseen += 1
            assert found.extra == EXTRA
            assert all(torch.equal(t, tensors[n].local) for n, t in checkpoint.read_full(found).items())
        file.write_bytes(data)
    assert unseen < 30


def test_no_space_on_one_rank_is_an_error_on_all(pool, tmp_path):
    pool.run(save_step, tmp_path, TWO, 10, world=2)
    for message in pool.run(save_without_space, tmp_path, TWO, 20, world=2):
        assert f"cannot save checkpoint 20 in {tmp_path}: rank 1: cannot write" in message
        assert "rank-00001-0.safetensors" in message and "File too large" in message and "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]
    assert pool.run(load_newest, tmp_path, TWO, world=2) == [(10, EXTRA, [], ())] * 2


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


def test_each_skipped_checkpoint_has_a_reason(tmp_path, caplog):
    checkpoint.save(tmp_path, 10, small(3.0), {"a": 1})
    (tmp_path / "step-00000020").mkdir()
    for step, text in ((30, "{"), (40, json.dumps({"format": "other"})), (50, None)):
        path = checkpoint.save(tmp_path, step, small(), {})
        body = json.loads((path / "metadata.json").read_text())
        (path / "metadata.json").write_text(text or json.dumps(body | {"version": 2}))
    found = checkpoint.find(tmp_path)
    assert (found.step, checkpoint.read_extra(found)) == (10, {"a": 1})
    for line, says in zip(found.skipped, ("version=2", "wrong format", "cannot be read", "unfinished"), strict=True):
        assert says in line and line in caplog.text
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
