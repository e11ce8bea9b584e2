"""The linear family against fp64 and against plain torch: values, gradients, sizes, compilation, refusals."""

import math

import pytest
import torch
from torch.library import opcheck

from megacore.ops import linear_gelu, linear_swiglu, use
from tests.ops.linear_cases import ACTIVATED, CASES, IMPLS, KERNELS, PATHS, SERVED, Case, name, serving, with_gradients
from tests.oracle import DTYPES, assert_as_good_as_torch, shapes

GELUS = [case for case in CASES if case.op == "linear_gelu"]
M_K_N = [(1, 1, 1), *shapes([7, 65], [13], [1, 31]), (130, 17, 1025)]
PAST_PANELS = [(2050, 5, 7), (3, 600, 5), (2, 3, 4100)]  # of the scratch of widened products (csrc/cpu/gemm.cpp)
by_case = pytest.mark.parametrize("case", CASES, ids=name)
by_activation = pytest.mark.parametrize("case", ACTIVATED, ids=name)


KERNEL_RUNS = [(path, dtype) for path, dtype in SERVED if path != "reference"]


@pytest.fixture(params=KERNEL_RUNS, ids=lambda run: f"{run[0]}-{str(run[1])[6:]}")
def run(request):
    """(path, dtype): how the family is served during the test, and with what."""
    with serving(request.param[0]):
        yield request.param


@pytest.fixture(params=PATHS)
def path(request):
    with serving(request.param):
        yield request.param


# ---- values ----


@by_case
@pytest.mark.parametrize("bias", [True, False])
def test_matches_fp64(case, bias, run):
    path, dtype = run
    triton = path == "triton"
    sizes = M_K_N + PAST_PANELS if path == "cpp-widened" else M_K_N
    if triton:  # slow in the interpreter: no large size, and none that needs hundreds of trials
        sizes = [(1, 1, 1), (7, 13, 31), (65, 13, 1), (65, 13, 31)]
    for m, k, n in sizes:
        found = []
        # several, or torch's error on a handful of elements is a matter of luck
        some = (24 if m * n == 1 else 4) if triton else 200 if m * n == 1 else 24
        for seed in range(1 if m * n > 5000 else some):
            x, w, b, dy = case.inputs(m, k, n, dtype, bias, seed)
            wide = [t if t is None else t.double() for t in (x, w, b, dy)]
            found.append(
                [
                    with_gradients(case, x, w, b, dy),
                    with_gradients(case.plain, *wide),
                    with_gradients(case.plain, x, w, b, dy),
                ]
            )
        for runs in zip(*(zip(*f, strict=True) for f in found), strict=True):  # of y, dx, dw, db
            assert_as_good_as_torch(*(torch.stack(side) for side in zip(*runs, strict=True)))


@by_case
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_gives_the_formula(impl, case):
    dtype, tolerance = (torch.float32, 2e-6) if impl == "triton" else (torch.float64, 1e-13)
    x, w, b, dy = case.inputs(5, 7, 3, dtype)
    with serving(impl):
        got = with_gradients(case, x, w, b, dy)
    for ours, ref in zip(got, with_gradients(exact(case), x, w, b, dy), strict=True):
        torch.testing.assert_close(ours, ref, rtol=tolerance, atol=tolerance)


def exact(case: Case):
    """fp64 without the cancellation of 1 + tanh and 1 + erf, so that the tail has digits too."""

    def act(v):
        if case.op == "linear_swiglu":
            gate, up = v.chunk(2, -1)
            return gate * torch.sigmoid(gate) * up
        if case.approximate == "tanh":
            return v * torch.sigmoid((8 / math.pi) ** 0.5 * (v + 0.044715 * v**3))
        return v if case.op == "linear" else v * 0.5 * torch.special.erfc(-v / 2**0.5)

    return lambda x, w, b: act(x @ w.t() if b is None else x @ w.t() + b)


@by_activation
def test_curve_and_derivative_over_the_whole_range(case, run):
    """Each interval by itself, or the largest value sets the bound; of many points, or luck at the largest does."""
    _, dtype = run
    edges = [-1e4, -100, -30, -12, -6, -3, -1, 0, 1, 3, 6, 12, 30, 1e4 if case.halves == 1 else 100]
    parts = [torch.linspace(low, high, 4096, dtype=torch.float64) for low, high in zip(edges, edges[1:], strict=False)]
    x = torch.cat(parts).to(dtype).view(-1, 64)
    one = torch.eye(64, dtype=dtype).repeat(case.halves, 1)  # makes the operator the activation; SwiGLU: silu(x) * x
    dy = torch.ones_like(x)
    got = with_gradients(case, x, one, None, dy)[:2]
    truth = with_gradients(exact(case), x.double(), one.double(), None, dy.double())[:2]
    measure = with_gradients(case.plain, x, one, None, dy)[:2]
    for results in zip(got, truth, measure, strict=True):
        for ours, ref, torchs in zip(*(t.split(4096 // 64) for t in results), strict=True):
            assert_as_good_as_torch(ours, ref, torchs)


@pytest.mark.parametrize("case", GELUS, ids=name)
def test_strange_values(case, run):
    _, dtype = run
    one = torch.ones(1, 1, dtype=dtype)
    big = torch.finfo(dtype).max
    x = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, big, -big], dtype=dtype).unsqueeze(1)
    y, dx, _ = (t.flatten().tolist() for t in with_gradients(case, x, one, None, torch.ones_like(x)))
    assert y[0] == torch.inf and math.isnan(y[1]) and y[2:] == [0, 0, big, 0]
    assert dx[0] == 1 and math.isnan(dx[1]) and dx[2:] == [0.5, 0.5, 1, 0]


def test_strange_values_of_the_gate(run):
    path, dtype = run
    case, big = CASES[-1], torch.finfo(dtype).max
    x = torch.tensor([torch.inf, torch.nan, 0.0, big, -big], dtype=dtype)
    pre = torch.stack([x, torch.ones_like(x)], 1)
    impl = path.partition("-")[0]
    gate, up = case.raw_dpre(impl)(torch.ones_like(x).unsqueeze(1), pre, False)[0].t().tolist()
    assert gate[0] == 1 and math.isnan(gate[1]) and gate[2:] == [0.5, 1, 0]
    assert up[0] == torch.inf and math.isnan(up[1]) and up[2:] == [0, big, 0]


@by_case
def test_zero_sizes(case, path):
    for m, k, n in [(0, 3, 5), (4, 0, 5), (4, 3, 0), (0, 0, 0)]:
        x, w, b, dy = case.inputs(m, k, n, torch.float32)
        for leaves in ([x, w, b, dy], [t.bfloat16() for t in (x, w, b, dy)]):
            got = with_gradients(case, *leaves)
            loose = {"rtol": 0.05, "atol": 0.02} if leaves[0].dtype == torch.bfloat16 else {}
            for g, r in zip(got, with_gradients(case.plain, *leaves), strict=True):
                torch.testing.assert_close(g, r, **loose)


# ---- registration ----


@by_case
@pytest.mark.parametrize(
    ("impl", "dtype"), [run for run in SERVED if run[0] in KERNELS and run != ("triton", torch.float16)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(case, impl, dtype, bias):
    x, w, b, dy = case.inputs(6, 10, 7, dtype, bias)
    leaves = [t if t is None else t.requires_grad_() for t in (x, w, b)]
    opcheck(case.raw(impl), (*leaves, *case.form))
    if case.op != "linear":
        opcheck(case.raw_dpre(impl), (dy, torch.randn(6, 7 * case.halves).to(dtype), bias, *case.form))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_the_products(dtype):
    x, w, _, dy = (t.requires_grad_() for t in CASES[0].inputs(6, 10, 7, dtype))
    main = torch.zeros(7, 10, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    opcheck(torch.ops.megacore.linear_dbias.default, (dy,))
    opcheck(torch.ops.megacore.linear_dgrad.default, (dy, w))
    opcheck(torch.ops.megacore.linear_wgrad.default, (dy, x))
    opcheck(torch.ops.megacore.linear_wgrad_.default, (dy.detach(), x.detach(), main))
    opcheck(torch.ops.megacore.linear_wgrad_dbias.default, (dy, x))
    opcheck(torch.ops.megacore.matmul_into.default, (dy.detach().t(), x.detach(), main, dtype.itemsize > 2))
    opcheck(torch.ops.megacore.linear_gelu_dgrad.default, (dy.detach(), w.detach(), x.detach(), True, "tanh"))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=name)
def test_compiles_in_one_graph(case):
    x, w, b, dy = case.inputs(6, 10, 7, torch.float32)
    got = with_gradients(torch.compile(case, fullgraph=True), x, w, b, dy)
    for compiled, eager in zip(got, with_gradients(case, x, w, b, dy), strict=True):
        assert torch.equal(compiled, eager)


def test_choice_is_captured_at_forward():
    x, w, b, _ = CASES[1].inputs(6, 10, 7, torch.float32)
    x.requires_grad_()
    with use("reference", "linear_gelu"):
        y = linear_gelu(x, w, b)
    assert "Gelu" in y.grad_fn.name()
    assert "megacore" in linear_gelu(x, w, b).grad_fn.name()


# ---- refusals ----


@by_case
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x.double(), w, b), ["weight", "float", "Double", "x"]),
        (lambda x, w, b: (x, w, b.half()), ["bias", "Half", "Float"]),
        (lambda x, w, b: (x, w.t(), b), ["weight", r"\[10, \d+\]", r"\[N, 10\]"]),
        (lambda x, w, b: (x, w, b[:3]), ["bias", r"\[3\]", r"\[\d+\]"]),
        (lambda x, w, b: (x.long(), w, b), ["x", "Long|int64", "BFloat16"]),
        (lambda x, w, b: (x, w.to("meta"), b), ["weight", "meta", "cpu"]),
        (lambda x, w, b: (x[0, 0], w, b), ["x", r"\[\]", r"\[\.\.\., K\]"]),
    ],
)
def test_refusals_name_operator_argument_got_and_wanted(case, impl, change, words):
    x, w, b, _ = case.inputs(6, 10, 7, torch.float32)
    with serving(impl), pytest.raises(ValueError, match="(?i)" + ".*".join([case.op, *words])) as caught:
        case(*change(x, w, b))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("impl", IMPLS)
def test_refusals_of_one_operator(impl):
    x, w, b, _ = CASES[0].inputs(6, 10, 7, torch.float32)
    with serving(impl):
        with pytest.raises(ValueError, match="linear_gelu: approximate is 'erf'; wanted 'tanh' or 'none'"):
            linear_gelu(x, w, b, approximate="erf")
        with pytest.raises(ValueError, match=r"linear_swiglu: weight is \[7, 10\] .* wanted \[2F"):
            linear_swiglu(x, w, b)
        if impl == "triton":
            with pytest.raises(
                ValueError, match=r"linear_gelu: x is \[6, 10\] Double .*use\('reference', 'linear_gelu'"
            ):
                linear_gelu(x.double(), w.double())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ops, d, x: ops.linear_dgrad(d, x), r"linear_dgrad: weight is \[6, 10\].*wanted \[7, K\]"),
        (lambda ops, d, x: ops.linear_wgrad(d[:3], x), r"linear_wgrad: dpre is \[3, 7\].*leading sizes of x"),
        (lambda ops, d, x: ops.linear_wgrad_(d, x, d), r"linear_wgrad_: main_grad is \[6, 7\].*wanted \[7, 10\]"),
        (lambda ops, d, x: ops.linear_wgrad_(d, x, d.half()), "linear_wgrad_: main_grad is .*Half.*wanted dtype Float"),
        (lambda ops, d, x: ops.linear_gelu_dpre(d, x, True, "tanh"), r"linear_gelu_dpre: dy is .*wanted \[6, 10\]"),
        (lambda ops, d, x: ops.linear_swiglu_dpre(d, x, True), r"linear_swiglu_dpre: dy is .*wanted \[6, 5\]"),
    ],
)
def test_refusals_of_the_parts_of_backward(call, words):
    x, _, _, d = CASES[0].inputs(6, 10, 7, torch.float32)
    with pytest.raises(ValueError, match=words) as caught:
        call(torch.ops.megacore, d, x)
    assert "\n" not in str(caught.value)
