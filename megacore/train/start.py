"""Before the first communicator: is every rank here, and were all given the same?

Ranks that were given different settings, data or code would hang in groups that the others do not build, or train to
the end with replicas that drift apart. Each says in the store what it was given; rank 0 compares, and all end with the
same line. Only the store is used, so that a wrong layout on one rank is found before any group of it exists.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from megacore.train.launch import Place
from megacore.train.peers import SPOKEN_WITHIN, Board
from megacore.train.same import first_difference

PATIENCE_S = 120.0  # least time in which the ranks must have come: importing from a slow disk takes its time
REFUSED = 2  # exit code of a mistake of the caller


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
    """Wait until all ranks are here. ValueError (one line) on rank 0 when one is late or was given something else,
    SystemExit(2) on the others, and on all when one was refused and has said why. Cost: one value a rank."""
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
    if verdict and board.rank == 0:
        raise ValueError(verdict)
    if verdict:
        board.wait("refused", SPOKEN_WITHIN)  # torchrun ends the others as soon as one has ended
        sys.exit(REFUSED)


def _judge(board: Board, patience: float, stop: Any) -> str:
    """What is wrong between the ranks, in one line, or nothing."""
    given = {rank: board.wait(f"given/{rank}", patience, stop) for rank in range(board.world)}
    late = [rank for rank, fields in given.items() if fields is None]
    if late:
        remedy = f"start all {board.world} ranks, or raise run.timeout_s"
        return f"{_ranks(late)} did not come within {patience:g} s; {remedy}"
    difference = first_difference([given[rank] for rank in range(board.world)])
    return difference and f"{difference}; start every rank with the same settings, data and programs"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def say_once(place: Place, port: int | None, host: str, line: str, say: Callable[[], None]) -> None:
    """`say()` that this rank was refused, unless another was refused with the same `line`: what all ranks find, one
    says. Those that wait for this rank learn of it. `port` None: no store outlives a rank, so that each says it."""
    board = None
    if place.world > 1 and port is not None:
        with suppress(Exception):  # whatever keeps us from the store, the line is said
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2))
            board = _board(place, store, 2.0)
            key = "said/" + hashlib.blake2b(line.encode(), digest_size=8).hexdigest()
            if board.store.add(key, 1) > 1:
                board.wait("refused", SPOKEN_WITHIN)
                return
    say()
    if board is not None:
        board.put("refused", place.rank)
