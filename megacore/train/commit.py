"""The directory of checkpoints: how one appears in it whole, or not at all.

    step-00000020                 committed
    step-00000020.saving-3f9c1a   being written, or left over from a save that was killed
    step-00000020.old             the step-00000020 that is being replaced; it counts only while step-00000020 is absent
    step-00000020.gone            being deleted
    step-00000020.skipped         later than the one a run continued from; never found, counted or deleted

A checkpoint is written in `.saving-*` and committed by one rename when every rank has finished. Replacing a step takes
a second rename before it (the old one steps aside), and between the two the old one is still found, under `.old`. Only
the first rank calls what changes anything here. The newest checkpoint is found by listing: no pointer can be wrong.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from uuid import uuid4

from megacore.train.agreement import CheckpointError
from megacore.train.manifest import fsync

LOG = logging.getLogger(__name__)
NAME = re.compile(r"step-(\d{8,})(\.old|\.gone|\.saving-\w+)?")


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def entries(directory: Path) -> list[tuple[int, str, Path]]:
    """(step, suffix, path) of everything here that is, was or would become a checkpoint, newest step first."""
    if not directory.is_dir():
        return []
    matches = [(NAME.fullmatch(p.name), p) for p in directory.iterdir() if p.is_dir()]
    found = [(int(m[1]), m[2] or "", p) for m, p in matches if m]
    return sorted(found, key=lambda e: (-e[0], e[1]))


def check_name(path: Path, step: int) -> None:
    """CheckpointError where a listing found a copy under another step's name: which one is the newest, and which are
    later than it, would be wrong."""
    named = int(NAME.fullmatch(path.name)[1])
    if named != step:
        raise CheckpointError(f"wrong name: {path} holds step {step}; rename it to {step_path(path.parent, step).name}")


def candidates(directory: Path) -> tuple[list[Path], list[str]]:
    """Committed checkpoints, newest first, and why the rest are none."""
    committed, skipped, steps = [], [], set()
    for step, suffix, path in entries(directory):
        if suffix == "" or (suffix == ".old" and step not in steps):
            committed.append(path)
            steps.add(step)
        elif suffix.startswith(".saving"):
            skipped.append(f"{path}: unfinished: its save did not end")
    return committed, skipped


def begin(directory: Path, step: int) -> Path:
    """Clear what killed saves left, and make the temporary directory of a new save."""
    directory.mkdir(parents=True, exist_ok=True)
    committed, _ = candidates(directory)
    for _, suffix, path in entries(directory):
        if path in committed and suffix == ".old":
            os.rename(path, path.with_suffix(""))
        elif path not in committed:
            shutil.rmtree(path, ignore_errors=True)
    path = directory / f"{step_path(directory, step).name}.saving-{uuid4().hex[:8]}"
    path.mkdir()
    return path


def commit(path: Path, directory: Path, step: int) -> Path:
    """Give a finished save its name. Its files are on the disk already; the renames are when this returns."""
    final = step_path(directory, step)
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        os.rename(final, old)
    os.rename(path, final)
    fsync(directory)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)  # a remainder is cleared by the next save
    return final


def leave_behind(directory: Path, step: int) -> list[tuple[Path, Path]]:
    """A run continues from `step`: whatever later one was committed is corrupt or of a run that was abandoned. It gets
    another name, under which no listing finds it, so that it takes no good one's place among those kept. Nothing is
    deleted. Returns (old, new) paths."""
    moved = []
    for at, suffix, path in entries(directory):
        if at > step and suffix in ("", ".old"):
            aside, number = path.with_name(f"{path.name}.skipped"), 1
            while aside.exists():
                aside, number = path.with_name(f"{path.name}.skipped-{number + 1}"), number + 1
            os.rename(path, aside)
            moved.append((path, aside))
    return moved


def retire(directory: Path, step: int, keep: int) -> list[Path]:
    """Delete the oldest committed checkpoints up to `step` beyond the newest `keep`; returns their paths.

    Later steps belong to a run that was left behind, or are corrupt: they are neither deleted nor counted, so that the
    one just saved is never the victim. (A run that resumes moves them out of the way: leave_behind.)"""
    older = [path for at, suffix, path in entries(directory) if not suffix and at <= step]
    deleted = []
    for path in older[keep:]:
        gone = path.with_name(f"{path.name}.gone")  # renamed first: half a checkpoint never bears a whole one's name
        try:
            os.rename(path, gone)
            shutil.rmtree(gone)
            deleted.append(path)
        except OSError as error:  # the new checkpoint is safe; a full disk will speak for itself
            LOG.warning("%s: cannot delete this old checkpoint: %s", path, error)
    return deleted
