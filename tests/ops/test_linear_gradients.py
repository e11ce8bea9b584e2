"""Backward of the linear family: gradcheck, what it keeps, what it computes, how it sums, what it refuses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.ops import linear
from tests.ops.linear_cases import ACTIVATED, CASES, IMPLS, KERNELS, PATHS, name, serving, with_gradients

by_case = pytest.mark.parametrize("case", CASES, ids=name)
by_activation = pytest.mark.parametrize("case", ACTIVATED, ids=name)


@pytest.fixture(params=PATHS)
def path(request):
    with serving(request.param):
        yield request.param


@by_case
@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "triton"])  # which has no fp64
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(case, bias, impl):
    x, w, b, _ = case.inputs(3, 4, 5, torch.float64, bias)
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    with serving(impl):
        assert torch.autograd.gradcheck(lambda x, w, b=None: case(x, w, b), leaves)


def test_linear_has_a_second_derivative():
    leaves = [t.requires_grad_() for t in CASES[0].inputs(3, 4, 5, torch.float64)[:3]]
    assert torch.autograd.gradgradcheck(linear, leaves)


@by_activation
@pytest.mark.parametrize("impl", KERNELS)
def test_second_derivative_is_refused(case, impl):
    x, w, b, _ = case.inputs(2, 3, 4, torch.float32)
    x.requires_grad_()
    with serving(impl):
        (dx,) = torch.autograd.grad(case(x, w, b).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{case.op}.*reference"):
        dx.sum().backward()


@by_activation
@pytest.mark.parametrize("impl", KERNELS)
def test_both_outputs_of_the_raw_operator_have_gradients(case, impl):
    x, w, b, dy = case.inputs(5, 7, 3, torch.float32)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    extra = torch.randn(5, 3 * case.halves)
    y, pre = case.raw(impl)(*leaves, *case.form)
    plain = torch.nn.functional.linear(*leaves)
    for ours, theirs, up in [((y, pre), (case.act(plain), plain), (dy, extra)), ((pre,), (plain,), (extra,))]:
        got = torch.autograd.grad(ours, leaves, up, retain_graph=True)
        for g, r in zip(got, torch.autograd.grad(theirs, leaves, up, retain_graph=True), strict=True):
            torch.testing.assert_close(g, r, rtol=1e-5, atol=1e-5)


@by_case
def test_only_what_requires_a_gradient_is_kept(case):
    x, w, b, _ = case.inputs(6, 10, 7, torch.float32)
    for wanted in ([0], [1], [2], [0, 2], [1, 2]):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, w, b))]
        y = case(*leaves)
        kept = [t for t in y.grad_fn.saved_tensors if t is not None] if hasattr(y.grad_fn, "saved_tensors") else []
        assert len(kept) == (0 in wanted) + (1 in wanted) + (case.op != "linear"), "input of the other's, pre"
        y.sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i in wanted for i in range(3)]


class Called(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@by_case
def test_a_backward_computes_what_it_was_asked_for(case):
    """Though all require a gradient: a schedule asks for that of the inputs first, for that of the weights later."""
    x, w, b, dy = (t.requires_grad_() for t in case.inputs(6, 10, 7, torch.float32))
    h = x * 1  # not a leaf, as inside a model
    y = case(h, w, b)
    for asked, there, absent in [(x, "linear_dgrad", "linear_wgrad"), (w, "linear_wgrad", "linear_dgrad")]:
        with Called() as ran:
            torch.autograd.grad(y, asked, dy, retain_graph=True)
        assert there in ran.names and absent not in ran.names and "linear_dbias" not in ran.names
    with Called() as ran:
        y.backward(dy)
    assert "linear_dgrad" in ran.names and {"linear_wgrad", "linear_wgrad_dbias"} & set(ran.names)


def test_bias_gradient_does_not_depend_on_the_number_of_threads():
    for case in CASES:
        *product, dy = case.inputs(700, 5, 1100, torch.float32)
        x, w, b = ((4 * t).round() / 4 for t in product)  # exact in any order: a library's may depend on the threads
        before, found = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(with_gradients(case, x, w, b, dy)[3])
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@by_case
def test_sixteen_bit_bias_gradient_is_summed_in_fp32(case, path):
    """MB-04: 512 gradients of exactly 1 in bf16, which saturate at 256 when summed in bf16."""
    x = torch.zeros(512, 1, dtype=torch.bfloat16)
    w = torch.zeros(case.halves, 1, dtype=torch.bfloat16)
    b = torch.full((case.halves,), 30.0, dtype=torch.bfloat16).requires_grad_()
    with torch.no_grad():
        b[1:] = 1  # of SwiGLU: silu'(30) * 1
    case(x, w, b).sum().backward()
    assert b.grad[0].item() == 512
