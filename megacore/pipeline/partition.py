"""Cut a chain of layers into pipeline stages.

n links with costs c_0..c_{n-1}, p stages. Every stage is a contiguous, non-empty run of links, in order: a greedy
assignment of each link to the least loaded stage balances better and computes another model.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """The contiguous partition with the smallest maximum stage cost; among those the most even one (smallest sum of
    squared stage costs); among those the one with the lighter first stages, which hold the most live micro-batches.

    Exact: floats are dyadic fractions, so the sums are taken in whole numbers and equal costs tie exactly.
    Time O(p n^2). Raises ValueError for fewer links than stages, and for a cost that is negative or not finite.
    """
    n = len(costs)
    if stages < 1:
        raise ValueError(f"stages={stages} is not a positive whole number; give stages >= 1")
    if n < stages:
        raise ValueError(f"stages={stages} is more than the {n} links of the chain; use at most {n} stages")
    for i, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise ValueError(f"costs[{i}]={cost} is not a finite cost; give every link a cost >= 0")
    before = _prefix_sums(costs)
    limit = _smallest_maximum(before, stages)
    cuts = _most_even(before, stages, limit)
    return [range(start, stop) for start, stop in zip([0, *cuts], [*cuts, n], strict=True)]


def _prefix_sums(costs: Sequence[float]) -> list[int]:
    """Sums of the first i costs, scaled to whole numbers by their common denominator."""
    exact = [Fraction(cost) for cost in costs]
    scale = lcm(*(cost.denominator for cost in exact))
    sums = [0]
    for cost in exact:
        sums.append(sums[-1] + int(cost * scale))
    return sums


def _smallest_maximum(before: list[int], stages: int) -> int:
    """best[i] = smallest maximum over partitions of the first i links into k stages, for k = 1..p."""
    n = len(before) - 1
    best: list[int] = before[:]
    for k in range(2, stages + 1):
        best = [0] * k + [min(max(best[j], before[i] - before[j]) for j in range(k - 1, i)) for i in range(k, n + 1)]
    return best[n]


def _most_even(before: list[int], stages: int, limit: int) -> list[int]:
    """Where stages 1..p-1 start: least sum of squares with no stage above `limit`; earliest cuts among ties."""
    n = len(before) - 1
    best: list[int | None] = [None] * n + [0]  # links i.. in k stages; None: not possible within the limit
    choices: list[list[int]] = []
    for k in range(1, stages + 1):
        now: list[int | None] = [None] * (n + 1)
        cut = [n] * (n + 1)
        for i in range(n - k + 1):
            for j in range(i + 1, n - k + 2):
                cost, rest = before[j] - before[i], best[j]
                if cost > limit:
                    break
                if rest is not None and (now[i] is None or cost * cost + rest < now[i]):
                    now[i], cut[i] = cost * cost + rest, j
        best = now
        choices.append(cut)
    cuts, at = [], 0
    for cut in reversed(choices[1:]):
        at = cut[at]
        cuts.append(at)
    return cuts
