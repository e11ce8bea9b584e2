"""Micro-batches: shapes, contexts, and valid tokens of the whole global batch known before the first forward."""

import numpy as np
import pytest
import torch

from megacore.train.data import GPTDataset, Order, micro_batches, stack, valid_tokens
from megacore.train.data.dataset import IGNORE
from tests.train.data.test_indexed import write


class Masked:
    """Sample i counts its first i % 4 targets only."""

    seq_length = 4

    def __len__(self):
        return 12

    def pair(self, index):
        targets = np.where(np.arange(4) < index % 4, index, IGNORE)
        return np.full(4, index), targets

    def valid(self, index):
        return index % 4


def test_fields_of_a_micro_batch(tmp_path):
    data = GPTDataset(write(tmp_path / "d", [np.arange(100)]), 5)
    order = Order(len(data), 0, shuffle=False)
    one, two = micro_batches(data, order, 4, 6, dp_rank=1, dp_size=2, micro_batch=2, step=9)
    assert one.ids.tolist() == [list(range(35, 40)), list(range(40, 45))]  # sample 7 = consumed 4 + row 3
    assert torch.equal(one.targets, one.ids + 1)
    assert (one.samples.tolist(), two.samples.tolist(), one.positions.tolist()) == ([7, 8], [9], [0, 1, 2, 3, 4])
    assert (one.step, one.index, two.index, one.signature, two.signature) == (9, 0, 1, (2, 5), (1, 5))
    assert {t.dtype for t in (one.ids, one.targets, one.samples, one.positions)} == {torch.int64}
    assert all(t.is_contiguous() for t in (one.ids, one.targets))
    assert valid_tokens(data, order, 4, 6) == 30


@pytest.mark.parametrize("dp, micro", [(1, 1), (1, 7), (2, 2), (3, 1), (4, 2), (7, 3)])
def test_valid_tokens_of_the_global_batch_are_the_sum_over_ranks(dp, micro):
    data, order = Masked(), Order(12, 2)
    ranks = [micro_batches(data, order, 9, 7, r, dp, micro) for r in range(dp)]
    assert sum(mb.valid for rank in ranks for mb in rank) == valid_tokens(data, order, 9, 7)
    assert len({sum(mb.valid for mb in rank) for rank in ranks}) > 1 or dp == 1, (
        "valid counts should differ in this test"
    )


def test_stack_is_the_serial_batch():
    ids, targets = stack(Masked(), np.array([3, 1]))
    assert ids.tolist() == [[3] * 4, [1] * 4] and targets.tolist() == [[3, 3, 3, IGNORE], [1, IGNORE, IGNORE, IGNORE]]


def test_a_rank_without_samples_is_refused():
    with pytest.raises(ValueError, match="global_batch=3 has no sample for each of dp=4"):
        micro_batches(Masked(), Order(12), 0, 3, 0, 4)


def test_an_exception_of_the_dataset_is_not_swallowed():
    class Broken(Masked):
        def pair(self, index):
            raise ValueError(f"sample {index}")

    with pytest.raises(ValueError, match="^sample 7$"):
        micro_batches(Broken(), Order(12, shuffle=False), 7, 1)
