"""Pipeline schedules as data: the list of actions of one rank, made by a pure function.

p stages (ranks of one pipeline group), m micro-batches, v chunks of layers per rank. Chunk c of rank r is global stage
c*p + r: activations go from rank to rank and wrap from the last to the first between chunks.

    F   forward of one micro-batch through one chunk
    B   backward; where the schedule has no W for the micro-batch, of inputs and weights, else of inputs alone
    W   gradients of the weights, some time after B

A schedule is any callable (rank, stages, microbatches) -> list[Action]; `megacore.pipeline.simulate` checks it, and
`megacore.pipeline.Executor` obeys it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = Callable[[int, int, int], list[Action]]


def gpipe(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Every forward, then every backward. Bubble (p-1)/(m+p-1); all m micro-batches are live at once."""
    _check(rank, stages, microbatches)
    order = range(microbatches)
    return [Action("F", 0, i) for i in order] + [Action("B", 0, i) for i in order]


def one_f_one_b(rank: int, stages: int, microbatches: int) -> list[Action]:
    """min(p-1-rank, m) forwards, then one forward and one backward in turn, then the remaining backwards.

    The bubble is GPipe's, (p-1)/(m+p-1), but at most min(p-rank, m) micro-batches are live. Backwards run in the order
    of the micro-batches, as in GPipe, so both add weight gradients in the same order and agree bit for bit."""
    _check(rank, stages, microbatches)
    warmup = min(stages - 1 - rank, microbatches)
    actions = [Action("F", 0, i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        actions += [Action("F", 0, warmup + i), Action("B", 0, i)]
    return actions + [Action("B", 0, i) for i in range(microbatches - warmup, microbatches)]


def forward_only(rank: int, stages: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """Evaluation. With several chunks, p micro-batches at a time pass through all of them, so that the ranks stay busy
    and few micro-batches wait between chunks."""
    _check(rank, stages, microbatches)
    rounds = (range(i, min(i + stages, microbatches)) for i in range(0, microbatches, stages))
    return [Action("F", chunk, i) for group in rounds for chunk in range(chunks) for i in group]


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}  # those that train


def _check(rank: int, stages: int, microbatches: int) -> None:
    if not 0 <= rank < stages:
        raise ValueError(f"rank={rank} is not a stage of a pipeline of {stages}; ranks are 0..{stages - 1}")
    if microbatches < 0:
        raise ValueError(f"microbatches={microbatches} is negative; give 0 or more")
