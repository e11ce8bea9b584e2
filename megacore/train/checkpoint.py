"""Checkpoints: saved in one layout, loaded in any other, whole or not there.

    path  = save("runs/a", step, tensors, extra, group=mesh.world, replicas=mesh.dp_cp, keep=3)
    found = find("runs/a", group=mesh.world)                 # newest valid, or None
    load(found, tensors, group=mesh.world, model=extra["model"])
    full  = read_full(found, ["model/wte.weight"])           # one process, no torch.distributed

`tensors` are logical (logical.describe). torch.distributed.checkpoint plans who writes and reads what; storage.py is
its storage layer (JSON and safetensors, checksums, no pickle); commit.py makes a checkpoint appear whole. All functions
with a group are collective over it, and an error of one rank is raised on all. See docs/checkpoints.md.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megacore.comm.mesh import SOLO, Group
from megacore.train import commit
from megacore.train.agreement import CheckpointError, blame, by_first, reason, together
from megacore.train.logical import LoadPlanner, LogicalTensor, SavePlanner, share_out
from megacore.train.manifest import Unreadable, chunks_of, dtype_of, read_metadata
from megacore.train.storage import SafetensorsReader, SafetensorsWriter, check_size, verify_file

REMEDY = "give a directory on a filesystem that all hosts share"


@dataclass(frozen=True)
class Found:
    """A committed checkpoint whose files match their checksums, and one line for each one that was passed over."""

    path: Path
    step: int
    extra: dict[str, Any]
    body: dict[str, Any] = field(repr=False)  # metadata.json
    skipped: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every stored tensor by its stored name."""
        return {name: tuple(entry["shape"]) for name, entry in self.body["tensors"].items()}


def check_shared(directory: str | Path, group: Group = SOLO, wait: float = 5.0) -> None:
    """Collective. CheckpointError on all ranks unless each can write in `directory` and sees what the first wrote.

    `wait`: seconds that a network filesystem may take to show another host's new file."""
    directory = Path(directory)
    token = by_first(group, f"{directory} is not shared", lambda: uuid4().hex)
    mine = directory / f".shared-{token}-{group.index}"
    theirs = directory / f".shared-{token}-0"

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mine.write_text(token)

    def see() -> None:
        deadline = time.monotonic() + wait
        while not (theirs.exists() and theirs.read_text() == token):
            if time.monotonic() > deadline:
                raise CheckpointError(f"it does not see the first rank's file; {REMEDY}")
            time.sleep(0.05)

    try:
        together(group, f"checkpoint directory {directory} is not writable", write)
        together(group, f"checkpoint directory {directory} is not shared", see)
    finally:
        with suppress(OSError):  # NotADirectoryError where the directory is what was wrong
            mine.unlink()


def save(
    directory: str | Path,
    step: int,
    tensors: Mapping[str, LogicalTensor],
    extra: Mapping[str, Any],
    *,
    group: Group = SOLO,
    replicas: Group = SOLO,
    keep: int | None = None,
) -> Path:
    """Save `tensors` and `extra` (JSON) as checkpoint `step`; returns its directory. Collective over `group`.

    Ranks in `replicas` (dp x cp) hold the same tensors and share out the writing. Each rank writes its own boxes, one
    file at a time: no rank ever gathers a tensor, and the memory beside the model is one file (512 MB). If any rank
    fails, every rank raises CheckpointError with its reason, and the checkpoints that were there remain. `keep` deletes
    the oldest beyond that number after the commit. Saving a step again leaves the old one or the new one, whole.
    """
    directory, what = Path(directory), f"cannot save checkpoint {step} in {directory}"
    head = {"step": step, "extra": dict(extra)}
    together(group, what, lambda: _check_save(step, head, keep))
    path = by_first(group, what, lambda: commit.begin(directory, step))
    try:
        writer = SafetensorsWriter(path, group.index, head, sorted(tensors))
        _planned(group, what, dcp.save, share_out(tensors, replicas), storage_writer=writer, planner=SavePlanner())
        final = by_first(group, what, lambda: commit.commit(path, directory, step))
    except CheckpointError:
        if group.index == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if keep is not None and group.index == 0:
        commit.retire(directory, step, keep)
    return final


def find(directory: str | Path, *, group: Group = SOLO, step: int | None = None, verify: bool = True) -> Found | None:
    """The newest valid checkpoint in `directory` (or checkpoint `step`), the same on every rank; None if none was ever
    committed.

    Returns one line for each one passed over, in `skipped`. `verify` reads all files, shared out over the ranks, and
    compares their checksums; without it only metadata.json is read. If checkpoints were committed but none is valid,
    raises CheckpointError: to start afresh in silence would lose them; and Unreadable where the system does not give
    one that may be good.
    """
    directory = Path(directory)
    committed, skipped = by_first(group, f"cannot list {directory}", lambda: commit.candidates(directory))
    if step is not None:
        skipped = []
        committed = [p for p in committed if p.name.removesuffix(".old") == commit.step_path(directory, step).name]
        if not committed:
            raise CheckpointError(f"step={step} is not in {directory}; give a step that was saved")
    for path in committed:
        try:
            body = _valid(path, group, verify)
            commit.check_name(path, body["step"])
        except Unreadable:
            raise
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return Found(path, body["step"], body["extra"], body, tuple(skipped))
    if committed:
        raise CheckpointError(f"no checkpoint in {directory} can be loaded: {'; '.join(skipped)}")
    return None


def read(path: str | Path, *, group: Group = SOLO, verify: bool = True) -> Found:
    """The checkpoint in this very directory, whatever its name: a copy, a link, one that was set aside. Its step is the
    one that its metadata says. CheckpointError names the file that is missing or does not match."""
    body = _valid(Path(path), group, verify)
    return Found(Path(path), body["step"], body["extra"], body)


def continue_from(found: Found, *, group: Group = SOLO) -> list[str]:
    """Later checkpoints than `found`, corrupt or abandoned, are renamed to `.skipped`: they no longer count towards
    `keep`, and nothing is deleted. One line for each, on every rank. Collective; call it once `found` is loaded."""
    what = f"cannot rename the checkpoints after {found.path}"
    moved = by_first(group, what, lambda: commit.leave_behind(found.path.parent, found.step))
    return [f"{path.name} is now {aside.name}; it counts no more towards those kept" for path, aside in moved]


def load(
    found: Found, tensors: Mapping[str, LogicalTensor], *, group: Group = SOLO, model: Mapping[str, Any] | None = None
) -> None:
    """Fill the local tensors in place, bit for bit, from a checkpoint of any layout. Collective over `group`.

    Raises CheckpointError on every rank, before anything is read, with the first difference between the checkpoint's
    model and this one: a field of `model` against extra["model"], a missing or surplus name, a shape, a dtype. Names
    are compared within the kinds asked for (`model/`, `optim/`). Raises CheckpointError naming the file if one is
    missing, truncated or does not match its checksum; local tensors are then undefined.
    """
    names = together(group, f"cannot load {found.path}", lambda: sorted(tensors))
    asked = {name for per_rank in names for name in per_rank}
    together(group, f"{found.path} is of another model", lambda: _check_model(found, tensors, asked, model))
    reader = SafetensorsReader(found.path, found.body)
    _planned(group, f"cannot load {found.path}", dcp.load, dict(tensors), storage_reader=reader, planner=LoadPlanner())


def read_full(found: Found, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Full tensors by stored name (all by default), on the CPU, in one process: for sampling and export."""
    names = list(found.body["tensors"] if names is None else names)
    for name in names:
        if name not in found.body["tensors"]:
            held = ", ".join(list(found.body["tensors"])[:3])
            raise CheckpointError(f"{name} is not in {found.path}; it holds {held}, ...")
    for file in sorted({chunk.file for name in names for chunk in chunks_of(found.body, name)}):
        check_size(found.path, found.body, file)  # before memory is asked for by what a manifest says
    empty = {n: torch.empty(found.shapes[n], dtype=dtype_of(found.body["tensors"][n]["dtype"])) for n in names}
    reader = SafetensorsReader(found.path, found.body)
    wholes = {name: LogicalTensor.whole(name, tensor) for name, tensor in empty.items()}
    _planned(SOLO, f"cannot read {found.path}", dcp.load, wholes, storage_reader=reader, planner=LoadPlanner())
    return empty


def _check_save(step: int, head: dict[str, Any], keep: int | None) -> None:
    if step < 0:
        raise ValueError(f"step={step} is negative; give the number of steps done")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would delete the checkpoint just saved; give keep >= 1, or None to keep all")
    try:
        json.dumps(head, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"extra is not JSON: {error}; give numbers, strings, lists and dicts") from None


def _check_model(
    found: Found, tensors: Mapping[str, LogicalTensor], asked: set[str], model: Mapping[str, Any] | None
) -> None:
    """The first difference between what is stored and what is asked for, in one line."""
    described, remedy = found.extra.get("model", {}), "load it into the model that saved it, or use another directory"
    for key, value in json.loads(json.dumps(model or {})).items():
        if described.get(key) != value:
            raise CheckpointError(f"it has {key}={described.get(key)!r}, this model has {key}={value!r}; {remedy}")
    _check_trained(found, asked)
    shapes, kinds = found.shapes, {name.split("/")[0] for name in asked}
    for name, tensor in tensors.items():
        here = tuple(tensor.size())
        if name not in shapes:
            raise CheckpointError(f"it has no {name}, this model has one of shape {here}; {remedy}")
        if shapes[name] != here:
            raise CheckpointError(f"it has {name} of shape {shapes[name]}, this model has {here}; {remedy}")
        stored = dtype_of(found.body["tensors"][name]["dtype"])
        if stored != tensor.dtype:
            raise CheckpointError(f"it has {name} in {stored}, here it is {tensor.dtype}; resume in the same precision")
    for name, shape in shapes.items():
        if name.split("/")[0] in kinds and name not in asked:
            raise CheckpointError(f"it has {name} of shape {shape}, this model has none; {remedy}")


def _check_trained(found: Found, asked: set[str]) -> None:
    """Moments are kept of what is trained: another set of frozen parameters is told as such."""
    then, now = _trained(found.shapes), _trained(asked)
    if not (then and now) or then == now or _models(found.shapes) != _models(asked):
        return
    changes = [("frozen now and not then", then - now), ("frozen then and not now", now - then)]
    told = " and ".join(
        f"{what}: {', '.join(sorted(names)[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in changes
        if names
    )
    raise CheckpointError(
        f"the frozen parameters are others ({told}); freeze those that were, or start anew from weights"
    )


def _trained(names: Iterable[str]) -> set[str]:
    ends = "/exp_avg"
    return {n.removeprefix("optim/").removesuffix(ends) for n in names if n.startswith("optim/") and n.endswith(ends)}


def _models(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("model/")}


def _valid(path: Path, group: Group, verify: bool) -> dict[str, Any]:
    """metadata.json of a checkpoint that every rank can read; each rank verifies its share of the files."""
    body: dict[str, Any] = {}

    def read() -> str:
        body.update(read_metadata(path))
        return body["blake2b"]

    def check() -> str:
        for file in sorted(body["files"])[group.index :: group.size] if verify else ():
            verify_file(path, body, file)
        return ""

    if len(set(_readable(path, group, read))) > 1:
        raise CheckpointError(f"{path}: ranks read different files under this name; {REMEDY}")
    _readable(path, group, check)
    return body


def _readable(path: Path, group: Group, fn: Callable[[], str]) -> list[str]:
    """`together`; where a rank finds a file Unreadable, Unreadable on all."""

    def call() -> tuple[bool, str]:
        try:
            return True, fn()
        except Unreadable as error:
            return False, str(error)

    answers = together(group, path.name, call)
    for rank, (ok, text) in enumerate(answers):
        if not ok:
            raise Unreadable(blame(path.name, rank, group, text))
    return [text for _, text in answers]


def _planned(group: Group, what: str, call: Callable, tensors: dict[str, LogicalTensor], **kwargs: Any) -> None:
    """dcp.save or dcp.load over a group; its report of all ranks' failures becomes one line with the first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            call(tensors, process_group=group.pg, no_dist=group.size == 1, **kwargs)
        except dcp.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise CheckpointError(blame(what, rank, group, reason(cause))) from error
