from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.pipeline import partition


def brute_force(costs, stages):
    """(largest stage, sum of squares) of the best cut, over all of them."""
    n = len(costs)
    found = []
    for cuts in combinations(range(1, n), stages - 1):
        sums = [sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, n), strict=True)]
        found.append((max(sums), sum(s * s for s in sums)))
    return min(found)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_cut_is_better(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    ranges = partition(costs, stages)
    assert len(ranges) == stages
    assert all(len(r) > 0 for r in ranges)
    assert [i for r in ranges for i in r] == list(range(len(costs)))  # in order, none lost, none twice
    sums = [sum(costs[i] for i in r) for r in ranges]
    assert (max(sums), sum(s * s for s in sums)) == brute_force(costs, stages)


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=12))
def test_measured_costs(costs):
    ranges = partition(costs, 4)
    assert [i for r in ranges for i in r] == list(range(len(costs)))
    largest = max(sum(costs[i] for i in r) for r in ranges)
    assert largest <= brute_force(costs, 4)[0] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(30, 4, [7, 7, 8, 8]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (4, 4, [1, 1, 1, 1]), (6, 4, [1, 1, 2, 2]), (5, 1, [5])],
)
def test_remainders(layers, stages, sizes):
    assert [len(r) for r in partition([0.1] * layers, stages)] == sizes  # 0.1 + 0.2 != 0.3 must not break a tie


def test_order_is_kept_where_a_greedy_assignment_would_balance_better():
    # Heaviest first to the least loaded: {9}, {5, 4}, largest 9, but 5 and 4 are not neighbours.
    assert partition([5, 9, 4], 2) == [range(0, 1), range(1, 3)]


def test_heavy_head():
    assert partition([1, 1, 1, 1, 1, 1, 4], 3) == [range(0, 3), range(3, 6), range(6, 7)]


def test_refusals():
    with pytest.raises(ValueError, match="stages=4 is more than the 3 links"):
        partition([1, 1, 1], 4)
    with pytest.raises(ValueError, match="stages=0"):
        partition([1], 0)
    with pytest.raises(ValueError, match=r"costs\[1\]=-1"):
        partition([1, -1], 1)
    with pytest.raises(ValueError, match=r"costs\[0\]=nan"):
        partition([float("nan")], 1)
