"""Run a schedule on paper: is it complete, does it end, how long are ranks idle, how many micro-batches live at once.

Dependencies, S = p*v global stages, stage s = chunk*p + rank:
    F(s, i) after F(s-1, i);   B(s, i) after F(s, i) and B(s+1, i);   W(s, i) after B(s, i);
and every rank executes its list in order. Messages take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megacore.pipeline.schedule import Action

Cost = float | Sequence[float]  # one number, or one per global stage


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it was run."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    makespan: float
    bubble: float  # idle share of all ranks' time: 1 - busy / (p * makespan)
    peak_live: tuple[int, ...]  # per rank: most (chunk, micro-batch) pairs whose F has run and whose backward has not
    order: tuple[Event, ...]  # by start: an order in which one process could run everything

    def timeline(self) -> str:
        """One line per rank, for a person."""
        rows: dict[int, list[str]] = {}
        for event in self.order:
            rows.setdefault(event.rank, []).append(f"{event.start:g}:{event.action}")
        return "\n".join(f"rank {rank}  " + "  ".join(rows[rank]) for rank in sorted(rows))


def simulate(
    schedules: Sequence[Sequence[Action]],
    chunks: int = 1,
    f: Cost = 1.0,
    b: Cost = 2.0,
    w: Cost = 0.0,
    microbatches: int | None = None,
) -> Report:
    """Execute `schedules[rank]` in simulated time; `f`, `b` and `w` are the times of F, of the input gradient and of
    the weight gradient, so a B without W takes b + w. Where `microbatches` is None, the largest number named is m - 1.

    Raises ValueError for an action that is missing, doubled, of an unknown kind, chunk or micro-batch, or before one of
    its own rank that it needs (B before F, W before B), and for a deadlock between ranks, naming the actions that wait.
    """
    p = len(schedules)
    split = _check_complete(schedules, chunks, microbatches)
    times = {kind: _per_stage(kind, cost, p * chunks) for kind, cost in (("F", f), ("B", b), ("W", w))}

    def duration(rank: int, action: Action) -> float:
        stage = action.chunk * p + rank
        whole = action.kind == "B" and (rank, action.chunk, action.microbatch) not in split
        return times[action.kind][stage] + (times["W"][stage] if whole else 0.0)

    order = _run(schedules, chunks, duration)
    makespan = max((event.end for event in order), default=0.0)
    busy = sum(event.end - event.start for event in order)
    bubble = 1.0 - busy / (p * makespan) if makespan else 0.0
    return Report(makespan, bubble, tuple(_peak_live(actions) for actions in schedules), order)


def _run(schedules: Sequence[Sequence[Action]], chunks: int, duration) -> tuple[Event, ...]:
    """Start each action as soon as its rank is free and what it needs is done; among several, the earliest first."""
    p = len(schedules)
    done: dict[tuple[str, int, int], float] = {}  # (kind, global stage, micro-batch) -> end
    waiting: dict[tuple[str, int, int], list[int]] = {}  # what is needed -> ranks whose next action needs it
    at, free = [0] * p, [0.0] * p
    ready: list[tuple[float, int]] = []

    def offer(rank: int) -> None:
        """Queue the next action of a rank, or note the first thing that it waits for."""
        if at[rank] == len(schedules[rank]):
            return
        needs = needed(schedules[rank][at[rank]], rank, p, chunks)
        for need in needs:
            if need not in done:
                waiting.setdefault(need, []).append(rank)
                return
        heapq.heappush(ready, (max([free[rank], *(done[need] for need in needs)]), rank))

    for rank in range(p):
        offer(rank)
    order = []
    while ready:
        start, rank = heapq.heappop(ready)
        action = schedules[rank][at[rank]]
        free[rank] = start + duration(rank, action)
        at[rank] += 1
        order.append(Event(rank, action, start, free[rank]))
        key = (action.kind, action.chunk * p + rank, action.microbatch)
        done[key] = free[rank]
        for other in (rank, *waiting.pop(key, ())):
            offer(other)
    stuck = [f"rank {r} at {schedules[r][at[r]]}" for r in range(p) if at[r] < len(schedules[r])]
    if stuck:
        raise ValueError(f"schedule deadlocks: {', '.join(stuck)} wait for each other; reorder their actions")
    return tuple(order)


def needed(action: Action, rank: int, stages: int, chunks: int) -> list[tuple[str, int, int]]:
    """What must be done before an action, as (kind, global stage, micro-batch)."""
    stage, i = action.chunk * stages + rank, action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, i)] if stage else []
    if action.kind == "B":
        return [("F", stage, i)] + ([("B", stage + 1, i)] if stage + 1 < stages * chunks else [])
    return [("B", stage, i)]


def _check_complete(
    schedules: Sequence[Sequence[Action]], chunks: int, microbatches: int | None
) -> set[tuple[int, int, int]]:
    """Every F once, every B once (or no B anywhere), W at most once, in order on each rank. Returns the (rank, chunk,
    micro-batch) whose backward is split."""
    if not schedules or chunks < 1:
        raise ValueError(f"{len(schedules)} schedules, chunks={chunks}: give one schedule per rank and chunks >= 1")
    named = [action.microbatch for actions in schedules for action in actions]
    m = 1 + max(named, default=-1) if microbatches is None else microbatches
    train = any(action.kind == "B" for actions in schedules for action in actions)
    split = set()
    for rank, actions in enumerate(schedules):
        seen: set[Action] = set()
        for action in actions:
            kind, chunk, i = action.kind, action.chunk, action.microbatch
            if kind not in ("F", "B", "W") or not 0 <= chunk < chunks or not 0 <= i < m:
                raise ValueError(
                    f"rank {rank}: {action} is no action of {chunks} chunks and {m} micro-batches; both count from 0"
                )
            if action in seen:
                raise ValueError(f"rank {rank}: {action} appears twice; schedule it once")
            first = {"B": "F", "W": "B"}.get(kind)
            if first and Action(first, chunk, i) not in seen:
                raise ValueError(f"rank {rank}: {action} comes before {Action(first, chunk, i)}; put it after")
            if kind == "W":
                split.add((rank, chunk, i))
            seen.add(action)
        wanted = [Action(kind, c, i) for kind in ("F", "B")[: 1 + train] for c in range(chunks) for i in range(m)]
        missing = [str(action) for action in wanted if action not in seen]
        if missing:
            raise ValueError(f"rank {rank}: {', '.join(missing[:8])} missing from the schedule; schedule each once")
    return split


def _per_stage(kind: str, cost: Cost, stages: int) -> list[float]:
    times = [float(cost)] * stages if isinstance(cost, int | float) else [float(c) for c in cost]
    if len(times) != stages or min(times) < 0:
        raise ValueError(f"times of {kind}: {times} are not {stages} numbers >= 0; give one, or one per global stage")
    return times


def _peak_live(actions: Sequence[Action]) -> int:
    """Forward-only keeps nothing. A split backward keeps its graph until W."""
    held = {(a.chunk, a.microbatch): a.kind for a in actions if a.kind != "F"}  # the last of B, W frees
    live = peak = 0
    for action in actions:
        last = held.get((action.chunk, action.microbatch))
        if last is None:
            continue
        live += (action.kind == "F") - (action.kind == last)
        peak = max(peak, live)
    return peak
