"""Weight gradients added to main-gradient buffers: at once, deferred, by autograd; views, ties, schedules, refusals."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacore.ops import WeightGrads, linear, linear_gelu
from megacore.pipeline import Executor
from megacore.pipeline.schedule import Action
from tests.ops.linear_cases import CASES, IMPLS, PATHS, SERVED, name, serving
from tests.pipeline.chain import MB

by_case = pytest.mark.parametrize("case", CASES, ids=name)


def main_like(t: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    return torch.full(t.shape, fill, dtype=torch.float64 if t.dtype == torch.float64 else torch.float32)


def leaves_of(case, dtype, bias=True, rows=6):
    x, w, b, dy = case.inputs(rows, 10, 7, dtype, bias)
    return [t if t is None else t.requires_grad_() for t in (x, w, b)], dy


def through_main(case, leaves, dy, defer, steps=2):
    """dx of the last step, and the buffers after `steps` micro-batches."""
    x, w, b = leaves
    mains = main_like(w), main_like(b)
    grads = WeightGrads(defer).into(w, mains[0]).into(b, mains[1])
    for i in range(steps):
        y = case(x * (i + 1), w, b, weight_grad=grads)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)  # asks for no weight gradient, so adds none
        assert len(grads) == (i if defer else 0)
        y.backward(dy)
    assert len(grads) == (steps if defer else 0) and w.grad is None and b.grad is None
    assert grads.run() == (steps if defer else 0) and grads.run() == 0
    return dx, *mains


@by_case
@pytest.mark.parametrize(("path", "dtype"), SERVED)
def test_at_once_is_deferred_is_autograd(case, dtype, path):
    leaves, dy = leaves_of(case, dtype)
    with serving(path):
        now, later = (through_main(case, leaves, dy, defer) for defer in (False, True))
        for t in leaves:
            t.grad = None
        for i in range(2):
            case(leaves[0] * (i + 1), *leaves[1:]).backward(dy)
    for a, b in zip(now, later, strict=True):
        assert torch.equal(a, b)
    tolerance = 8 * torch.finfo(dtype).eps
    for got, want in zip(now[1:], [t.grad for t in leaves[1:]], strict=True):
        scale = want.abs().max().item()
        torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=tolerance * scale)


@by_case
@pytest.mark.parametrize("impl", IMPLS)
def test_one_product_is_the_bits_of_autograds(case, impl):
    """Into zeros, where the dtype of the sum is that of the product; and dx always."""
    leaves, dy = leaves_of(case, torch.float32)
    with serving(impl):
        got = through_main(case, leaves, dy, True, steps=1)
        want = torch.autograd.grad(case(*leaves), leaves, dy)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("path", [*PATHS, "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_not_rounded_to_sixteen_bits(path, dtype):
    x = torch.tensor([[1.0], [2.0**-12]], dtype=dtype, requires_grad=True)
    w = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    main = main_like(w)
    with serving(path):
        grads = WeightGrads().into(w, main)
        y = linear(x, w, weight_grad=grads)
        for _ in range(256):
            y.backward(torch.ones(2, 1, dtype=dtype), retain_graph=True)
    assert main.item() == 256 * (1 + 2.0**-12)  # a 16-bit dW is 1, and a bf16 sum stops at 256


def test_many_rows_and_columns_in_panels():
    """Past the panels of csrc/cpu/gemm.cpp, and to what was there before."""
    x, w, _, dy = CASES[0].inputs(2050, 3, 4100, torch.bfloat16)
    main = main_like(w, 1.5)
    torch.ops.megacore.linear_wgrad_(dy, x, main)
    truth = 1.5 + dy.double().t() @ x.double()
    torch.testing.assert_close(main.double(), truth, rtol=1e-4, atol=1e-4)


def test_a_weight_used_twice_gets_both():
    x, w, _, _ = CASES[0].inputs(6, 7, 7, torch.float64)
    w.requires_grad_()
    for defer in (False, True):
        main = main_like(w)
        grads = WeightGrads(defer).into(w, main)
        y = linear_gelu(linear_gelu(x, w, weight_grad=grads), w, weight_grad=grads)
        y.sum().backward()
        assert grads.run() == 2 * defer
        (want,) = torch.autograd.grad(linear_gelu(linear_gelu(x, w), w).sum(), w)
        torch.testing.assert_close(main, want)


@pytest.mark.parametrize("impl", IMPLS)
def test_views_of_a_parameter_reach_its_buffer(impl):
    """A transposed weight ([K, N] of a Conv1D), and the parts of a fused one."""
    x, w, _, dy = CASES[0].inputs(6, 10, 7, torch.float32)
    conv, fused = w.t().contiguous().requires_grad_(), torch.cat([w, 2 * w, 3 * w]).requires_grad_()
    mains = torch.zeros(1000)  # one flat buffer, as the trainer has
    main_conv, main_fused = mains[16:86].view(10, 7), mains[128:338].view(21, 10)
    grads = WeightGrads().into(conv, main_conv).into(fused, main_fused)
    with serving(impl):
        linear(x, conv.t(), weight_grad=grads).backward(dy)
        linear(x, fused[7:14], weight_grad=grads).backward(dy)
    torch.testing.assert_close(main_conv, (dy.t() @ x).t())
    torch.testing.assert_close(main_fused[7:14], dy.t() @ x)
    assert not main_fused[:7].any() and not main_fused[14:].any() and not mains[338:].any()
    assert conv.grad is None and fused.grad is None
    odd = nn.Parameter(w.clone().t())  # a parameter that is not contiguous, though its buffer is
    main_odd = torch.zeros(10, 7)
    grads.into(odd, main_odd)
    with serving(impl):
        linear(x, odd.t(), weight_grad=grads).backward(dy)
    torch.testing.assert_close(main_odd, main_conv)
    with pytest.raises(ValueError, match="does not know"):
        linear(x, odd[:, 1:].t(), weight_grad=grads)


def test_what_is_frozen_or_not_registered():
    (x, w, b), dy = leaves_of(CASES[1], torch.float32)
    main = main_like(w)
    grads = WeightGrads().into(w, main)
    linear_gelu(x, w, b, weight_grad=grads).backward(dy)
    assert w.grad is None and main.any() and b.grad is not None and x.grad is not None  # the bias is autograd's
    other = WeightGrads()
    with pytest.raises(ValueError, match=r"linear_gelu: weight is \[7, 10\] .*wanted a parameter registered"):
        linear_gelu(x, w, b, weight_grad=other)
    with torch.no_grad():
        assert torch.equal(linear_gelu(x, w, b, weight_grad=other), linear_gelu(x, w, b))
    frozen, was = w.detach(), x.grad.clone()
    linear_gelu(x, frozen, b, weight_grad=other).backward(dy)
    assert torch.equal(x.grad, 2 * was)


@pytest.mark.parametrize("impl", IMPLS)
def test_under_autocast_the_buffer_of_the_fp32_parameter_is_meant(impl):
    (x, w, b), dy = leaves_of(CASES[1], torch.float32)
    mains = main_like(w), main_like(b)
    grads = WeightGrads(defer=True).into(w, mains[0]).into(b, mains[1])
    with serving(impl), torch.autocast("cpu", torch.bfloat16):
        y = linear_gelu(x, w, b, weight_grad=grads)
        assert y.dtype == torch.bfloat16
        y.backward(dy.bfloat16())
        grads.run()
        want = torch.autograd.grad(linear_gelu(x, w, b), (w, b), dy.bfloat16())
    assert x.grad.dtype == torch.float32
    for got, ref in zip(mains, want, strict=True):
        torch.testing.assert_close(got, ref, rtol=0.02, atol=0.05)


def test_run_frees_what_backward_left():
    (x, w, _), dy = leaves_of(CASES[0], torch.float32)
    grads = WeightGrads(defer=True).into(w, main_like(w))
    h = x * 1
    linear(h, w, weight_grad=grads).backward(dy)
    seen = weakref.ref(h)
    del h
    gc.collect()
    assert seen() is not None or len(grads) == 1
    grads.run()
    gc.collect()
    assert len(grads) == 0 and seen() is None


class Rows(TorchDispatchMode):
    """Strides of the buffers that products are added to."""

    def __init__(self):
        super().__init__()
        self.strides = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.megacore.linear_wgrad_.default:
            self.strides.append(args[2].stride())
        return func(*args, **(kwargs or {}))


def test_the_operator_sees_rows_of_a_buffer_that_is_stored_transposed():
    """The CUDA operator takes no other buffer."""
    stored, x = torch.randn(5, 6, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    main, seen = main_like(stored), Rows()
    grads = WeightGrads(defer=True).into(stored, main)
    linear(x, stored.t(), weight_grad=grads).sum().backward()
    with seen:
        grads.run()
    assert seen.strides == [(6, 1)]
    torch.testing.assert_close(main, x.detach().sum((0, 1)).unsqueeze(1).expand(5, 6))


@pytest.mark.parametrize("changed", ["input", "upstream gradient"])
def test_a_factor_changed_before_run_is_refused(changed):
    (x, w, _), dy = leaves_of(CASES[0], torch.float32)
    grads = WeightGrads(defer=True).into(w, main_like(w))
    h = x * 1
    linear(h, w, weight_grad=grads).backward(dy)
    with torch.no_grad():
        (h if changed == "input" else dy).zero_()
    with pytest.raises(RuntimeError, match=f"the {changed} of a linear was changed in place"):
        grads.run()


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (torch.zeros(10, 7), r"\[10, 7\] .*wanted \[7, 10\]"),
        (torch.zeros(7, 10, dtype=torch.bfloat16), "bfloat16.*wanted .*float32"),
        (torch.zeros(7, 10, device="meta"), "meta.*cpu"),
        (torch.zeros(7, 10, requires_grad=True), "requires_grad=True"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(main, words):
    with pytest.raises(ValueError, match="WeightGrads.into: main_grad is .*" + words) as caught:
        WeightGrads().into(torch.zeros(7, 10, dtype=torch.bfloat16), main)
    assert "\n" not in str(caught.value)


class Chunk(nn.Module):
    def __init__(self, first: bool, grads: WeightGrads | None):
        super().__init__()
        g = torch.Generator().manual_seed(int(first))
        self.first, self.grads = first, grads
        self.weight = nn.Parameter(torch.randn(8, 8, generator=g, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))  # its gradient is autograd's

    def forward(self, tensors, mb):
        x = torch.sin(mb.ids.double()) if self.first else tensors["hidden"]
        return {"hidden": linear_gelu(x * self.scale, self.weight, weight_grad=self.grads)}


def split(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Every micro-batch through both chunks; weight gradients last."""
    actions = [Action("F", chunk, i) for i in range(microbatches) for chunk in (0, 1)]
    actions += [Action("B", chunk, i) for i in range(microbatches) for chunk in (1, 0)]
    return actions + [Action("W", chunk, i) for i in range(microbatches) for chunk in (1, 0)]


def whole(rank: int, stages: int, microbatches: int) -> list[Action]:
    return [action for action in split(rank, stages, microbatches) if action.kind != "W"]


@pytest.mark.parametrize("schedule", [whole, split])
@pytest.mark.parametrize("defer", [False, True])
def test_under_the_executor(schedule, defer):
    """A schedule that splits backward walks the graph twice: each product is added once all the same."""
    mbs = [MB(torch.arange(16).view(2, 8) + i, i) for i in range(3)]

    def loss(outputs, mb):
        return (outputs["hidden"] ** 2).sum() / 3

    plain = [Chunk(True, None), Chunk(False, None)]
    for mb in mbs:
        loss(plain[1](plain[0]({}, mb), mb), mb).backward()
    stores = [WeightGrads(defer), WeightGrads(defer)]
    chunks = [Chunk(True, stores[0]), Chunk(False, stores[1])]
    mains = [main_like(c.weight) for c in chunks]
    for store, chunk, main in zip(stores, chunks, mains, strict=True):
        store.into(chunk.weight, main)
    Executor(chunks, schedule=schedule).step(mbs, loss)
    assert [store.run() for store in stores] == [3 * defer] * 2
    for chunk, main, other in zip(chunks, mains, plain, strict=True):
        torch.testing.assert_close(main, other.weight.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(chunk.scale.grad, other.scale.grad, rtol=1e-12, atol=1e-12)
        assert chunk.weight.grad is None
