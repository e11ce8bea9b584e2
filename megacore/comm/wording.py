"""Groups of ranks in words: whole where they are few, by their pattern where they are many."""

from __future__ import annotations

from collections.abc import Sequence

MEMBERS, GROUPS = 8, 8  # up to here all are written


def members(group: Sequence[int]) -> str:
    """{0,1,2} whole; {0..63} for ranks in a row, {0,8,..,56} for equal steps, {0,1,2,..,63} (64) for anything else."""
    if len(group) <= MEMBERS:
        return "{" + ",".join(map(str, group)) + "}"
    steps = {b - a for a, b in zip(group, group[1:], strict=False)}
    if steps == {1}:
        return f"{{{group[0]}..{group[-1]}}}"
    if len(steps) == 1:
        return f"{{{group[0]},{group[1]},..,{group[-1]}}}"
    return "{" + ",".join(map(str, group[:4])) + f",..,{group[-1]}}}"


def groups(found: Sequence[Sequence[int]]) -> str:
    """All groups, or the first three and the last."""
    if len(found) <= GROUPS:
        return " ".join(map(members, found))
    return " ".join(map(members, found[:3])) + " ... " + members(found[-1])
