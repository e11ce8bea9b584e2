"""MB-19: a checkpoint is whole, of one moment, or not there; and the error that says why."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from megacore.comm.mesh import Mesh
from megacore.comm.workers import WorkerError, WorkerPool
from megacore.train import checkpoint, commit, storage
from megacore.train.agreement import CheckpointError
from megacore.train.logical import LogicalTensor
from tests.train.checkpoint_tasks import EXTRA, TWO, load_error, load_newest, save_step


@pytest.fixture(scope="module")
def pair():
    """Two workers of our own: a killed one takes its pool with it, and eight take long to start again."""
    with WorkerPool(2) as workers:
        yield workers


def save_and_die(directory, layout, step, victim, place, salt):
    """SIGKILL of one rank at a place of the save: after its first file, before metadata.json, at the n-th rename."""
    mesh = Mesh.build(layout)
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
    if mesh.rank == victim:
        storage.FILE_BYTES = 256  # several files a rank
        storage.save_file, commit.os.rename = save_file, rename
        if place == "metadata":
            storage.write_metadata = die
    save_step(directory, layout, step, salt)


def save_without_space(directory, layout, step):
    mesh = Mesh.build(layout)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        save_step(directory, layout, step)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("victim, place", [(1, "first file"), (0, "metadata"), (0, "rename 1")])
def test_a_save_that_is_killed_leaves_the_older_checkpoint(pair, tmp_path, victim, place):
    pair.run(save_step, tmp_path, TWO, 10)
    with pytest.raises(WorkerError):
        pair.run(save_and_die, tmp_path, TWO, 20, victim, place, 1)
    left = [p.name for p in tmp_path.iterdir() if p.name.startswith("step-00000020")]
    assert len(left) == 1 and ".saving-" in left[0]
    for step, _, wrong, skipped in pair.run(load_newest, tmp_path, TWO):
        assert (step, wrong) == (10, [])
        assert skipped == (f"{tmp_path / left[0]}: unfinished: its save did not end",)
    pair.run(save_step, tmp_path, TWO, 20, 1)  # no manual repair: the next save clears the leftovers
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    assert pair.run(load_newest, tmp_path, TWO, 1) == [(20, EXTRA, [], ())] * 2


@pytest.mark.parametrize("victim, place", [(1, "first file"), (0, "rename 1"), (0, "rename 2")])
def test_a_step_saved_again_and_killed_is_the_old_one_whole(pair, tmp_path, victim, place):
    pair.run(save_step, tmp_path, TWO, 10, 5)
    pair.run(save_step, tmp_path, TWO, 20, 0)
    with pytest.raises(WorkerError):
        pair.run(save_and_die, tmp_path, TWO, 20, victim, place, 1)
    assert [a[0::2] for a in pair.run(load_newest, tmp_path, TWO, 0)] == [(20, [])] * 2
    pair.run(save_step, tmp_path, TWO, 30, 2)  # restores step 20 where it had stepped aside
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-000000{n}" for n in (10, 20, 30)]
    shutil.rmtree(tmp_path / "step-00000030")
    assert [a[0::2] for a in pair.run(load_newest, tmp_path, TWO, 0)] == [(20, [])] * 2


def test_a_step_saved_again_is_the_new_one(pair, tmp_path):
    pair.run(save_step, tmp_path, TWO, 20, 0)
    pair.run(save_step, tmp_path, TWO, 20, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000020"]
    assert pair.run(load_newest, tmp_path, TWO, 1) == [(20, EXTRA, [], ())] * 2


def _truncate(file):
    os.truncate(file, file.stat().st_size - 100)


def _flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=["truncated", "flipped", "deleted"])
@pytest.mark.parametrize("name", ["rank-00001-0.safetensors", "metadata.json"])
def test_a_damaged_file_is_named_and_an_older_checkpoint_serves(pair, tmp_path, damage, name):
    pair.run(save_step, tmp_path, TWO, 10, 1)
    pair.run(save_step, tmp_path, TWO, 20, 0)
    bad = tmp_path / "step-00000020" / name
    damage(bad)
    for step, _, wrong, skipped in pair.run(load_newest, tmp_path, TWO, 1):
        assert (step, wrong) == (10, [])
        assert len(skipped) == 1 and str(bad) in skipped[0] and "\n" not in skipped[0]
    if name != "metadata.json":  # without verifying first, loading itself must see it, on every rank
        for message in pair.run(load_error, tmp_path, TWO):
            assert message.count(str(bad)) == 1 and "\n" not in message
    shutil.rmtree(tmp_path / "step-00000010")  # nothing left to fall back to: not a fresh start in silence
    for message in pair.run(load_error, tmp_path, TWO, None, True):
        assert message.startswith(f"no checkpoint in {tmp_path} can be loaded") and str(bad) in message


def test_no_flipped_byte_goes_unseen(tmp_path):
    """Anywhere in any file: found invalid, or (white space in a header) of no consequence."""
    tensors = {
        "model/w": LogicalTensor.whole("w", torch.randn(5, 3)),
        "model/b": LogicalTensor.whole("b", torch.ones(2)),
    }
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


def test_no_space_on_one_rank_is_an_error_on_all(pair, tmp_path):
    pair.run(save_step, tmp_path, TWO, 10)
    for message in pair.run(save_without_space, tmp_path, TWO, 20):
        assert f"cannot save checkpoint 20 in {tmp_path}: rank 1: cannot write" in message
        assert "rank-00001-0.safetensors" in message and "File too large" in message and "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]
    assert pair.run(load_newest, tmp_path, TWO) == [(10, EXTRA, [], ())] * 2
