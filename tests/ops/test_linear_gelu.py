"""linear_gelu against fp64 and against plain torch: values, gradients, layouts, compilation, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from megacore import _C
from megacore.ops import implementations, linear_gelu, use
from tests.oracle import DTYPES, assert_as_good_as_torch, offset_by_one, shapes, views

FORMS = ["tanh", "none"]
M_K_N = [(1, 1, 1), *shapes([7, 65], [13], [1, 31]), (130, 17, 1025)]


def plain(x, w, b, approximate):
    return F.gelu(F.linear(x, w, b), approximate=approximate)


def inputs(m, k, n, dtype, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g, dtype=torch.float64).to(dtype)
    w = (torch.randn(n, k, generator=g, dtype=torch.float64) / k**0.5).to(dtype)
    b = torch.randn(n, generator=g, dtype=torch.float64).to(dtype) if bias else None
    dy = torch.randn(m, n, generator=g, dtype=torch.float64).to(dtype)
    return x, w, b, dy


def with_gradients(f, x, w, b, dy, approximate):
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    y = f(leaves[0], leaves[1], leaves[2] if b is not None else None, approximate=approximate)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.fixture(params=["native", "portable"])
def path(request):
    _C.set_portable(request.param == "portable")
    yield request.param
    _C.set_portable(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_fp64(bias, approximate, dtype, path):
    for m, k, n in M_K_N:
        found = []
        # several, or torch's error on a handful of elements is a matter of luck
        for seed in range(200 if m * n == 1 else 24 if m * n < 5000 else 1):
            x, w, b, dy = inputs(m, k, n, dtype, bias, seed)
            wide = [t if t is None else t.double() for t in (x, w, b, dy)]
            got = with_gradients(linear_gelu, x, w, b, dy, approximate)
            truth, measure = with_gradients(plain, *wide, approximate), with_gradients(plain, x, w, b, dy, approximate)
            found.append([got, truth, measure])
        for runs in zip(*(zip(*f, strict=True) for f in found), strict=True):  # of y, dx, dw, db
            assert_as_good_as_torch(*(torch.stack(side) for side in zip(*runs, strict=True)))


@pytest.mark.parametrize("impl", implementations("linear_gelu", "cpu"))
@pytest.mark.parametrize("approximate", FORMS)
def test_every_implementation_gives_the_formula(impl, approximate):
    x, w, b, dy = inputs(5, 7, 3, torch.float64)
    with use(impl, "linear_gelu"):
        got = with_gradients(linear_gelu, x, w, b, dy, approximate)
    want = with_gradients(lambda x, w, b, approximate: exact(x @ w.t() + b, approximate), x, w, b, dy, approximate)
    for ours, ref in zip(got, want, strict=True):
        torch.testing.assert_close(ours, ref, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_curve_and_derivative_over_the_whole_range(approximate, dtype, path):
    """One weight of 1 makes the operator gelu itself. Each interval by itself, or the largest value sets the bound."""
    edges = [-1e4, -100, -30, -12, -6, -3, -1, 0, 1, 3, 6, 12, 30, 1e4]
    one = torch.ones(1, 1, dtype=dtype)
    for low, high in zip(edges, edges[1:], strict=False):
        x = torch.linspace(low, high, 1001, dtype=torch.float64).to(dtype).unsqueeze(1)
        got = with_gradients(linear_gelu, x, one, None, torch.ones_like(x), approximate)[:2]
        wide = x.double().requires_grad_()
        truth = exact(wide, approximate)
        truth = truth.detach(), *torch.autograd.grad(truth.sum(), wide)
        measure = with_gradients(plain, x, one, None, torch.ones_like(x), approximate)[:2]
        for ours, ref, torchs in zip(got, truth, measure, strict=True):
            assert_as_good_as_torch(ours, ref, torchs)


def exact(x, approximate):
    """fp64 without the cancellation of 1 + tanh and 1 + erf, so that the tail has digits too."""
    if approximate == "tanh":
        return x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))
    return x * 0.5 * torch.special.erfc(-x / 2**0.5)


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strange_values(approximate, dtype, path):
    one = torch.ones(1, 1, dtype=dtype)
    big = torch.finfo(dtype).max
    x = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, big, -big], dtype=dtype).unsqueeze(1)
    y, dx, _ = (
        t.flatten().tolist() for t in with_gradients(linear_gelu, x, one, None, torch.ones_like(x), approximate)
    )
    assert y[0] == torch.inf and math.isnan(y[1]) and y[2:] == [0, 0, big, 0]
    assert dx[0] == 1 and math.isnan(dx[1]) and dx[2:] == [0.5, 0.5, 1, 0]


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(approximate, bias):
    x, w, b, _ = inputs(3, 4, 5, torch.float64, bias)
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    assert torch.autograd.gradcheck(lambda *a: linear_gelu(*a, approximate=approximate), leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(dtype, bias):
    x, w, b, dy = inputs(6, 10, 7, dtype, bias)
    leaves = [t if t is None else t.requires_grad_() for t in (x, w, b)]
    opcheck(torch.ops.megacore.linear_gelu.default, (*leaves, "tanh"))
    opcheck(torch.ops.megacore.linear_gelu_dpre.default, (dy, torch.randn_like(dy), bias, "none"))


def test_compiles_in_one_graph():
    x, w, b, dy = inputs(6, 10, 7, torch.float32)
    got = with_gradients(torch.compile(linear_gelu, fullgraph=True), x, w, b, dy, "tanh")
    for compiled, eager in zip(got, with_gradients(linear_gelu, x, w, b, dy, "tanh"), strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_give_the_bits_of_contiguous_copies(dtype):
    """MB-23 for x, weight and the upstream gradient."""
    x, w, b, dy = inputs(6, 10, 10, dtype)
    whole = with_gradients(linear_gelu, x, w, b, dy, "tanh")

    def same(x_, w_, dy_, what):
        leaves = [x_.requires_grad_(), w_.requires_grad_(), b.clone().requires_grad_()]
        y = linear_gelu(*leaves)
        found = [y, *torch.autograd.grad(y, leaves, dy_)]
        for name, got, want in zip(["y", "dx", "dw", "db"], found, whole, strict=True):
            assert torch.equal(got, want), (what, name)

    for what, view in views(x).items():
        same(view.detach(), w.clone(), dy, what)
    for what, view in views(w).items():
        same(x.clone(), view.detach(), dy, what)
    for what, view in views(dy).items():
        same(x.clone(), w.clone(), view, what)


def test_storage_offset():
    """A contiguous tensor that begins off a cache line is its own .contiguous(): MKL may sum it in another order."""
    x, w, b, dy = inputs(6, 10, 10, torch.float32)
    off = [offset_by_one(t) for t in (x, w, b, dy)]
    leaves = [t.requires_grad_() for t in off[:3]]
    y = linear_gelu(*leaves)
    got = [y, *torch.autograd.grad(y, leaves, off[3])]
    for g, r in zip(got, with_gradients(linear_gelu, x, w, b, dy, "tanh"), strict=True):
        torch.testing.assert_close(g, r, rtol=1e-6, atol=1e-6)


def test_transposed_batch_and_expanded_gradients():
    """[S, B, K] seen as [B, S, K]; gradients with stride 0 in every dimension, and along the rows only."""
    base = torch.randn(5, 3, 10)
    _, w, b, _ = inputs(1, 10, 7, torch.float32)
    row = torch.randn(7)
    for dy in (torch.tensor(1.0).expand(3, 5, 7), row.expand(3, 5, 7), torch.randn(7, 5, 3).permute(2, 1, 0)):
        got = with_gradients(lambda x, w, b, approximate: linear_gelu(x, w, b), base.transpose(0, 1), w, b, dy, "tanh")
        want = with_gradients(linear_gelu, base.transpose(0, 1).contiguous(), w, b, dy.contiguous(), "tanh")
        for g, h in zip(got, want, strict=True):
            assert torch.equal(g, h)


def test_only_wanted_gradients_are_computed_and_kept():
    x, w, b, _ = inputs(6, 10, 7, torch.float32)
    for wanted in ([0], [1], [2], [0, 2], [1, 2]):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, w, b))]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t) or t, lambda t: t):
            y = linear_gelu(*leaves)
        kept = {tuple(t.shape) for t in saved}
        assert kept == {(6, 7)} | ({(7, 10)} if 0 in wanted else set()) | ({(6, 10)} if 1 in wanted else set())
        assert sum(t.shape == (6, 7) for t in saved) == 1, "the pre-activation, and not the output"
        y.sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i in wanted for i in range(3)]


def test_zero_sizes():
    for m, k, n in [(0, 3, 5), (4, 0, 5), (4, 3, 0), (0, 0, 0)]:
        x, w, b, dy = inputs(m, max(k, 1), n, torch.float32)
        x, w = x[:, :k], w[:, :k]
        got = with_gradients(linear_gelu, x, w, b, dy, "tanh")
        for g, r in zip(got, with_gradients(plain, x, w, b, dy, "tanh"), strict=True):
            torch.testing.assert_close(g, r)


def test_bias_gradient_does_not_depend_on_the_number_of_threads():
    x, w, b, dy = inputs(700, 5, 1100, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(with_gradients(linear_gelu, x, w, b, dy, "tanh")[3])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_sixteen_bit_bias_gradient_is_summed_in_fp32():
    """MB-04: 512 gradients of exactly 1 in bf16, which saturate at 256 when summed in bf16."""
    x, w = torch.zeros(512, 1, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)
    b = torch.full((1,), 30.0, dtype=torch.bfloat16, requires_grad=True)
    linear_gelu(x, w, b).sum().backward()
    assert b.grad.item() == 512


def test_choice_is_captured_at_forward():
    x, w, b, _ = inputs(6, 10, 7, torch.float32)
    x.requires_grad_()
    with use("reference", "linear_gelu"):
        y = linear_gelu(x, w, b)
    assert "Gelu" in y.grad_fn.name()
    assert "megacore" in linear_gelu(x, w, b).grad_fn.name()


def test_second_derivative_is_refused():
    x, w, b, _ = inputs(2, 3, 4, torch.float32)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(linear_gelu(x, w, b).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="reference"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x.double(), w, b, "tanh"), ["weight", "float", "Double", "x"]),
        (lambda x, w, b: (x, w, b.half(), "tanh"), ["bias", "Half", "Float"]),
        (lambda x, w, b: (x, w.t(), b, "tanh"), ["weight", r"\[10, 7\]", r"\[N, 10\]"]),
        (lambda x, w, b: (x, w, b[:3], "tanh"), ["bias", r"\[3\]", r"\[7\]"]),
        (lambda x, w, b: (x, w, b, "erf"), ["approximate", "erf", "'tanh' or 'none'"]),
        (lambda x, w, b: (x.long(), w, b, "tanh"), ["x", "Long", "BFloat16"]),
        (lambda x, w, b: (x, w.to("meta"), b, "tanh"), ["weight", "meta", "cpu"]),
        (lambda x, w, b: (x[0, 0], w, b, "tanh"), ["x", r"\[\]", r"\[\.\.\., K\]"]),
    ],
)
def test_refusals_name_operator_argument_got_and_wanted(change, words):
    x, w, b, _ = inputs(6, 10, 7, torch.float32)
    x, w, b, approximate = change(x, w, b)
    with pytest.raises(ValueError, match="(?i)" + ".*".join(["linear_gelu", *words])) as caught:
        linear_gelu(x, w, b, approximate=approximate)
    assert "\n" not in str(caught.value)
