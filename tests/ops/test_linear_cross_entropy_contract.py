"""linear_cross_entropy and torch: gradcheck, opcheck, compilation, autocast, refusals; and Triton's interpreter, for
both files: `test_in_the_interpreter` runs the tests that carry "triton" in their name in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import megacore._C as _C
import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

from megacore.ops import implementations, linear_cross_entropy, use
from tests.ops.cross_entropy_cases import OPTIONS
from tests.ops.linear_cross_entropy_cases import inputs, ours

IMPLS = implementations("linear_cross_entropy")
REDUCTIONS = ["none", "sum", "mean"]


@pytest.fixture(params=IMPLS)
def impl(request):
    """The implementation that serves linear_cross_entropy during the test."""
    with use(request.param, "linear_cross_entropy"):
        yield request.param


# ---- contracts of torch ----


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(impl, reduction, options):
    if impl == "triton" and (OPTIONS.index(options) + REDUCTIONS.index(reduction)) % 3:
        pytest.skip("slow in the interpreter: each options with one reduction")
    x, weight, bias, y = inputs(4, 3, 5, torch.float64)
    y[y == -100] = options.get("ignore_index", -100)
    leaves = tuple(t.requires_grad_() for t in (x, weight, bias))

    def f(x, weight, bias):
        how = {"reduction": reduction, "scale": 0.7, "chunk_rows": 3, **options}
        return linear_cross_entropy(x, weight, y, bias=bias, vocab_size=5, **how)

    assert torch.autograd.gradcheck(f, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [impl for impl in IMPLS if impl != "reference"])
def test_opcheck(kind, dtype):
    x, weight, bias, y = inputs(5, 6, 10, dtype)
    ops = torch.ops.megacore
    for reduction, b in (("sum", None), ("mean", bias), ("none", bias)):
        for wanted in ((True, True, b is not None), (True, False, False), (False,) * 3):
            pairs = zip((x, weight, b), wanted, strict=True)
            leaves = [None if t is None else t.clone().requires_grad_(want) for t, want in pairs]
            how = (y, 0, 10, "", -100, 0.1, 1e-3, reduction, 0.5, 2, *wanted, kind)
            opcheck(ops.linear_cross_entropy.default, (*leaves, *how))
    how = (0, 10, "", -100, 0.1, 1e-3, "none", 1.0, 2, False, False, False, kind)
    norm = ops.linear_cross_entropy(x, weight, bias, y, *how)[1]
    loss_of, rest = (0, 10, -100, 0.1, 1e-3), (2, True, True, True, kind)
    opcheck(ops.linear_cross_entropy_bwd.default, (torch.ones(5), x, weight, bias, y, norm, *loss_of, *rest))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_in_one_graph(reduction):
    x, weight, bias, y = inputs(6, 10, 12, torch.float64)  # compiled code hands the library memory of other alignment

    def f(x, weight, bias, y):
        how = {"vocab_size": 12, "label_smoothing": 0.1, "reduction": reduction, "chunk_rows": 4}
        return linear_cross_entropy(x * 2, weight, y, bias=bias, **how).sum()

    found = []
    for run in (f, torch.compile(f, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        loss = run(*leaves, y)
        for factor in (1.0, 3.0):
            found.append([loss.detach(), *torch.autograd.grad(loss * factor, leaves, retain_graph=factor == 1)])
    for eager, compiled in zip(found[:2], found[2:], strict=True):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="target"):
        torch.compile(f, fullgraph=True)(x, weight, bias, y + 12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivative_is_refused(reduction):
    x, weight, _, y = inputs()
    x.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(x, weight, y, vocab_size=11, reduction=reduction).sum()
    want = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    dx, dweight = torch.autograd.grad(loss, (x, weight), create_graph=True)
    torch.testing.assert_close((dx, dweight), want)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy has no second derivative; use.'reference'"):
        dx.sum().backward()


def test_choice_is_captured_at_forward():
    x, weight, _, y = inputs()
    x.requires_grad_()
    with use("reference", "linear_cross_entropy"):
        loss = linear_cross_entropy(x, weight, y, vocab_size=11)
    mine = linear_cross_entropy(x, weight, y, vocab_size=11)
    assert "megacore" not in loss.grad_fn.name() and "megacore" in mine.grad_fn.name()


@pytest.mark.parametrize("threads", [2, 3])
def test_the_loss_does_not_depend_on_the_number_of_threads(threads):
    case, before = inputs(70, 16, 3000), torch.get_num_threads()
    want = ours(*case, chunk_rows=32)[0]
    try:
        torch.set_num_threads(threads)
        torch.testing.assert_close(ours(*case, chunk_rows=32)[0], want, rtol=1e-6, atol=0)
    finally:
        torch.set_num_threads(before)


# ---- autocast ----


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_it_does_for_linear(impl, low, inside):
    x, weight, bias, y = inputs(9, 8, 37)
    found = []
    for f in (
        lambda x, w, b: linear_cross_entropy(x, w, y, bias=b, vocab_size=37, chunk_rows=4),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), y),
    ):
        leaves = [t.clone().requires_grad_() for t in (x.to(low), weight, bias)]
        with torch.autocast("cpu", low):
            loss = f(*leaves)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([loss.detach(), *(t.grad for t in leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=4 * torch.finfo(low).eps * scale)


def test_fp64_stays_and_the_raw_operators_are_deaf():
    for dtype in (torch.float64, torch.float32):
        case = inputs(9, 8, 37, dtype)
        args = (*case, 0, 37, "", -100, 0.1, 1e-3, "mean", 1.0, 4, True, True, True, "cpp")
        outside = torch.ops.megacore.linear_cross_entropy(*args)
        with torch.autocast("cpu", torch.bfloat16):
            for got, want in zip(torch.ops.megacore.linear_cross_entropy(*args), outside, strict=True):
                assert torch.equal(got, want) and got.dtype == want.dtype
            if dtype == torch.float64:
                assert torch.equal(ours(*case, chunk_rows=4, label_smoothing=0.1, z_loss=1e-3)[1], outside[2])


# ---- refusals ----


@pytest.mark.parametrize("bad", [10, -1])
def test_ids_outside_the_vocabulary(impl, bad):
    x, weight, _, y = inputs(ignored=False)
    y %= 10
    y[4] = bad
    with pytest.raises(ValueError, match=rf"linear_cross_entropy: target\[4\] is {bad}; wanted an id in \[0, 10\)"):
        linear_cross_entropy(x, weight, y, vocab_size=10, chunk_rows=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": lambda t: t.long()}, ["x is", "int64", "fp32"]),
        ({"weight": lambda t: t.double()}, ["weight is", "float64", "float32"]),
        ({"weight": lambda t: t[:, :3]}, ["weight is", r"\[11, 3\]", r"\[columns, 7\]"]),
        ({"bias": lambda t: t[:3]}, ["bias is", r"\[3\]", r"\[11\]"]),
        ({"bias": lambda t: t.double()}, ["bias is", "float64", "float32"]),
        ({"target": lambda t: t.int()}, ["target is", "int32", "int64"]),
        ({"target": lambda t: t[:3]}, ["target is", r"\[3\]", r"\[9\]"]),
        ({"target": lambda t: t.to("meta")}, ["target is", "meta", "cpu"]),
        ({"weight": lambda t: t.to("meta")}, ["weight is", "meta", "cpu"]),
        ({"vocab_size": lambda n: 0}, ["vocab_size is 0", "at least 1"]),
        ({"vocab_size": lambda n: 12}, ["split over the ranks", r"\[0, 11\)", "vocab_size=12"]),
        ({"vocab_start": lambda n: 3}, ["split over the ranks", r"\[3, 11\)", "vocab_start"]),
        ({"vocab_start": lambda n: -1}, ["vocab_start is -1", "at least 0"]),
        ({"label_smoothing": lambda n: 1.5}, ["label_smoothing is 1.5", r"\[0, 1\]"]),
        ({"z_loss": lambda n: -1.0}, ["z_loss is -1.0"]),
        ({"reduction": lambda n: "avg"}, ["reduction is 'avg'", "'mean'"]),
        ({"chunk_rows": lambda n: 0}, ["chunk_rows is 0", "at least 1"]),
    ],
)
def test_refusals_name_operator_argument_got_and_wanted(impl, change, words):
    x, weight, bias, y = inputs()
    arguments = {"x": x, "weight": weight, "bias": bias, "target": y, "vocab_size": 11}
    for name, turn in change.items():
        arguments[name] = turn(arguments.get(name))
    with pytest.raises(ValueError, match=".*".join(["linear_cross_entropy: ", *words])) as caught:
        linear_cross_entropy(**arguments)
    assert "\n" not in str(caught.value)


# ---- Triton ----


@pytest.mark.skipif("triton" in IMPLS, reason="this is the interpreter's process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here")
def test_in_the_interpreter():
    names = ("test_linear_cross_entropy.py", Path(__file__).name)
    files = [str(Path(__file__).with_name(name)) for name in names]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-v", "-p", "no:cacheprovider", *files, "-k", "triton"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_sixteen_bits_are_widened_where_the_cpu_has_no_arithmetic_of_them(dtype, reduction, monkeypatch):
    """Torch's own product of them is many times slower there."""
    products = []

    def spied(name, product):
        def run(*args, **kwargs):
            products.append((name, args[-1].dtype))
            return product(*args, **kwargs)

        return run

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, spied(name, getattr(torch, name)))
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 40), torch.randn(1100, 40), torch.randn(1100)  # two blocks of columns
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    target = torch.randint(1100, (9,))
    _C.set_native_16bit(False)
    try:
        loss = linear_cross_entropy(
            *leaves[:2], target, bias=leaves[2], vocab_size=1100, reduction=reduction, chunk_rows=4
        )
        got = torch.autograd.grad(loss.sum(), leaves)
    finally:
        _C.set_native_16bit(None)
    assert not any(kind == dtype for _, kind in products), products
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = F.cross_entropy(F.linear(*wide), target, reduction=reduction)
    for found, want in zip(got, torch.autograd.grad(truth.sum(), wide), strict=True):
        torch.testing.assert_close(found.double(), want, rtol=0.05, atol=0.02 * want.abs().max().item())
