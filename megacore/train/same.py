"""Ranks that were given different things do not train: settings, data and programs are compared before any group is
built, and the field that differs is named with its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megacore.comm.mesh import Group
from megacore.train.agreement import CheckpointError, together
from megacore.train.config import Settings, describe
from megacore.train.corpus import Corpus
from megacore.train.resume import data_of

# Where files lie on this host, and what only the first rank or the rank itself uses.
OWN = {
    "run.out", "data.dir", "run.device", "run.threads", "run.log_every", "run.tensorboard", "run.peak_tflops",
    "run.sample_tokens", "run.sample_prompt",
}  # fmt: skip
FILES = ("train.idx", "train.bin", "valid.idx", "valid.bin")
BLOCK, BLOCKS = 64 << 10, 64  # a file's digest reads at most 4 MiB of it


def facts(settings: Settings, corpus: Corpus, device: torch.device, fresh: bool) -> dict[str, Any]:
    """What must be the same on every rank, by the name that a user knows it by."""
    sections = describe(settings).items()
    fields = {f"{section}.{name}": value for section, body in sections for name, value in body.items()}
    told = {name: value for name, value in fields.items() if name not in OWN}
    folder = Path(settings.data.dir)
    data = {f"data.dir {name}": value for name, value in data_of(settings, corpus).items() if "." not in name}
    files = {f"data.dir {name}": fingerprint(folder / name) for name in FILES}
    programs = {"torch": torch.__version__, "megacore's sources": sources()}
    return {**told, "--fresh": fresh, "run.device": device.type, **data, **files, **programs}


def sources() -> str:
    """Digest of this package's Python files: hosts that were updated at different times."""
    here, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=8)
    for path in sorted(here.rglob("*.py")):
        digest.update(str(path.relative_to(here)).encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint(path: Path) -> str:
    """Size and digest of a file's first and last block and of blocks between, evenly spaced; empty without a file. A
    corpus of terabytes costs 4 MiB of reading; it tells files apart that were made from other texts, not every byte."""
    if not path.is_file():
        return ""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        for number in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return f"{size} bytes, {digest.hexdigest()}"


def check_same(group: Group, mine: Mapping[str, Any]) -> None:
    """Collective. CheckpointError on every rank with the first field that is not the same everywhere."""
    difference = first_difference(together(group, "ranks cannot compare their settings", lambda: dict(mine)))
    if difference:
        raise CheckpointError(f"{difference}; start every rank with the same settings, data and programs")


def first_difference(given: Sequence[Mapping[str, Any]]) -> str:
    """`field is a on ranks 0, 2 and b on rank 1`; empty where all agree."""
    for name in {name: None for one in given for name in one}:
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(given):
            ranks.setdefault(repr(one.get(name)), []).append(rank)
        if len(ranks) > 1:
            return f"{name} is " + " and ".join(f"{value} on {_named(held)}" for value, held in ranks.items())
    return ""


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
