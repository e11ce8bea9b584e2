"""linear_cross_entropy in one process: values and gradients against fp64 and known numbers, views, repeated backwards,
memory. In Triton's interpreter too: see test_linear_cross_entropy_contract.py."""

import math
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megacore.ops import cross_entropy, implementations, linear_cross_entropy, use
from megacore.ops.linear_cross_entropy import BLOCK, chunk_rows_for
from tests.ops.cross_entropy_cases import CASES, OPTIONS
from tests.ops.linear_cross_entropy_cases import gradients, inputs, ours, torchs, upstream
from tests.oracle import DTYPES, assert_as_good_as_torch, offset_by_one, views

REDUCTIONS = ["none", "sum", "mean"]
IMPLS = implementations("linear_cross_entropy")


@pytest.fixture(params=IMPLS)
def impl(request):
    """The implementation that serves linear_cross_entropy during the test."""
    with use(request.param, "linear_cross_entropy"):
        yield request.param


def equal(got, want):
    assert len(got) == len(want)
    for ours_, theirs in zip(got, want, strict=True):
        assert torch.equal(ours_, theirs)


def close(got, want, tolerance=1e-12):
    assert len(got) == len(want)
    for ours_, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours_.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


# ---- right values ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_matches_fp64(impl, reduction, dtype):
    """Chunks of three rows, so that gradients are sums over chunks. So many trials make torch's own error typical."""
    sizes, slow = [(1, 1, 2), (7, 5, 3), (10, 13, 127), (6, 129, 40)], impl == "triton"
    for rows, width, vocab in sizes[2:3] if slow else sizes:
        for options in OPTIONS[1:2] if slow else OPTIONS:
            found = []
            for seed in range(12 if slow else 60):
                case = inputs(rows, width, vocab, dtype, seed)
                case[3][case[3] == -100] = options.get("ignore_index", -100)
                how = {"reduction": reduction, "scale": 0.5, **options}
                run = ours(*case, chunk_rows=3, **how), torchs(*case, dtype=torch.float64, **how), torchs(*case, **how)
                found.append(run)
            for which in range(4):
                got, truth, measure = (torch.stack([f[side][which] for f in found]) for side in range(3))
                if which == 0 and dtype in (torch.bfloat16, torch.float16):
                    measure = measure.float()
                assert_as_good_as_torch(got, truth, measure)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_known_values(impl, case):
    """MB-01 to MB-04, MB-11: x is the identity, so weight^T is the logits and dweight^T their gradient."""
    if not torch.isfinite(case.logits).all():
        pytest.skip("0 * inf in the product")
    rows = len(case.target)
    weights = torch.ones(rows) if case.weights is None else case.weights
    shard, _ = case.shard(0, 1)
    weight = shard.nan_to_num(5.0).t().contiguous().requires_grad_()
    x = torch.eye(rows, dtype=weight.dtype)
    for chunk in (1, 2, rows):
        how = {"vocab_size": case.vocab_size, "reduction": "none", "chunk_rows": chunk, **case.options}
        loss = linear_cross_entropy(x, weight, case.target, **how)
        (gradient,) = torch.autograd.grad((loss * weights).sum(), weight)
        case.check(loss.detach(), gradient.t())
        assert not gradient[case.vocab_size :].any(), "padding has a gradient"


def test_sums_over_chunks_are_not_kept_in_16_bits(impl):
    """MB-04: 300 rows of one gradient; 256 + 1 = 256 in bf16."""
    if impl == "triton":
        pytest.skip("slow in the interpreter, and the sums are not Triton's")
    rows = 300
    x, weight = torch.ones(rows, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(2, dtype=torch.bfloat16).requires_grad_()
    loss = linear_cross_entropy(
        x, weight, torch.zeros(rows, dtype=torch.int64), bias=bias, vocab_size=2, reduction="sum", chunk_rows=1, scale=2
    )
    loss.backward()
    want = torch.tensor([-300.0, 300.0]).bfloat16()
    assert torch.equal(weight.grad[:, 0], want) and torch.equal(bias.grad, want)
    assert abs(loss.item() - 600 * math.log(2)) < 1e-3


def test_nothing_to_learn_from(impl):
    """MB-02: all rows ignored, and an ignore_index that is an id."""
    for ignore in (-100, 0):
        x, weight, bias, _ = inputs()
        target = torch.full((9,), ignore)
        for reduction in REDUCTIONS:
            for got in ours(x, weight, bias, target, reduction=reduction, ignore_index=ignore, chunk_rows=4):
                assert not got.any()


def test_no_rows(impl):
    x, weight, bias, y = inputs(rows=0)
    for reduction in REDUCTIONS:
        loss, dx, dweight, dbias = ours(x, weight, bias, y, reduction=reduction)
        assert not loss.any() and dx.shape == (0, 7) and not dweight.any() and not dbias.any()
        assert dweight.shape == weight.shape and dbias.shape == bias.shape


def test_classes_of_minus_infinity(impl):
    x, weight, bias, y = inputs(dtype=torch.float64, ignored=False)
    bias[3] = bias[7] = -math.inf
    y[(y == 3) | (y == 7)] = 0
    y[2] = 3  # impossible, loss inf
    for reduction in REDUCTIONS:
        close(ours(x, weight, bias, y, reduction=reduction, chunk_rows=4), torchs(x, weight, bias, y, reduction))


def test_more_columns_than_a_block(impl):
    """The product runs over blocks of columns; 16-bit and padded too."""
    if impl == "triton":
        pytest.skip("slow in the interpreter, and the product is not Triton's")
    for vocab in (BLOCK, BLOCK + 1, 2 * BLOCK + 77):
        case = inputs(5, 6, vocab, torch.float64)
        close(ours(*case, chunk_rows=2, label_smoothing=0.1), torchs(*case, label_smoothing=0.1))
        x, weight, bias, y = case
        y.clamp_(max=vocab - 41)
        got = ours(x, weight, bias, y, vocab_size=vocab - 40, chunk_rows=2)
        close(got, [*ours(x, weight[:-40], bias[:-40], y)[:2], *got[2:]])
        assert not got[2][-40:].any() and not got[3][-40:].any()


# ---- shapes, views ----


def test_leading_dimensions(impl):
    x, weight, bias, y = inputs(12)
    flat = ours(x, weight, bias, y, reduction="none", chunk_rows=5)
    leaf = x.view(4, 3, 7).transpose(0, 1).detach().requires_grad_()
    loss = linear_cross_entropy(leaf, weight, y.view(4, 3).t(), bias=bias, vocab_size=11, reduction="none")
    assert loss.shape == (3, 4)
    loss.backward(upstream(flat[0]).view(4, 3).t())
    close([loss.detach().t().flatten(), leaf.grad.transpose(0, 1).reshape(12, 7)], flat[:2], 1e-6)
    assert linear_cross_entropy(x[0], weight, y[0], vocab_size=11, reduction="none").shape == ()


def test_rows_beyond_two_to_the_31(impl):
    """MB-21 (b), of x and of weight."""
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    x, weight, _, y = inputs(3, 64, 3, torch.bfloat16)
    want = ours(x, weight, None, y)
    close(ours(far.copy_(x), weight, None, y), want, 0)
    close(ours(x, far.copy_(weight), None, y), want, 0)


def test_more_rows_than_sixteen_bits_count(impl):
    """MB-21 (c)."""
    if impl == "triton":
        pytest.skip("test_cross_entropy.py has it")
    x, weight, bias, y = inputs(65537, 3, 4, torch.float64)  # a library's order of sums may depend on the rows
    want = torchs(x, weight, bias, y, "none")
    for chunk in (65536, None):
        close(ours(x, weight, bias, y, reduction="none", chunk_rows=chunk), want)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_views_give_the_bits_of_contiguous_copies(impl, reduction):
    """MB-23."""
    if impl == "reference":
        pytest.skip("the BLAS has other bits for a transposed weight, and F.linear makes no copy of it")
    x, weight, bias, y = inputs(6, 10, 12, bias=True)
    want = ours(x, weight, bias, y, reduction=reduction, chunk_rows=4)
    for view in views(x).values():
        equal(ours(view, weight, bias, y, reduction=reduction, chunk_rows=4), want)
    for view in views(weight).values():
        equal(ours(x, view, bias, y, reduction=reduction, chunk_rows=4), want)
    # a tensor that begins off a cache line is its own .contiguous(): MKL may sum it in another order
    close(ours(*map(offset_by_one, (x, weight, bias)), y, reduction=reduction, chunk_rows=4), want, 1e-5)
    equal(ours(x, weight, torch.stack([bias, bias], 1)[:, 1], y, reduction=reduction, chunk_rows=4), want)
    equal(ours(x, weight, bias, torch.stack([y, y], 1)[:, 0], reduction=reduction, chunk_rows=4), want)
    one = x[:1].expand(6, 10), weight[:1].expand(12, 10), bias[:1].expand(12)
    equal(ours(*one, y, reduction=reduction), ours(*(t.contiguous() for t in one), y, reduction=reduction))


def test_upstream_gradients_of_any_strides(impl):
    x, weight, bias, y = inputs(6)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]

    def run(g):
        loss = linear_cross_entropy(x, weight, y, bias=bias, vocab_size=11, reduction="none", chunk_rows=4)
        return torch.autograd.grad(loss, leaves, g)

    g = torch.randn(6, generator=torch.Generator().manual_seed(1))
    equal(run(torch.stack([g, g], 1)[:, 1]), run(g))
    equal(run(torch.tensor(2.0).expand(6)), run(torch.full((6,), 2.0)))
    assert not any(t.any() for t in run(torch.zeros(6)))


# ---- which gradients, how often ----


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_only_what_is_asked_for(impl, reduction):
    x, weight, bias, y = inputs()
    whole = dict(zip("xwb", ours(x, weight, bias, y, reduction=reduction, chunk_rows=4)[1:], strict=True))
    for names in ("x", "w", "b", "xw", "wb"):
        leaves = {n: t.detach().requires_grad_(n in names) for n, t in zip("xwb", (x, weight, bias), strict=True)}
        loss = linear_cross_entropy(
            leaves["x"], leaves["w"], y, bias=leaves["b"], vocab_size=11, reduction=reduction, chunk_rows=4
        )
        equal(gradients(loss, [leaves[n] for n in names])[1:], [whole[n] for n in names])


def products(run) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    return sum(e.count for e in trace.key_averages() if e.key in ("aten::mm", "aten::addmm"))


@pytest.mark.skipif("triton" in IMPLS, reason="the products are the same")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_products_of_forward_and_backward(reduction):
    """Three chunks. Evaluation computes the logits alone, a mean has its gradients in forward."""
    x, weight, _, y = inputs()
    how = {"vocab_size": 11, "reduction": reduction, "chunk_rows": 3}
    assert products(lambda: linear_cross_entropy(x, weight, y, **how)) == 3
    x.requires_grad_()
    with torch.no_grad():
        assert products(lambda: linear_cross_entropy(x, weight, y, **how)) == 3
    eager = reduction != "none"
    assert products(lambda: linear_cross_entropy(x, weight, y, **how)) == (6 if eager else 3)
    weight.requires_grad_()
    assert products(lambda: linear_cross_entropy(x, weight, y, **how)) == (9 if eager else 3)
    loss = linear_cross_entropy(x, weight, y, **how).sum()
    assert products(lambda: loss.backward()) == (0 if eager else 9)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice(impl, reduction):
    """The first backward scales its gradients in place and gives them away; the second must not see that."""
    x, weight, bias, y = inputs(dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = linear_cross_entropy(x, weight, y, bias=bias, vocab_size=11, reduction=reduction, chunk_rows=4).sum()
    first = torch.autograd.grad(loss, leaves, torch.tensor(3.0, dtype=torch.float64), retain_graph=True)
    kept = [t.clone() for t in first]
    for factor in (1.0, -2.0):
        again = torch.autograd.grad(loss, leaves, torch.tensor(factor, dtype=torch.float64), retain_graph=True)
        close(again, [factor / 3 * t for t in kept])
        equal(first, kept)
        again[0].zero_()  # whoever holds a gradient may write on it
    loss.backward()
    close([t.grad for t in leaves], [t / 3 for t in kept])


def test_backward_in_two_parts(impl):
    """As a schedule with a separate W asks: first of the inputs, later of the weights."""
    if impl == "reference":
        pytest.skip("plain torch")
    x, weight, _, y = inputs(dtype=torch.float64)
    want = ours(x, weight, None, y)
    x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, y, vocab_size=11)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    (dweight,) = torch.autograd.grad(loss, weight)
    close([dx, dweight], want[1:])


def test_a_second_backward_without_its_graph_is_torchs_error(impl):
    x, weight, _, y = inputs()
    loss = linear_cross_entropy(x.requires_grad_(), weight, y, vocab_size=11)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.skipif("triton" in IMPLS, reason="the same")
def test_the_gradient_of_the_weight_is_never_copied():
    """An upstream gradient of 1 is no pass over dweight, and autograd takes the tensor as it is."""
    x, weight, _, y = inputs()
    x.requires_grad_(), weight.requires_grad_()
    for factor in (1.0, 2.0):
        x.grad = weight.grad = None
        loss = linear_cross_entropy(x, weight, y, vocab_size=11, scale=0.25)
        made = loss.grad_fn.made
        places = [t.data_ptr() for t in made[:2]]
        version = made[1]._version
        del made
        (loss * factor if factor != 1 else loss).backward()
        assert [x.grad.data_ptr(), weight.grad.data_ptr()] == places
        assert weight.grad._version - version == (factor != 1)


def test_scale_is_a_factor_of_loss_and_gradients(impl):
    case = inputs(dtype=torch.float64)
    for reduction in REDUCTIONS:
        want = [0.125 * t for t in ours(*case, reduction=reduction)]
        close(ours(*case, reduction=reduction, scale=0.125), want)


def test_the_loss_is_that_of_cross_entropy(impl):
    x, weight, bias, y = inputs(dtype=torch.float64)
    with use(impl, "cross_entropy"):
        want = cross_entropy(x @ weight.t() + bias, y, vocab_size=11, label_smoothing=0.1, z_loss=0.01)
    got = linear_cross_entropy(
        x, weight, y, bias=bias, vocab_size=11, label_smoothing=0.1, z_loss=0.01, reduction="none"
    )
    close([got], [want])


# ---- chunks, memory ----


def test_rows_of_a_chunk():
    fp32, bf16 = torch.float32, torch.bfloat16
    assert chunk_rows_for(1024, 50304, fp32, "cpu") == 128
    assert chunk_rows_for(1024, 1000, fp32, "cpu") == 1024, "4 MB are not worth chunks"
    assert chunk_rows_for(1100, 50304, bf16, "cpu") == 123, "nine even parts"
    assert chunk_rows_for(16384, 50304, fp32, "cpu") == 2048
    assert chunk_rows_for(4096, 128256, bf16, "cuda") == 1024 and chunk_rows_for(0, 50304, fp32, "cpu") == 1
    assert chunk_rows_for(10**6, 50304, bf16, "cuda") <= 8192


@pytest.mark.skipif("triton" in IMPLS or sys.platform != "linux", reason="peak resident memory, of the C++ kernels")
@pytest.mark.parametrize("threads", [1, 2])
def test_peak_memory(threads):
    """Beyond arguments and their gradients at most 15 % of the logits: one chunk of an eighth, and the BLAS's own."""
    command = [sys.executable, "-m", "tests.ops.linear_cross_entropy_memory", "1024", "256", "25152", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0.1 < float(done.stdout) <= 0.15, done.stdout
