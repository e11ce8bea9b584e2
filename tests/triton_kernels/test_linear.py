"""The linear kernels in Triton's interpreter: errors against fp64, edges, strides, every element written."""

import pytest
import torch
import torch.nn.functional as F

from tests.interpreter import INTERPRETING
from tests.oracle import assert_as_good_as_torch, views

linear = pytest.importorskip("megacore.triton_kernels.linear", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter: test_in_the_interpreter.py")

FORMS = ["", "tanh", "none", "swiglu"]
KINDS = [torch.float32, torch.float16, torch.bfloat16]


def act(pre, form):
    if form == "swiglu":
        gate, up = pre.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(pre, approximate=form) if form else pre


def operands(rows, outs, inner, dtype, form="", seed=0):
    g = torch.Generator().manual_seed(seed)
    wide = 2 * outs if form == "swiglu" else outs
    made = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((rows, inner), (wide, inner), (wide,))]
    return [(t * scale).to(dtype) for t, scale in zip(made, (1, 2 / max(inner, 1) ** 0.5, 1), strict=True)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel leaves unwritten is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(float("nan")))


def check(x, w, b, form, config=None):
    y, pre = linear.forward(x, w, b, form, config)
    wide = [None if t is None else t.double() for t in (x, w, b)]
    truth = F.linear(*wide)
    theirs = F.linear(x, w, b)
    if form:
        assert_as_good_as_torch(pre, truth, theirs)
    else:
        assert pre is None
    assert_as_good_as_torch(y, act(truth, form), act(theirs, form))
    assert y.is_contiguous()
    return y, pre


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 3, 5), (64, 64, 64), (65, 129, 33), (1, 131, 70), (131, 2, 7), (200, 96, 128)]
)
def test_triton_forward(shape, dtype, form):
    rows, outs, inner = shape
    x, w, b = operands(rows, outs, inner, dtype, form)
    check(x, w, b if rows % 2 else None, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", [*linear.HALF, *linear.FULL], ids=lambda c: f"{c.rows}x{c.cols}x{c.inner}")
def test_triton_every_configuration_with_more_tiles_than_programs(config, form):
    x, w, b = operands(5 * config.rows // 2, 5 * config.cols // 2, config.inner + 3, torch.float16, form)
    check(x, w, b, form, config)


@pytest.mark.parametrize("form", ["tanh", "swiglu"])
def test_triton_empty_sizes(form):
    for rows, outs, inner in ((0, 5, 3), (4, 0, 3), (4, 5, 0)):
        x, w, b = operands(rows, outs, inner, torch.float32, form)
        y, pre = check(x, w, b, form)
        dpre, dbias = linear.dpre(torch.ones_like(y), pre, True, form)
        assert dpre.shape == pre.shape and dbias.shape == w.shape[:1] and not dbias.isnan().any()
        if rows == 0:
            assert not dbias.any()


@pytest.mark.parametrize("form", ["tanh", "swiglu"])
def test_triton_views_give_the_bits_of_their_copies(form):
    x, w, b = operands(70, 37, 41, torch.float32, form)
    want = check(x, w, b, form)
    for what in views(x):
        assert all(map(torch.equal, linear.forward(views(x)[what], w, b, form), want)), what
        assert all(map(torch.equal, linear.forward(x, views(w)[what], b, form), want)), what
    assert all(map(torch.equal, linear.forward(x, w, torch.stack([b, b], 1)[:, 0], form), want)), "bias of stride 2"
    same = x[:1].expand(70, 41)
    assert all(map(torch.equal, linear.forward(same, w, b, form), linear.forward(same.clone(), w, b, form)))


def test_triton_rows_beyond_two_to_the_31():
    far = torch.ones(1, dtype=torch.float16).new_empty(2**31 + 64)  # not torch.empty, which would touch every page
    x, w, _ = operands(3, 7, 64, torch.float16, "tanh")
    rows = far.as_strided((3, 64), (2**30, 1)).copy_(x)
    columns = far.as_strided((64, 3), (1, 2**30)).t()
    want = linear.forward(x, w, None, "tanh")
    assert all(map(torch.equal, linear.forward(rows, w, None, "tanh"), want))
    assert all(map(torch.equal, linear.forward(columns, w, None, "tanh"), want))
    inner = far.as_strided((7, 3), (1, 2**30)).copy_(w[:, :3])  # the inner index runs furthest
    assert torch.equal(linear.forward(x[:, :3], inner, None, "")[0], linear.forward(x[:, :3], w[:, :3], None, "")[0])
    want = linear.dpre(x, x, True, "tanh")
    rows.copy_(x)
    assert all(map(torch.equal, linear.dpre(rows, rows, True, "tanh"), want))


def test_triton_y_can_be_computed_again_from_pre():
    x, w, b = operands(70, 37, 41, torch.float16)
    y, pre = linear.forward(x, w, b, "tanh")
    again, _ = linear.forward(pre, torch.eye(37, dtype=torch.float16), None, "tanh")
    assert torch.equal(y, again)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (7, 131), (128, 16), (129, 17), (300, 5)])
def test_triton_dpre(shape, dtype, form):
    """Against the derivative that torch takes in fp64, of pre as stored. Few elements many times: errors by luck."""
    rows, outs = shape
    found = []
    for seed in range(12 if rows * outs < 100 else 1):
        g = torch.Generator().manual_seed(rows + seed)
        pre = (3 * torch.randn(rows, (2 if form == "swiglu" else 1) * outs, generator=g)).to(dtype)
        dy = torch.randn(rows, outs, generator=g).to(dtype)
        sides = []
        for wide in (torch.float64, dtype):
            leaf = pre.detach().to(wide).requires_grad_()
            (d,) = torch.autograd.grad(act(leaf, form), leaf, dy.to(wide))
            sides.append((d, d.sum(0)))
        found.append([linear.dpre(dy, pre, True, form), *sides])
    for which in range(2):
        assert_as_good_as_torch(*(torch.stack([f[side][which] for f in found]) for side in range(3)))
    dpre, dbias = found[-1][0]
    alone, none = linear.dpre(dy, pre, False, form)
    assert torch.equal(alone, dpre) and none.shape == (0,)
    assert all(map(torch.equal, linear.dpre(dy, pre, True, form), (dpre, dbias)))


@pytest.mark.parametrize("form", FORMS[1:])
def test_triton_dpre_of_views(form):
    g = torch.Generator().manual_seed(3)
    pre = torch.randn(133, 20 if form == "swiglu" else 10, generator=g)
    dy = torch.randn(133, 10, generator=g)
    want = linear.dpre(dy, pre, True, form)
    for what in views(dy):
        assert all(map(torch.equal, linear.dpre(views(dy)[what], pre, True, form), want)), what
        assert all(map(torch.equal, linear.dpre(dy, views(pre)[what], True, form), want)), what
    for one in (dy[:1].expand(133, 10), dy[:1, :1].expand(133, 10)):
        assert all(map(torch.equal, linear.dpre(one, pre, True, form), linear.dpre(one.clone(), pre, True, form)))


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_triton_extreme_values(form):
    pre = torch.tensor([[1e4, -1e4, 30.0, -30.0, float("inf"), 65000.0, -65000.0, 0.0, -0.0]])
    dpre, _ = linear.dpre(torch.ones_like(pre), pre, False, form)
    assert torch.equal(dpre, torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.5]]))
    y, _ = linear.forward(pre.t().contiguous(), torch.ones(1, 1), None, form)
    assert torch.equal(y.t(), torch.tensor([[1e4, 0.0, 30.0, 0.0, float("inf"), 65000.0, 0.0, 0.0, 0.0]]))


def test_triton_the_choice_is_by_shape_alone():
    assert linear.choose(8192, 8192, torch.bfloat16, 132) == linear.HALF[0]
    assert linear.choose(64, 64, torch.bfloat16, 132) == linear.HALF[2], "one tile: the smallest ends first"
    assert {linear.choose(m, n, torch.bfloat16, 132) for m in (1, 500, 2048) for n in (8, 768, 3072)} <= {*linear.HALF}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w, b: linear.forward(x.double(), w.double(), None, ""), "linear: x is .*float64; wanted .*fp32"),
        (lambda x, w, b: linear.forward(x, w[:, 1:], b, ""), r"linear: weight is \[6, 3\].*wanted \[6, 4\]"),
        (lambda x, w, b: linear.forward(x, w.half(), b, ""), "linear: weight is .*float16; wanted .*float32"),
        (lambda x, w, b: linear.forward(x, w, b[1:], ""), r"linear: bias is \[5\].*wanted \[6\]"),
        (lambda x, w, b: linear.forward(x, w, b, "relu"), "linear: activation is 'relu'; wanted one of"),
        (lambda x, w, b: linear.forward(x, w[:5], b[:5], "swiglu"), r"linear: weight is \[5, 4\]; wanted an even"),
        (lambda x, w, b: linear.dpre(x, x[:, 1:], True, "tanh"), r"linear_dpre: dy is \[3, 4\].*wanted \[3, 3\]"),
        (lambda x, w, b: linear.dpre(x, x, True, ""), "linear_dpre: activation is ''; wanted one of"),
    ],
)
def test_triton_refusals(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call(*operands(3, 6, 4, torch.float32))
    assert "\n" not in str(caught.value)
