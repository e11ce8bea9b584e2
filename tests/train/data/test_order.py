"""MB-20: the order of samples is a function of the consumed count, whatever stopped, resumed or changed its layout."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.train.data import Order, check_split, consumed_after, global_batch_size, micro_batches
from megacore.train.data.order import mix, permute
from tests.train.numbered import Numbered

ROOT = Path(__file__).parents[3]
SAMPLES, GLOBAL, STEPS, RAMP = 10, 4, 8, ((6, 2),)


def log(first, last, dp, shuffle, ramp=(), micro=1):
    """Ids of each step first..last-1, in rank order: what a run that resumes at step `first` consumes."""
    data, order = Numbered(SAMPLES), Order(SAMPLES, seed=5, shuffle=shuffle)
    consumed, steps = consumed_after(first, GLOBAL, ramp), []
    for step in range(first, last):
        size = global_batch_size(consumed, GLOBAL, ramp)
        batches = [micro_batches(data, order, consumed, size, r, dp, micro, step) for r in range(dp)]
        steps.append([int(i) for rank in batches for mb in rank for i in mb.ids[:, 0]])
        assert [int(k) for rank in batches for mb in rank for k in mb.samples] == list(range(consumed, consumed + size))
        consumed += size
    return steps


@pytest.fixture(scope="module")
def resumed():
    """The same logs from step 3 and step 6 in a new process (with another hash seed)."""
    code = "import json; from tests.train.data.test_order import log; print(json.dumps({f'{s} {d} {h}': log(s, 8, d, h)"
    code += " for s in (3, 6) for d in (1, 2, 4) for h in (0, 1)}))"
    env = {"PYTHONHASHSEED": "99", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop", [3, 6])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_resumed_equals_uninterrupted(resumed, shuffle, stop, dp):
    whole = log(0, STEPS, 2, shuffle)
    assert resumed[f"{stop} {dp} {int(shuffle)}"] == whole[stop:]  # in rank order: stronger than as a set


def test_epochs():
    ids = [i for step in log(0, STEPS, 2, True) for i in step]
    epochs = [ids[i : i + SAMPLES] for i in range(0, 30, SAMPLES)]
    assert all(sorted(e) == list(range(SAMPLES)) for e in epochs)
    assert len({tuple(e) for e in [*epochs, list(range(SAMPLES))]}) == 4
    assert [i for step in log(0, STEPS, 2, False) for i in step] == [k % SAMPLES for k in range(32)]
    assert ids != [i for i in Order(SAMPLES, seed=6).indices(0, 32)], "the seed has no effect"


def test_batch_size_ramp():
    steps = log(0, STEPS, 2, True, RAMP)
    assert [len(s) for s in steps] == [2, 2, 2, 4, 4, 4, 4, 4]
    assert [i for s in steps for i in s] == Order(SAMPLES, seed=5).indices(0, 26).tolist()
    assert log(2, STEPS, 1, True, RAMP) == steps[2:] and log(5, STEPS, 2, True, RAMP) == steps[5:]


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 40)), max_size=4, unique_by=lambda r: r[0]).map(sorted),
    st.integers(1, 64),
    st.integers(0, 60),
)
def test_consumed_is_the_sum_of_the_batch_sizes(ramp, final, steps):
    consumed = 0
    for _ in range(steps):
        consumed += global_batch_size(consumed, final, ramp)
    assert consumed_after(steps, final, ramp) == consumed


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 40))
def test_each_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(Order(n, seed).indices(epoch * n, n).tolist()) == list(range(n))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 1000), st.integers(0, 60), st.booleans())
def test_any_window_equals_single_reads(n, seed, start, count, shuffle):
    order = Order(n, seed, shuffle)
    assert order.indices(start, count).tolist() == [order.index(k) for k in range(start, start + count)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 50), st.integers(0, 30))
def test_assignment_does_not_depend_on_dp(dp, micro, extra, step):
    size = dp + extra
    data, order = Numbered(37), Order(37, 3)
    ranks = [micro_batches(data, order, 11, size, r, dp, micro, step) for r in range(dp)]
    rows = [int(i) for rank in ranks for mb in rank for i in mb.ids[:, 0]]
    assert rows == order.indices(11, size).tolist()
    assert [int(k) for rank in ranks for mb in rank for k in mb.samples] == list(range(11, 11 + size))
    assert all(len(mb.ids) == micro for rank in ranks for mb in rank[:-1]) and all(rank for rank in ranks)
    assert max(sum(len(mb.ids) for mb in r) for r in ranks) - min(sum(len(mb.ids) for mb in r) for r in ranks) <= 1


def test_large_orders_need_no_memory_and_do_not_wrap():
    n = 2**40 + 7
    got = Order(n, 1).indices(3 * n - 2, 5)
    assert got.dtype == np.int64 and got.min() >= 0 and got.max() < n and len(set(got.tolist())) == 5


def test_shuffle_is_uniform_enough():
    """Each sample at each place of 2 400 epochs of 5: chi-squared of 16 degrees of freedom below its 0.1 % quantile."""
    n, epochs = 5, 2_400
    got = Order(n, 123).indices(0, n * epochs).reshape(epochs, n)
    counts = np.stack([np.bincount(got[:, place], minlength=n) for place in range(n)])
    assert ((counts - epochs / n) ** 2 / (epochs / n)).sum() < 39.25
    assert len({tuple(r) for r in got}) == 120, "some of the 5! permutations never occur"


def test_order_is_pinned():
    """Other numbers here mean another data order in every run that resumes: never change them, add a second order."""
    assert Order(10, seed=0).indices(0, 20).tolist() == PINNED
    assert permute(np.arange(5), 5, mix(1, 2)).tolist() == PINNED_FIVE


PINNED = [8, 2, 7, 1, 3, 0, 4, 5, 6, 9, 9, 4, 3, 1, 7, 0, 8, 5, 2, 6]
PINNED_FIVE = [4, 2, 1, 3, 0]


def test_refusals():
    with pytest.raises(ValueError, match="samples=0"):
        Order(0)
    with pytest.raises(ValueError, match="start=-1"):
        Order(3).indices(-1, 2)
    with pytest.raises(
        ValueError, match="global_batch=2 has no sample for each of dp=4 ranks; give global_batch >= 4 or dp <= 2"
    ):
        check_split(8, 4, 1, ramp=((6, 2),))
    with pytest.raises(ValueError, match="micro_batch=0"):
        check_split(8, 4, 0)
    with pytest.raises(ValueError, match="do not rise"):
        check_split(8, 1, 1, ramp=((6, 2), (3, 4)))
    with pytest.raises(ValueError, match="a batch of 0 samples"):
        check_split(8, 1, 1, ramp=((6, 0),))
