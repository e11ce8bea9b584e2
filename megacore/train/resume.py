"""What a checkpoint of a run says beside its tensors, and whether this run may continue from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacore.train import checkpoint
from megacore.train.agreement import CheckpointError
from megacore.train.config import Settings, describe
from megacore.train.corpus import Corpus, open_corpus, with_vocabulary
from megacore.train.lock import check_unlocked


def model_of(settings: Settings) -> dict[str, Any]:
    """What fixes the tensors and what they mean."""
    return {**describe(settings)["model"], "precision": settings.run.precision}


def data_of(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What fixes the order of the samples: were it changed, samples would be repeated or left out."""
    return {
        "data.global_batch": settings.data.global_batch,
        "data.shuffle": settings.data.shuffle,
        "run.seed": settings.run.seed,
        "samples": len(corpus.train),
        "source_hash": corpus.source_hash,
        "tokenizer_hash": corpus.tokenizer_hash,
        "tokens": corpus.tokens,
    }


def check_files(settings: Settings, fresh: bool) -> tuple[Settings, Corpus]:
    """Everything that reading files can find wrong, found before anything is sent; settings with the vocabulary filled
    in."""
    check_folders(Path(settings.data.dir), Path(settings.run.out))
    check_unlocked(Path(settings.run.out))
    settings = with_vocabulary(settings)
    corpus = open_corpus(settings)
    if not fresh:
        check_checkpoint(settings, corpus)
    return settings, corpus


def check_folders(data: Path, out: Path) -> None:
    """ValueError (one line) when a run cannot write to `out`."""
    if out.exists() and data.exists() and out.samefile(data):
        raise ValueError(f"run.out={str(out)!r} is data.dir; give a folder of its own for the run, as in {out}/run")
    for folder in (out, out / "checkpoints"):
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"run.out={str(out)!r}: {there} is a file; give another run.out")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"run.out={str(out)!r}: {there} is not writable; give another run.out")


def check_checkpoint(settings: Settings, corpus: Corpus) -> None:
    """ValueError (one line) when the newest checkpoint of the run's folder is of another model or other data. Every
    rank looks for itself, before anything is sent; files that cannot be read are left to the collective search."""
    folder = Path(settings.run.out) / "checkpoints"
    try:
        found = checkpoint.find(folder, verify=False)
    except CheckpointError:
        return
    if found is not None:
        refuse_change(found, {**model_of(settings), **data_of(settings, corpus)})


def of_a_run(found: checkpoint.Found) -> Mapping[str, Any]:
    """`extra` of a checkpoint that `megacore train` saved; CheckpointError where something of it is not there."""
    kinds = {"model": dict, "data": dict, "settings": dict, "consumed": int, "optimizer_steps": int}
    for name, kind in kinds.items():
        value = found.extra.get(name)
        if type(value) is not kind or (kind is int and value < 0):
            raise CheckpointError(
                f"{found.path}: {name}={str(value)[:60]!r} is not what a run writes; give a checkpoint of a run"
            )
    return found.extra


# What may differ between two starts of a run and changes its numbers or its curve. (Another model or another order of
# the data is refused; where files lie, what is printed and how often is the user's own business.)
TOLD = ("optim", "parallel")
TOLD_FIELDS = ("run.steps", "run.fused_loss", "data.micro_batch")


def changes(found: checkpoint.Found, settings: Settings) -> list[str]:
    """One line where this run goes on otherwise than the one that saved the checkpoint: each field, then and now."""
    then, now = of_a_run(found)["settings"], describe(settings)
    told = []
    for section, fields in now.items():
        before = then.get(section)
        before = before if isinstance(before, dict) else {}
        for name, value in fields.items():
            full = f"{section}.{name}"
            watched = section in TOLD or full in TOLD_FIELDS
            if watched and name in before and before[name] != value:
                told.append(f"{full} {before[name]!r} -> {value!r}")
    curve = any(line.startswith(("run.steps", "optim.lr", "optim.min_lr", "optim.warmup")) for line in told)
    after = "; the learning rate follows the new curve from here on" if curve else ""
    return [f"changed since the checkpoint: {', '.join(told)}{after}"] if told else []


def refuse_change(found: checkpoint.Found, now: Mapping[str, Any]) -> None:
    extra = of_a_run(found)
    then = {**extra["model"], **extra["data"]}
    for key, value in json.loads(json.dumps(now)).items():
        if key in then and then[key] != value:
            raise CheckpointError(
                f"{found.path} is of another run: {key}={then[key]!r} there, {key}={value!r} here; set it as it was, "
                "give another run.out, or move the old run aside with --fresh"
            )
