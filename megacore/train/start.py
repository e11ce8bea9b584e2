"""Before the first communicator: is every rank here, and were all given the same?

Ranks that were given different settings, data or code would hang in groups that the others do not build, or train to
the end with replicas that drift apart. Each says in the store what it was given; rank 0 compares, and all end with the
same line. Only the store is used, so that a wrong layout on one rank is found before any group of it exists.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megacore.train as package
from megacore.train.config import Settings
from megacore.train.corpus import Corpus
from megacore.train.launch import Place
from megacore.train.peers import Board
from megacore.train.resume import data_of

PATIENCE_S = 120.0  # least time in which the ranks must have come: importing from a slow disk takes its time
REFUSED = 2  # exit code of a mistake of the caller
# What may differ: where things lie on a host, how fast it is, and what rank 0 alone shows.
OWN = {
    "data.dir", "run.out", "run.threads", "run.peak_tflops", "run.tensorboard", "run.log_every",
    "run.sample_tokens", "run.sample_prompt",
}  # fmt: skip
BLOCKS, BLOCK = 256, 4096


def join(place: Place, timeout_s: float) -> Board:
    """The board of this rank: a job of one process has no store. Each attempt of torchrun's has keys of its own."""
    if place.world == 1:
        return Board(timeout_s=timeout_s)
    patience = timedelta(seconds=max(timeout_s, PATIENCE_S))
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    return _board(place, store, timeout_s)


def _board(place: Place, store: dist.Store, timeout_s: float) -> Board:
    return Board(place.rank, dist.PrefixStore(f"megacore/{place.attempt}", store), place.world, timeout_s)


def meet(board: Board, given: Mapping[str, Any]) -> None:
    """Wait until all ranks are here. ValueError (one line) on every rank when one is late or was given something else,
    SystemExit(2) when one was refused and has said why. Cost: one value a rank to the store."""
    if board.store is None:
        return
    patience = max(board.timeout_s, PATIENCE_S)
    refused = partial(board.get, "refused")
    board.enter()
    board.put(f"given/{board.rank}", dict(given))
    if board.rank == 0:
        board.put("verdict", _judge(board, patience, lambda: bool(refused())))
    verdict = board.wait("verdict", patience + 30, lambda: bool(refused()))
    if refused():
        sys.exit(REFUSED)
    if verdict is None:
        raise ValueError(
            f"rank 0 did not answer within {patience + 30:g} s; is it started, and is its store within reach?"
        )
    if verdict:
        raise ValueError(verdict)


def _judge(board: Board, patience: float, stop: Any) -> str:
    """What is wrong between the ranks, in one line, or nothing."""
    given = {rank: board.wait(f"given/{rank}", patience, stop) for rank in range(board.world)}
    late = [rank for rank, fields in given.items() if fields is None]
    if late:
        remedy = f"start all {board.world} ranks, or raise run.timeout_s"
        return f"{_ranks(late)} did not come within {patience:g} s; {remedy}"
    return difference(given)


def difference(given: Mapping[int, Mapping[str, Any]]) -> str:
    """The first field in which the ranks differ, with its values and who has them; empty where there is none."""
    for name in given[0]:
        values = {rank: repr(fields.get(name)) for rank, fields in given.items()}
        counted = Counter(values.values()).most_common()
        if len(counted) > 1:
            who = {value: [rank for rank, mine in values.items() if mine == value] for value, _ in counted[:4]}
            shown = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in who.items())
            return f"{name} differs between the ranks: {shown}; give every rank the same"
    return ""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def given(settings: Settings, corpus: Corpus, device: str, fresh: bool) -> dict[str, Any]:
    """What must be the same on every rank: settings, data, code and the device's type."""
    fields = {f"{section}.{name}": v for section, values in asdict(settings).items() for name, v in values.items()}
    fields = {name: value for name, value in fields.items() if name not in OWN}
    fields |= {"run.device": device, "--fresh": fresh}
    fields |= {f"data ({name})": value for name, value in data_of(settings, corpus).items() if "." not in name}
    folder = Path(settings.data.dir)
    files = [folder / f"{side}.{kind}" for side in ("train", "valid") for kind in ("idx", "bin")]
    fields |= {f"data ({file.name})": digest(file) for file in files}
    return {**fields, "torch": torch.__version__, "python": sys.version.split()[0], "megacore's code": code()}


def digest(path: Path) -> str:
    """Size and hash of a file: of all of it up to 1 MiB, else of 256 blocks of 4 KiB spread evenly over it. Two large
    files of one size that differ in single places between these blocks are taken for the same."""
    if not path.is_file():
        return "missing"
    size, found = path.stat().st_size, hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        if size <= BLOCKS * BLOCK:
            found.update(file.read())
        else:
            for block in range(BLOCKS):
                file.seek(block * (size - BLOCK) // (BLOCKS - 1))
                found.update(file.read(BLOCK))
    return f"{size} bytes, {found.hexdigest()}"


def code() -> str:
    """Hash of the package's Python source."""
    root, found = Path(package.__file__).parents[1], hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def first_to_say(place: Place, port: int | None, host: str, line: str) -> bool:
    """True for the first rank to be refused for this reason: what all ranks find, one says. The others, which may wait
    for this one, learn that it was refused. `port` None: no store that outlives a rank, so that each says it."""
    if place.world == 1 or port is None:
        return True
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2))
        board = _board(place, store, 2.0)
        first = board.store.add("said/" + hashlib.blake2b(line.encode(), digest_size=8).hexdigest(), 1) == 1
        board.put("refused", place.rank)
        return first
    except Exception:
        return True
