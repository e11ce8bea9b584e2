"""Peak memory is measured right on calls whose use of memory is known."""

import mmap

import pytest
import torch

from bench.memory import peak_extra

MIB = 1 << 20


def block(mib):
    return torch.ones(mib * MIB // 4)


def results_only():
    return [block(8)]


def scratch_given_back():
    block(12)
    return [block(8)]


def two_at_once():
    a, b = block(12), block(6)
    del a, b
    return [block(30)]


def beside_the_result():
    y = block(8)
    block(5)
    return [y]


def past_torchs_allocator():
    with mmap.mmap(-1, 16 * MIB) as scratch:
        for _ in range(16):
            scratch.write(b"x" * MIB)
    return [block(1)]


KNOWN = [
    (results_only, 0),
    (scratch_given_back, 4),
    (two_at_once, 0),
    (beside_the_result, 5),
    (past_torchs_allocator, 15),
]


@pytest.mark.parametrize(("run", "mib"), KNOWN, ids=lambda value: getattr(value, "__name__", value))
def test_known_use(run, mib):
    assert peak_extra(run, []) == pytest.approx(mib * MIB, abs=1.2 * MIB)


def test_gradients_and_what_lies_in_an_input_cost_nothing():
    x = block(8).requires_grad_()

    def gradient():
        y = x * x
        return [y, *torch.autograd.grad(y, [x], y.detach())]

    assert peak_extra(gradient, [x]) == pytest.approx(8 * MIB, abs=1.2 * MIB)  # x dy, before it is doubled
    assert peak_extra(lambda: [x.data.mul_(1.0)], [x]) < MIB
