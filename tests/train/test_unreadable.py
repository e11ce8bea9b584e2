"""A checkpoint that cannot be read is not corrupt; who may read one; other frozen parameters than when it was saved."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from megacore.comm.mesh import Layout, Mesh
from megacore.train import checkpoint, storage
from megacore.train.agreement import CheckpointError
from megacore.train.logical import LogicalTensor
from megacore.train.manifest import UnreadableError
from tests.train.checkpoint_tasks import TWO, save_step


def tensors(*names):
    return {name: LogicalTensor.whole(name, torch.ones(3)) for name in names}


def save_two(folder):
    for step in (10, 20):
        checkpoint.save(folder, step, tensors("model/w"), {})


def failing_open(number):
    def refuse(file, *args, **kwargs):
        if str(file).endswith(".safetensors") and "step-00000020" in str(file):
            raise OSError(number, os.strerror(number), str(file))
        return open(file, *args, **kwargs)

    return refuse


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("what", ["shard", "metadata"])
def test_the_newest_that_cannot_be_read_stops_the_search(tmp_path, monkeypatch, number, what):
    save_two(tmp_path)
    if what == "shard":
        monkeypatch.setattr(storage, "open", failing_open(number), raising=False)
    else:
        plain = Path.read_text

        def read_text(path, **kwargs):
            if path.name == "metadata.json" and "20" in path.parent.name:
                raise OSError(number, os.strerror(number), str(path))
            return plain(path, **kwargs)

        monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(UnreadableError) as error:
        checkpoint.find(tmp_path)
    text = str(error.value)
    assert "step-00000020" in text and os.strerror(number) in text and "move it away" in text and "\n" not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    assert checkpoint.find(tmp_path, step=10).step == 10
    monkeypatch.undo()
    assert checkpoint.find(tmp_path).step == 20


def find_with_one_blind(folder, blind):
    mesh = Mesh.build(TWO)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == blind:
            patch.setattr(storage, "open", failing_open(errno.EIO), raising=False)
        try:
            return checkpoint.find(folder, group=mesh.world).step
        except UnreadableError as error:
            return str(error)


@pytest.mark.parametrize("blind", [0, 1])
def test_one_rank_that_cannot_read_stops_all(pool, tmp_path, blind):
    for step in (10, 20):
        pool.run(save_step, tmp_path, TWO, step, world=2)
    messages = pool.run(find_with_one_blind, tmp_path, blind, world=2)
    assert len(set(messages)) == 1 and f"rank {blind}: " in messages[0] and "Input/output error" in messages[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_without_the_right_to_read_it():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        save_two(folder)
        for file in (folder / "step-00000020").glob("*.safetensors"):
            file.chmod(0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(UnreadableError, match="Permission denied"):
                checkpoint.find(folder)
            assert checkpoint.find(folder, step=10).step == 10
        finally:
            os.seteuid(0)


def test_corrupt_still_gives_way_to_an_older_one(tmp_path):
    save_two(tmp_path)
    file = next((tmp_path / "step-00000020").glob("*.safetensors"))
    file.write_bytes(b"\xff" * 40)
    assert checkpoint.find(tmp_path).step == 10
    file.unlink()
    assert checkpoint.find(tmp_path).step == 10


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_says(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = checkpoint.save(tmp_path, 1, tensors("model/w"), {})
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()}
    assert len(modes) == 2 and set(modes.values()) == {mode}, modes


# frozen parameters


TRAINED = ("model/a", "model/b", "optim/a/exp_avg", "optim/b/exp_avg")
A_FROZEN = ("model/a", "model/b", "optim/b/exp_avg")


@pytest.mark.parametrize(
    ("saved", "here", "says"),
    [
        (TRAINED, A_FROZEN, "its frozen parameters differ: a trained when it was saved, frozen here;"),
        (A_FROZEN, TRAINED, "its frozen parameters differ: a frozen when it was saved, trained here;"),
        (
            A_FROZEN,
            (*TRAINED[:3],),
            "a frozen when it was saved, trained here; b trained when it was saved, frozen here",
        ),
    ],
)
def test_other_frozen_parameters_are_told_by_name(tmp_path, saved, here, says):
    checkpoint.save(tmp_path, 1, tensors(*saved), {})
    found = checkpoint.find(tmp_path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(found, tensors(*here))
    assert says in str(error.value) and "load the tensors under model/ alone" in str(error.value)
    checkpoint.load(found, tensors("model/a", "model/b"))  # the remedy works


def load_stage(folder, frozen):
    """Two stages; each asks for its own parameter only."""
    mesh = Mesh.build(Layout(pp=2))
    mine = "ab"[mesh.rank]
    names = [f"model/{mine}"] + ([] if mine in frozen else [f"optim/{mine}/exp_avg"])
    try:
        checkpoint.load(checkpoint.find(folder, group=mesh.world), tensors(*names), group=mesh.world)
    except CheckpointError as error:
        return str(error)


def test_the_frozen_set_is_that_of_all_stages(pool, tmp_path):
    checkpoint.save(tmp_path, 1, tensors(*A_FROZEN), {})
    assert pool.run(load_stage, tmp_path, "a", world=2) == [None, None]
    messages = pool.run(load_stage, tmp_path, "b", world=2)
    assert len(set(messages)) == 1 and "a frozen when it was saved, trained here; b trained" in messages[0]
