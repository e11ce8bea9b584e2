"""A newest checkpoint that the system does not give is not corrupt: the run stops and says so. And: who may read the
files, which parameters were frozen, what a run must find in `extra`."""

import errno
import os
import stat
import subprocess
import sys

import pytest
import torch

from megacore.comm.mesh import Mesh
from megacore.train import checkpoint, regular, storage
from megacore.train.agreement import CheckpointError
from megacore.train.logical import LogicalTensor
from megacore.train.manifest import Unreadable
from megacore.train.resume import of_a_run
from tests.spawn import pool  # noqa: F401


def save(folder, step, names=("model/w",)):
    tensors = {name: LogicalTensor.whole(name, torch.arange(6.0)) for name in names}
    return checkpoint.save(folder, step, tensors, {"run": "x"})


def entries(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("what", ["metadata.json", "rank-00000-0.safetensors"])
def test_it_is_said_and_no_older_one_is_taken(tmp_path, monkeypatch, what, code):
    save(tmp_path, 1)
    save(tmp_path, 2)
    plain_open = regular.open_regular

    def broken(path):
        if path.name == what and path.parent.name == "step-00000002":
            raise OSError(code, os.strerror(code), str(path))
        return plain_open(path)

    monkeypatch.setattr(regular, "open_regular", broken)
    with pytest.raises(Unreadable) as error:
        checkpoint.find(tmp_path)
    assert what in str(error.value) and os.strerror(code) in str(error.value) and "\n" not in str(error.value)
    assert entries(tmp_path) == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    assert checkpoint.find(tmp_path).step == 2


def _find_where_one_may_not(folder, blind):
    mesh = Mesh.build(checkpoint_layout())
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == blind:

            def refuse(*_):
                raise storage.unreadable(folder / "f", PermissionError(errno.EACCES, "Permission denied"))

            patch.setattr(checkpoint, "verify_file", refuse)
            patch.setattr(checkpoint, "read_metadata", refuse)
        try:
            checkpoint.find(folder, group=mesh.world)
        except Unreadable as error:
            return str(error)


def checkpoint_layout():
    from megacore.comm.mesh import Layout

    return Layout(dp=2)


def test_every_rank_stops_where_one_may_not_read(pool, tmp_path):  # noqa: F811
    save(tmp_path, 1)
    save(tmp_path, 2)
    said = pool.run(_find_where_one_may_not, tmp_path, 1, world=2)
    assert said[0] == said[1] and "rank 1" in said[0] and "Permission denied" in said[0]


@pytest.mark.parametrize("what", ["metadata.json", "rank-00000-0.safetensors"])
def test_a_fifo_in_place_of_a_file_is_passed_over_and_waited_for_by_nobody(tmp_path, what):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / what
    path.unlink()
    os.mkfifo(path)
    found = checkpoint.find(tmp_path)
    assert found.step == 1 and what in found.skipped[0]


def test_numbers_that_json_does_not_have_are_not_saved(tmp_path):
    """MB-56, of manifests."""
    with pytest.raises(CheckpointError, match="extra is not JSON"):
        checkpoint.save(
            tmp_path, 1, {"model/w": LogicalTensor.whole("model/w", torch.zeros(2))}, {"loss": float("nan")}
        )
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_a_shard_that_is_missing_is_still_passed_over(tmp_path):
    save(tmp_path, 1)
    next(save(tmp_path, 2).glob("*.safetensors")).unlink()
    found = checkpoint.find(tmp_path)
    assert found.step == 1 and "missing" in found.skipped[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_that_it_may_not_read(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).chmod(0o700)
    for folder in (tmp_path, *list(tmp_path.parents)[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    script = f"""
import os, torch
from megacore.train import checkpoint
os.setgid(65534); os.setuid(65534)
try:
    checkpoint.find({str(tmp_path)!r})
except checkpoint.Unreadable as error:
    print("stopped:", error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.startswith("stopped:") and "Permission denied" in ended.stdout, ended.stderr


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_all_files_are_for_whom_the_folder_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()}
    assert len(modes) == 2 and set(modes.values()) == {0o666 & ~umask}, modes


def test_another_set_of_frozen_parameters_is_told_as_such(tmp_path):
    trained = [f"optim/{name}/{part}" for name in "ab" for part in ("exp_avg", "exp_avg_sq")]
    save(tmp_path, 1, ["model/a", "model/b", "model/c", *trained])
    now = [f"optim/{name}/{part}" for name in "bc" for part in ("exp_avg", "exp_avg_sq")]
    tensors = {n: LogicalTensor.whole(n, torch.zeros(6)) for n in ["model/a", "model/b", "model/c", *now]}
    with pytest.raises(CheckpointError, match=r"frozen now and not then: a and frozen then and not now: c\)"):
        checkpoint.load(checkpoint.find(tmp_path), tensors)


GOOD = {"model": {}, "data": {}, "settings": {}, "consumed": 8, "optimizer_steps": 2}


@pytest.mark.parametrize(
    "change", [{"model": None}, {"settings": []}, {"consumed": -1}, {"optimizer_steps": "2"}], ids=str
)
def test_a_checkpoint_that_no_run_wrote_is_told_as_such(tmp_path, change):
    found = checkpoint.Found(tmp_path, 1, GOOD, {})
    assert of_a_run(found) is GOOD
    with pytest.raises(CheckpointError, match=f"{next(iter(change))}=.* is not what a run writes"):
        of_a_run(checkpoint.Found(tmp_path, 1, {**GOOD, **change}, {}))
    missing = {name: value for name, value in GOOD.items() if name not in change}
    with pytest.raises(CheckpointError, match="is not what a run writes"):
        of_a_run(checkpoint.Found(tmp_path, 1, missing, {}))
