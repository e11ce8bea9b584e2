"""The messages of a schedule, and one order in which every rank can post them.

The simulator yields one global order of all actions. A message takes the position of the action that makes it, and each
rank posts its sends and receives by that position. Both ends of a pair of ranks then post the same messages in the same
order, whatever the schedule: on a backend that executes in order (NCCL) none waits behind a later one, and since every
action needs only what stands before it, the order ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megacore.pipeline.schedule import Action
from megacore.pipeline.simulate import Event

Key = tuple[Literal["F", "B"], int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """Activations going into F (kind F) or gradients going into B (kind B) of a global stage."""

    kind: Literal["F", "B"]
    stage: int  # that consumes it
    microbatch: int
    source: int  # ranks of the pipeline group
    target: int
    produced: int  # positions in the simulated order
    consumed: int

    @property
    def key(self) -> Key:
        return (self.kind, self.stage, self.microbatch)


@dataclass(frozen=True)
class Route:
    """A schedule seen from one rank."""

    actions: tuple[Action, ...]
    positions: tuple[int, ...]  # of the actions in the simulated order
    incoming: tuple[Message, ...]  # by position of the producer
    outgoing: dict[Key, Message]
    one_way: bool  # no two ranks send to each other on one communicator

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(chunk, micro-batch) whose weight gradient has an action of its own."""
        return frozenset((a.chunk, a.microbatch) for a in self.actions if a.kind == "W")

    @cached_property
    def last(self) -> frozenset[int]:
        """Indices of the actions that complete the weight gradients of a chunk."""
        final = {}
        for index, action in enumerate(self.actions):
            if action.kind == "W" or (action.kind == "B" and (action.chunk, action.microbatch) not in self.split):
                final[action.chunk] = index
        return frozenset(final.values())


def routes(order: Sequence[Event], stages: int, chunks: int) -> list[Route]:
    """One route per rank, from the order of `simulate`."""
    position = {(e.action.kind, e.action.chunk * stages + e.rank, e.action.microbatch): n for n, e in enumerate(order)}
    messages = []
    for (kind, stage, i), n in position.items():
        to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
        if 0 <= to < stages * chunks:
            messages.append(Message(kind, to, i, stage % stages, to % stages, n, position[kind, to, i]))
    found = []
    for rank in range(stages):
        mine = [(n, event.action) for n, event in enumerate(order) if event.rank == rank]
        found.append(
            Route(
                actions=tuple(action for _, action in mine),
                positions=tuple(n for n, _ in mine),
                incoming=tuple(m for m in messages if m.target == rank != m.source),
                outgoing={m.key: m for m in messages if m.source == rank},
                one_way=stages != 2 or chunks == 1,
            )
        )
    return found
