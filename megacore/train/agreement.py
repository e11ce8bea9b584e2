"""One outcome for all: what one rank cannot do, no rank has done.

A file that one rank cannot read or write must end the step on every rank, with that rank's reason; otherwise the others
wait in their next collective until its time-out, and the reason is lost among theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megacore.comm.mesh import Group

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used here; one line that names the file or the field."""


def reason(error: BaseException) -> str:
    """An exception as one line; the class is named unless the message was written for the user."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def blame(what: str, rank: int, group: Group, text: str) -> str:
    """`what: rank r: text`, without the rank where there is only one."""
    return f"{what}: {text}" if group.size == 1 else f"{what}: rank {group.ranks[rank]}: {text}"


def together(group: Group, what: str, fn: Callable[[], T]) -> list[T]:
    """Collective. Call `fn` on every member; the results by index, or CheckpointError with the first failing rank's
    reason on all. Results are pickled between ranks (never read from a file). Cost: one all-gather of small objects."""
    try:
        mine = (True, fn())
    except Exception as error:
        mine = (False, reason(error))
    answers = [mine]
    if group.size > 1:
        answers = [mine] * group.size
        dist.all_gather_object(answers, mine, group=group.pg)
    for rank, (ok, value) in enumerate(answers):
        if not ok:
            raise CheckpointError(blame(what, rank, group, value))
    return [value for _, value in answers]


def by_first(group: Group, what: str, fn: Callable[[], T]) -> T:
    """Collective. Call `fn` on the first member only; its result on all, or CheckpointError with its reason on all."""
    answer: list = [None]
    if group.index == 0:
        try:
            answer = [(True, fn())]
        except Exception as error:
            answer = [(False, reason(error))]
    if group.size > 1:
        dist.broadcast_object_list(answer, src=group.ranks[0], group=group.pg)
    ok, value = answer[0]
    if not ok:
        raise CheckpointError(blame(what, 0, group, value))
    return value
