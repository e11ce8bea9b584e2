"""cross_entropy in one process: values and gradients against fp64 and known numbers, simulated ranks, views, refusals.

Triton serves a CPU only in its interpreter, which has to be chosen before it is imported: `test_in_the_interpreter`
runs this file again, in a process of its own, for the tests that carry "triton" in their name.
"""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from megacore import _C
from megacore.ops import cross_entropy, implementations, use
from tests.ops.cross_entropy_cases import CASES, plain, plain_gradient
from tests.oracle import DTYPES, assert_as_good_as_torch, views

IMPLS = implementations("cross_entropy", "cpu")
KERNELS = {"cpp": "", "triton": "_triton"}  # suffixes of the local operators
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 1.0, "z_loss": 0.1, "ignore_index": 0}]


@pytest.fixture(params=[*IMPLS, "cpp-portable"])
def impl(request):
    """The implementation that serves cross_entropy during the test."""
    name = request.param.removesuffix("-portable")
    _C.set_portable(request.param == "cpp-portable")
    with use(name, "cross_entropy"):
        yield name
    _C.set_portable(False)


def inputs(rows, vocab, dtype=torch.float32, seed=0, ignored=True):
    g = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(rows, vocab, generator=g, dtype=torch.float64)).to(dtype)
    y = torch.randint(0, vocab, (rows,), generator=g)
    if ignored and rows > 1:
        y[1] = -100
    return x, y, torch.randn(rows, generator=g, dtype=torch.float64)


def with_gradient(x, y, weights, vocab_size=None, **options):
    x = x.detach().requires_grad_()
    loss = cross_entropy(x, y, vocab_size=vocab_size or x.shape[-1], **options)
    return loss.detach(), torch.autograd.grad(loss, x, weights.to(loss.dtype))[0]


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
        for seed in range(24 if rows * vocab < 1000 and impl != "triton" else 2):
            x, y, g = inputs(rows, vocab, dtype, seed)
            y[y == -100] = options.get("ignore_index", -100)
            runs = with_gradient(x, y, g, **options), plain_gradient(x.double(), y, g, **options)
            found.append((*runs, plain_gradient(x, y, g, **options)))
        for which in range(2):
            got, truth, torchs = (torch.stack([f[side][which] for f in found]) for side in range(3))
            # the interpreter truncates to bf16 where the GPU rounds: twice the error
            truncated = impl == "triton" and dtype == torch.bfloat16 and which == 1
            assert_as_good_as_torch(got, truth, torchs, factor=4 if truncated else 2)


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


# ---- contracts of torch ----


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_gradcheck(impl, options):
    x, y, _ = inputs(3, 5, torch.float64)
    y[y == -100] = options.get("ignore_index", -100)
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, y, vocab_size=5, **options), x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [k for k in KERNELS if k in IMPLS])
def test_opcheck(kind, dtype):
    x, y, g = inputs(6, 10, dtype)
    ops, suffix, how = torch.ops.megacore, KERNELS[kind], (-100, 0.1, 1e-3)
    loss, norm = ops.cross_entropy(x, y, 0, 10, "", *how, False, kind)
    stats = (x, y, 0, 10, -100)
    packed = getattr(ops, "cross_entropy_stats" + suffix)(*stats)
    backward = (g.float(), x, y, norm, 0, 10, *how)
    for name, args in {
        "stats" + suffix: stats,
        "merge" + suffix: (packed, y, 1, 10, *how),
        "bwd" + suffix: backward,
        "bwd" + suffix + "_": (g.float(), x.clone(), *backward[2:]),
    }.items():
        opcheck(getattr(ops, "cross_entropy_" + name).default, args)
    for inplace in (False, True):
        opcheck(ops.cross_entropy.default, (x.clone().requires_grad_(), y, 0, 10, "", *how, inplace, kind))


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_in_one_graph(inplace):
    x, y, g = inputs(6, 10)

    def f(x, y):
        return cross_entropy(x * 2, y, vocab_size=10, label_smoothing=0.1, reduction="sum", inplace_backward=inplace)

    found = []
    for run in (f, torch.compile(f, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        run(leaf, y).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="target"):  # values are checked in compiled code too
        torch.compile(f, fullgraph=True)(x, y + 10)


def test_choice_is_captured_at_forward():
    x, y, _ = inputs(6, 10)
    x.requires_grad_()
    with use("reference", "cross_entropy"):
        loss = cross_entropy(x, y, vocab_size=10)
    ours = cross_entropy(x, y, vocab_size=10)
    names = [[n.name() for n in [t.grad_fn, *(f for f, _ in t.grad_fn.next_functions)]] for t in (loss, ours)]
    assert "megacore" not in str(names[0]) and "megacore" in str(names[1])


def test_second_derivative_is_refused():
    x, y, _ = inputs(6, 10)
    x.requires_grad_()
    loss = cross_entropy(x, y, vocab_size=10, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    assert dx.data_ptr() != x.data_ptr(), "a graph of the gradient needs the logits"
    with pytest.raises(NotImplementedError, match="reference"):
        dx.sum().backward()


def test_loss_does_not_depend_on_the_number_of_threads():
    x, y, g = inputs(70, 3000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(with_gradient(x, y, g))
    finally:
        torch.set_num_threads(before)
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0]) and torch.equal(gradient, found[0][1])


# ---- refusals ----


@pytest.mark.parametrize("bad", [50, -1])
def test_ids_outside_the_vocabulary(impl, bad):
    """MB-11 (d): padding columns do not make an id valid."""
    x, y, _ = inputs(6, 52, ignored=False)
    y %= 50
    y[4] = bad
    with pytest.raises(ValueError, match=rf"cross_entropy: target\[4\] is {bad}; wanted an id in \[0, 50\)"):
        cross_entropy(x, y, vocab_size=50)
    y[4] = -100
    assert cross_entropy(x, y, vocab_size=50)[4] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"logits": a["logits"].long()}, ["logits", "int64", "fp32"]),
        (lambda a: a | {"target": a["target"].int()}, ["target", "int32", "int64"]),
        (lambda a: a | {"target": a["target"][:3]}, ["target", r"\[3\]", r"\[6\]"]),
        (lambda a: a | {"target": a["target"].to("meta")}, ["target", "meta", "cpu"]),
        (lambda a: a | {"vocab_size": 0}, ["vocab_size", "0", "at least 1"]),
        (lambda a: a | {"vocab_size": 12}, ["logits", r"\[0, 10\)", "vocab_size=12"]),
        (lambda a: a | {"vocab_start": 3}, ["logits", r"\[3, 10\)", "vocab_size=10", "vocab_start"]),
        (lambda a: a | {"vocab_start": -1}, ["vocab_start", "-1", "at least 0"]),
        (lambda a: a | {"label_smoothing": 1.5}, ["label_smoothing", "1.5", r"\[0, 1\]"]),
        (lambda a: a | {"z_loss": -1.0}, ["z_loss", "-1.0"]),
        (lambda a: a | {"reduction": "avg"}, ["reduction", "avg", "'mean'"]),
        (lambda a: a | {"logits": a["logits"][:1].expand(6, 10), "inplace_backward": True}, ["logits", "strides"]),
    ],
)
def test_refusals_name_operator_argument_got_and_wanted(change, words):
    x, y, _ = inputs(6, 10, ignored=False)
    with pytest.raises(ValueError, match=".*".join(["cross_entropy", *words])) as caught:
        cross_entropy(**change({"logits": x, "target": y, "vocab_size": 10}))
    assert "\n" not in str(caught.value)


# ---- Triton ----


@pytest.mark.skipif("triton" in IMPLS, reason="this is the interpreter's process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here")
def test_in_the_interpreter():
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-v", "-p", "no:cacheprovider", __file__, "-k", "triton"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
