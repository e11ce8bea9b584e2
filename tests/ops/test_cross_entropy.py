"""cross_entropy in one process: values and gradients against fp64 and known numbers, simulated ranks, views, storage.
In Triton's interpreter too: see test_cross_entropy_contract.py."""

import math

import pytest
import torch
import torch.nn.functional as F

from megacore.ops import cross_entropy
from tests.ops.cross_entropy_cases import (
    CASES,
    IMPLS,
    KERNELS,
    OPTIONS,
    PATHS,
    inputs,
    plain,
    plain_gradient,
    serving,
    with_gradient,
)
from tests.oracle import DTYPES, assert_as_good_as_torch, views


@pytest.fixture(params=PATHS)
def impl(request):
    """The implementation that serves cross_entropy during the test."""
    with serving(request.param) as name:
        yield name


def on_simulated_ranks(shards, y, weights, vocab_size, impl, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    """What the ranks do, one after another: shards [(columns, first id)] -> loss and the gradients of the shards."""
    ops, kind = torch.ops.megacore, KERNELS[impl]
    stats = [getattr(ops, "cross_entropy_stats" + kind)(x, y, start, vocab_size, ignore_index) for x, start in shards]
    how = (vocab_size, ignore_index, label_smoothing, z_loss)
    loss, norm = getattr(ops, "cross_entropy_merge" + kind)(torch.cat(stats), y, len(shards), *how)
    backward = getattr(ops, "cross_entropy_bwd" + kind)
    return loss, [backward(weights.to(loss.dtype), x, y, norm, start, *how) for x, start in shards]


# ---- right values ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_matches_fp64(impl, options, dtype):
    """The measure is torch in fp32 on 16-bit logits: its own 16-bit loss would allow anything."""
    for rows, vocab in [(1, 2), (3, 127), (5, 128), (2, 1025), (9, 513), (64, 50)]:
        found = []
        for seed in range(8 if impl == "triton" else 24 if rows * vocab < 1000 else 2):
            x, y, g = inputs(rows, vocab, dtype, seed)
            y[y == -100] = options.get("ignore_index", -100)
            runs = with_gradient(x, y, g, **options), plain_gradient(x.double(), y, g, **options)
            found.append((*runs, plain_gradient(x, y, g, **options)))
        for which in range(2):
            got, truth, torchs = (torch.stack([f[side][which] for f in found]) for side in range(3))
            assert_as_good_as_torch(got, truth, torchs)


def test_one_class_has_nothing_to_learn(impl):
    """Beside z-loss, that is: its gradient is 2 z lse, which (1 + 2 z lse) p - 1 would round away."""
    x, y, g = torch.full((1, 1), 3.0), torch.zeros(1, dtype=torch.int64), torch.ones(1)
    loss, gradient = with_gradient(x, y, g, label_smoothing=0.1, z_loss=1e-6)
    torch.testing.assert_close(loss, torch.tensor([9e-6]))
    torch.testing.assert_close(gradient, torch.tensor([[6e-6]]), atol=6e-8, rtol=0)


def test_large_offsets_cost_no_accuracy(impl):
    """lse of logits near 10^4 has a spacing of 10^-3 in fp32; torch subtracts the maximum first, and so must we."""
    x, y, g = inputs(32, 300)
    x += 10000.0
    for options in ({}, {"label_smoothing": 0.2}):
        got, truth = with_gradient(x, y, g, **options), plain_gradient(x.double(), y, g, **options)
        for ours, ref, torchs in zip(got, truth, plain_gradient(x, y, g, **options), strict=True):
            assert_as_good_as_torch(ours, ref, torchs)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_known_values_on_simulated_ranks(impl, case):
    if impl == "reference":
        pytest.skip("it has no local operators; test_cross_entropy_parallel.py runs it on real ranks")
    weights = torch.ones(len(case.target)) if case.weights is None else case.weights
    for ranks in case.ranks:
        shards = [case.shard(r, ranks) for r in range(ranks)]
        loss, pieces = on_simulated_ranks(shards, case.target, weights, case.vocab_size, impl, **case.options)
        whole = torch.cat(pieces, 1)
        case.check(loss, whole)
        assert not whole[:, case.vocab_size :].any(), "padding columns have a gradient"


def test_reductions(impl):
    x, y, _ = inputs(6, 11)
    for reduction in ("sum", "mean"):
        for target in (y, torch.full_like(y, -100)):
            x_ = x.clone().requires_grad_()
            loss = cross_entropy(x_, target, vocab_size=11, reduction=reduction)
            loss.backward()
            want = F.cross_entropy(
                x, target, reduction=reduction
            ).nan_to_num()  # torch's mean of nothing is NaN; ours 0
            torch.testing.assert_close(loss.detach(), want)
            assert x_.grad.isfinite().all() and bool(x_.grad.any()) == (target is y)


def test_infinities_are_torchs(impl):
    x, y, g = inputs(5, 7, torch.float64, ignored=False)
    x[0, (y[0] + 1) % 7] = -math.inf  # a masked class
    x[1] = -math.inf  # no class at all: no distribution, NaN
    x[2, 3] = math.nan
    x[3, (y[3] + 1) % 7] = math.inf
    x[4] = -math.inf
    y[4] = -100  # ignored: exactly 0
    got, want = with_gradient(x, y, g), plain_gradient(x, y, g)
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    torch.testing.assert_close(got[1][[0, 1, 2, 3]], want[1][[0, 1, 2, 3]], equal_nan=True)
    assert got[0][4] == 0 and not got[1][4].any()
    ours, _ = with_gradient(x[:1], y[:1], g[:1], label_smoothing=0.1)
    assert ours.item() == plain(x[:1], y[:1], label_smoothing=0.1).item() == math.inf


@pytest.mark.parametrize("kind", [k for k in KERNELS if k in IMPLS])
def test_shards_of_minus_infinity_or_of_padding_alone(kind):
    x, y, g = inputs(4, 12, torch.float64, ignored=False)
    y %= 4
    x[:, 4:8] = -math.inf
    shards = [
        (x[:, :4], 0),
        (x[:, 4:8], 4),
        (x[:, 8:], 8),
        (torch.full((4, 4), math.nan, dtype=x.dtype), 12),
        (x[:, :0], 16),
    ]
    loss, pieces = on_simulated_ranks(shards, y, g, 12, kind)
    want, gradient = plain_gradient(x, y, g)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.cat(pieces[:3], 1), gradient)
    assert not pieces[3].any() and pieces[4].shape == (4, 0)


# ---- addresses, views, storage ----


def test_rows_beyond_two_to_the_31(impl):
    """MB-21 (b)."""
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    x, y, g = inputs(3, 64, torch.bfloat16)
    far.copy_(x)
    for ours, near in zip(with_gradient(far, y, g), with_gradient(x, y, g), strict=True):
        assert torch.equal(ours, near)


def test_more_rows_than_sixteen_bits_count(impl):
    """MB-21 (c). The interpreter takes 3 s for 65 537 rows: only the largest there."""
    for rows in (65535, 65536, 65537) if impl != "triton" else (65537,):
        x, y, g = inputs(rows, 4)
        loss, gradient = with_gradient(x, y, g)
        for part in (slice(0, 1), slice(1, 1000), slice(65500, 65534), slice(65534, rows), slice(rows - 1, rows)):
            alone = with_gradient(x[part], y[part], g[part])
            assert torch.equal(loss[part], alone[0]) and torch.equal(gradient[part], alone[1])
        torch.testing.assert_close(loss, F.cross_entropy(x, y, reduction="none"))


def test_views_give_the_bits_of_contiguous_copies(impl):
    """MB-23, of logits, targets and the upstream gradient."""
    x, y, g = inputs(6, 10)
    g = g.float()
    whole = with_gradient(x, y, g)

    def same(x_, y_, g_, want=whole):
        for got, expected in zip(with_gradient(x_, y_, g_), want, strict=True):
            assert torch.equal(got, expected)

    for view in views(x).values():
        same(view, y, g)
    same(x, torch.stack([y, y], 1)[:, 1], g)
    same(x, y, torch.stack([g, g], 1)[:, 0])
    same(x[:1].expand(6, 10), y, g, with_gradient(x[:1].repeat(6, 1), y, g))
    same(x, y, torch.tensor(2.0).expand(6), with_gradient(x, y, torch.full((6,), 2.0)))
    same(x, y, torch.zeros(6), (whole[0], torch.zeros_like(x)))


def test_leading_dimensions(impl):
    """[S, B, V] seen as [B, S, V], a single row, no rows at all."""
    x, y, g = inputs(15, 10, ignored=False)
    sbv, bs, weights = x.view(5, 3, 10).transpose(0, 1), y.view(5, 3).t(), g.view(5, 3).t()
    loss, gradient = with_gradient(sbv, bs, weights)
    flat = with_gradient(x, y, g)
    assert torch.equal(loss, flat[0].view(5, 3).t()) and torch.equal(gradient, flat[1].view(5, 3, 10).transpose(0, 1))
    assert torch.equal(with_gradient(x[3], y[3], g[3])[0], flat[0][3])
    assert with_gradient(x[:0], y[:0], g[:0])[1].shape == (0, 10)


def test_logits_are_left_alone(impl):
    """MB-03 (c)."""
    x, y, _ = inputs(4, 33)
    kept, leaf = x.clone(), x.requires_grad_()
    loss = cross_entropy(leaf, y, vocab_size=33)
    assert torch.equal(leaf.detach(), kept)
    (loss.sum() + leaf.square().sum()).backward()
    assert torch.equal(leaf.detach(), kept)
    torch.testing.assert_close(leaf.grad, plain_gradient(kept, y, torch.ones(4))[1] + 2 * kept)


def test_gradient_over_the_logits(impl):
    """The bits of the gradient elsewhere, in the storage the logits came from, and only in theirs."""
    if impl == "reference":
        pytest.skip("plain torch allocates its gradient")
    x, y, g = inputs(4, 33)
    base = torch.full((4, 99), 7.0)
    logits = base[:, 33:66].copy_(x).detach().requires_grad_()
    got = torch.autograd.grad(cross_entropy(logits, y, vocab_size=33, inplace_backward=True), logits, g.float())[0]
    want = with_gradient(x, y, g)[1]
    assert got.data_ptr() == logits.data_ptr() and torch.equal(got, want) and torch.equal(base[:, 33:66], want)
    assert base[:, :33].eq(7).all() and base[:, 66:].eq(7).all()


def test_who_saved_the_logits_is_told_when_they_are_gone(impl):
    if impl == "reference":
        pytest.skip("plain torch allocates its gradient")
    x, y, _ = inputs(4, 33)
    logits = x.requires_grad_() * 1
    other = logits.square().sum()  # saves the logits, and runs its backward after the loss's
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (cross_entropy(logits, y, vocab_size=33, inplace_backward=True).sum() + other).backward()
