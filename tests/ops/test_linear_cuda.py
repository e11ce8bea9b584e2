"""The linear family's CUDA operators on a GPU, against fp64 and against plain torch, in each mode of choice.

The raw operators are called: what Python adds above them is the same on every device and tested on the CPU.
bench/gpu_check.sh runs this file; no GPU has run it yet where docs/building.md says so.
"""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from megacore import _C
from tests.oracle import DTYPES, assert_as_good_as_torch, offset_by_one, views

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and _C.built_with_cuda), reason="no GPU here, or _C was built without csrc/cuda"
    ),
]
ops = torch.ops.megacore
ACTIVATIONS = ["", "tanh", "none", "swiglu"]
# ones, primes, sizes past a tile, whole vectors, and columns that no fused epilogue takes (34, 1026)
M_K_N = [(1, 1, 2), (7, 13, 34), (65, 8, 16), (130, 17, 1026), (257, 512, 768), (1024, 768, 3072)]
LARGE = (2048, 1024, 4096)


@pytest.fixture(params=["measured", "first", "unfused"])
def mode(request):
    _C.set_linear_mode(request.param)
    yield request.param
    _C.set_linear_mode("measured")


def inputs(m, k, n, dtype, act="", seed=0):
    g = torch.Generator().manual_seed(seed)
    out = n // 2 if act == "swiglu" else n
    made = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((m, k), (n, k), (n,), (m, out))]
    made[1] /= k**0.5
    return [t.to(dtype).to(DEVICE) for t in made]


def forward(act, x, w, b):
    """y and the pre-activation, by our operators."""
    if act == "":
        y = ops.linear(x, w, b)
        return y, y
    return ops.linear_swiglu(x, w, b) if act == "swiglu" else ops.linear_gelu(x, w, b, act)


def backward(act, x, w, pre, dy, bias=True):
    """dx, dW, db, by our operators."""
    if act == "":
        dpre, db = dy, ops.linear_dbias(dy) if bias else None
    elif act == "swiglu":
        dpre, db = ops.linear_swiglu_dpre(dy, pre, bias)
    else:
        dpre, db = ops.linear_gelu_dpre(dy, pre, bias, act)
    return ops.linear_dgrad(dpre, w), ops.linear_wgrad(dpre, x), db


def plain(act, x, w, b):
    pre = F.linear(x, w, b)
    if act == "swiglu":
        gate, up = pre.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(pre, approximate=act) if act else pre


def plain_gradients(act, x, w, b, dy):
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b) if t is not None]
    y = plain(act, leaves[0], leaves[1], leaves[2] if b is not None else None)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def check_all(act, x, w, b, dy, got):
    wide = [None if t is None else t.double() for t in (x, w, b, dy)]
    truth, measure = plain_gradients(act, *wide), plain_gradients(act, x, w, b, dy)
    for ours, ref, torchs in zip([t for t in got if t is not None], truth, measure, strict=True):
        assert_as_good_as_torch(ours, ref, torchs)


def run(act, x, w, b, dy):
    y, pre = forward(act, x, w, b)
    return [y, *backward(act, x, w, pre, dy, b is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_fp64(dtype, act, bias, mode):
    for m, k, n in M_K_N:
        found = []
        for seed in range(32 if m * n < 300 else 1):  # several, or torch's error on a few elements is a matter of luck
            x, w, b, dy = inputs(m, k, n, dtype, act, seed)
            b = b if bias else None
            got = [t for t in run(act, x, w, b, dy) if t is not None]
            wide = [None if t is None else t.double() for t in (x, w, b, dy)]
            found.append([got, plain_gradients(act, *wide), plain_gradients(act, x, w, b, dy)])
        for runs in zip(*(zip(*f, strict=True) for f in found), strict=True):  # of y, dx, dW, db
            assert_as_good_as_torch(*(torch.stack(side) for side in zip(*runs, strict=True)))


def exact(x, approximate):
    """fp64 without the cancellation of 1 + tanh and 1 + erf, so that the tail has digits too."""
    if approximate == "tanh":
        return x * torch.sigmoid((8 / math.pi) ** 0.5 * (x + 0.044715 * x**3))
    return x * 0.5 * torch.special.erfc(-x / 2**0.5)


def approximate_serves(act, dtype):
    return act == "tanh" and dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("act", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_over_the_whole_range(dtype, act, mode):
    """A weight matrix of the identity makes the operator the curve itself, in vectors of 8 so that it may fuse.

    Each interval by itself, or the largest value sets the bound. The library's GELU has an absolute error that the
    tail's small values would show; it may run in 16 bits only, and there it is held to a bound over the tail at once.
    """
    eye = torch.eye(8, dtype=dtype, device=DEVICE)
    may_fuse = mode != "unfused" and approximate_serves(act, dtype)
    edges = [-1e4, 1e4] if may_fuse else [-1e4, -100, -30, -12, -6, -3, -1, 0, 1, 3, 6, 12, 30, 1e4]
    edges = sorted({*edges, -30, 30})
    for low, high in zip(edges, edges[1:], strict=False):
        x = torch.linspace(low, high, 8000, dtype=torch.float64).to(dtype).to(DEVICE).view(-1, 8)
        ones = torch.ones_like(x)
        wide = x.double().requires_grad_()
        truth = exact(wide, act)
        truth = truth.detach(), *torch.autograd.grad(truth.sum(), wide)
        measure = plain_gradients(act, x, eye, None, ones)[:2]
        for ours, ref, torchs in zip(run(act, x, eye, None, ones)[:2], truth, measure, strict=True):
            assert_as_good_as_torch(ours, ref, torchs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_gradients_are_added_in_fp32(dtype, mode):
    for (m, k, n), gap in product([(65, 8, 16), (130, 17, 31), (2048, 256, 512)], (0, 5)):
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        buffer = torch.full((n, k + gap), 7.0, dtype=kind, device=DEVICE)
        main = buffer[:, :k].copy_(torch.randn(n, k))  # rows of a wider buffer where there is a gap
        truth, measure = main.double(), main.clone()
        for seed in (1, 2):  # two micro-batches; timing must not have added anything
            x, _, _, dpre = inputs(m, k, n, dtype, seed=seed)
            ops.linear_wgrad_(dpre, x, main)
            truth = truth + dpre.double().t() @ x.double()
            measure = measure + dpre.to(kind).t() @ x.to(kind)
        assert_as_good_as_torch(main, truth, measure)
        assert bool((buffer[:, k:] == 7).all())


@pytest.mark.parametrize("act", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_bias_gradient_inside_the_products(dtype, act, mode):
    """linear_gelu_dgrad = linear_dgrad, then linear_gelu_dpre; linear_wgrad_dbias = linear_wgrad and linear_dbias."""
    for m, k, n in M_K_N[1:]:
        x, w, _, dpre = inputs(m, k, n, dtype)
        pre = 2 * x  # pretend: x = gelu(pre)
        got = [*ops.linear_gelu_dgrad(dpre, w, pre, True, act), *ops.linear_wgrad_dbias(dpre, x)]

        def composed(dpre, w, pre, x):
            leaf = pre.detach().clone().requires_grad_()
            (below,) = torch.autograd.grad(F.gelu(leaf, approximate=act), leaf, dpre @ w)
            return below, below.sum(0), dpre.t() @ x, dpre.sum(0)

        truth = composed(*(t.double() for t in (dpre, w, pre, x)))
        for ours, ref, torchs in zip(got, truth, composed(dpre, w, pre, x), strict=True):
            assert_as_good_as_torch(ours, ref, torchs)
        assert ops.linear_gelu_dgrad(dpre, w, pre, False, act)[1].numel() == 0


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_every_time(dtype, act, mode):
    """The first call of a problem, which times, gives what every later one gives: a recomputed forward is exact."""
    x, w, b, dy = inputs(*LARGE, dtype, act)
    main = [torch.zeros(w.shape, device=DEVICE) for _ in range(2)]
    first = run(act, x, w, b, dy)
    for _ in range(4):
        assert all(torch.equal(a, c) for a, c in zip(first, run(act, x, w, b, dy), strict=True))
    dpre = torch.randn(x.shape[0], w.shape[0], device=DEVICE).to(dtype)
    for buffer in main:
        ops.linear_wgrad_(dpre, x, buffer)
    assert torch.equal(*main)
    assert f"m={w.shape[0]}" in _C.linear_choices()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_do_not_share(dtype, mode):
    cases = [inputs(512, 1024, 1024, dtype, "tanh", seed) for seed in range(4)]
    wanted = [run("tanh", *case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    found = [[] for _ in cases]
    for _ in range(10):
        for stream, case, results in zip(streams, cases, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(run("tanh", *case))
    torch.cuda.synchronize()
    for want, results in zip(wanted, found, strict=True):
        assert all(torch.equal(a, c) for result in results for a, c in zip(want, result, strict=True))


@pytest.mark.parametrize("warm", [True, False])
def test_graph_capture(warm, mode):
    """A captured step gives eager's bits after a warm-up, and without one, when it cannot time, a right answer."""
    m, k, n = (384, 256, 512) if warm else (392, 264, 520)  # a problem that no other test has met, or it would be warm
    x, w, b, dy = inputs(m, k, n, torch.bfloat16, "tanh")
    main = torch.zeros(w.shape, device=DEVICE)

    def step():
        y, pre = forward("tanh", x, w, b)
        dpre, db = ops.linear_gelu_dpre(dy, pre, True, "tanh")
        ops.linear_wgrad_(dpre, x, main)
        return y, ops.linear_dgrad(dpre, w), db

    ops.linear(x[:8], w[:8], None)  # the library's handle and the modules: what a capture cannot load
    eager = [t.clone() for t in step()] if warm else None
    main.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    main.zero_()
    for t in captured:
        t.fill_(float("nan"))
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    if warm:
        assert all(torch.equal(a, c) for a, c in zip(eager, captured, strict=True))
    check_all("tanh", x, w, b, dy, [captured[0], captured[1], (main / 2).to(x.dtype), captured[2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views(dtype, mode):
    x, w, b, dy = inputs(48, 40, 56, dtype, "tanh")
    for view_x, view_w, view_dy in zip(*(views(t).values() for t in (x, w, dy)), strict=True):
        check_all("tanh", view_x, view_w, b, view_dy, run("tanh", view_x, view_w, b, view_dy))
    shifted = [offset_by_one(t) for t in (x, w, b, dy)]
    check_all("tanh", *shifted, run("tanh", *shifted))
    one = torch.ones((), dtype=dtype, device=DEVICE).expand(48, 56)  # what y.sum().backward() sends
    check_all("tanh", x, w, b, one, run("tanh", x, w, b, one))
    stack = x.view(4, 12, 40)
    assert ops.linear(stack, w, b).shape == (4, 12, 56)
    assert torch.equal(ops.linear_wgrad(dy.view(4, 12, 56), stack), ops.linear_wgrad(dy, x))


@pytest.mark.parametrize("act", ["", "tanh"])
def test_a_transposed_weight_is_not_copied(act):
    m, k, n = 128, 4096, 4096
    x, w, b, dy = inputs(m, k, n, torch.bfloat16, act)
    turned = w.t().contiguous().t()
    run(act, x, turned, b, dy)  # the choices are made, the workspace is there
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y, pre = forward(act, x, turned, b)
    ops.linear_dgrad(dy, turned)
    assert torch.cuda.max_memory_allocated() - before < turned.numel() * 2
    assert_as_good_as_torch(y, plain(act, x.double(), w.double(), b.double()), plain(act, x, w, b))


def test_offsets_past_two_to_the_31():
    """pre has 2^31 elements and more, so the last rows lie past what 32 bits address."""
    m, k, n = 2**19 + 3, 8, 4104
    if torch.cuda.mem_get_info()[0] < 28 << 30:
        pytest.skip("needs 28 GiB of free GPU memory")
    x, w, b, _ = inputs(m, k, n, torch.bfloat16, "tanh")
    tail = slice(m - 70, m)
    y, pre = ops.linear_gelu(x, w, b, "tanh")
    assert pre.numel() > 2**31
    measure = plain("tanh", x[tail], w, b)
    assert_as_good_as_torch(y[tail], plain("tanh", x[tail].double(), w.double(), b.double()), measure)
    dy = y  # any values will do
    dpre, db = ops.linear_gelu_dpre(dy, pre, True, "tanh")
    leaf = pre[tail].double().requires_grad_()
    (want,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, dy[tail].double())
    assert_as_good_as_torch(dpre[tail], want, want.to(torch.bfloat16))
    total = sum(part.double().sum(0) for part in dpre.split(2**15))
    torch.testing.assert_close(db.double(), total, rtol=2e-2, atol=2e-2 * float(total.abs().max()))
    torch.testing.assert_close(ops.linear_dbias(dpre), db, rtol=2e-2, atol=2e-2 * float(total.abs().max()))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_sizes_of_zero(act, mode):
    for m, k, n in [(0, 4, 8), (4, 0, 8), (4, 4, 0), (0, 0, 0)]:
        x, w, b, dy = inputs(m, max(k, 1), n, torch.float32, act)
        x, w = x[:, :k], w[:, :k]
        for ours, torchs in zip(run(act, x, w, b, dy), plain_gradients(act, x, w, b, dy), strict=True):
            torch.testing.assert_close(ours, torchs)
        main = torch.ones(n, k, device=DEVICE)
        ops.linear_wgrad_(torch.ones(m, n, device=DEVICE), x, main)
        assert bool((main == 1).all())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, w, b: ops.linear(x, w.half(), b), "linear: weight is"),
        (lambda x, w, b: ops.linear(x, w[:, 1:], b), r"linear: weight is .*wanted \[N, 8\]"),
        (lambda x, w, b: ops.linear(x, w, b[1:]), r"linear: bias is .*wanted \[6\]"),
        (lambda x, w, b: ops.linear(x, w.cpu(), b), "linear: weight is .*cpu"),
        (lambda x, w, b: ops.linear(x.long(), w.long(), None), "linear: x is .*wanted dtype Float"),
        (lambda x, w, b: ops.linear_gelu(x, w, b, "erf"), "linear_gelu: approximate is 'erf'"),
        (lambda x, w, b: ops.linear_swiglu(x, w[:5], None), "linear_swiglu: weight is .*even"),
        (lambda x, w, b: ops.linear_dgrad(x, w), r"linear_dgrad: weight is .*wanted \[8, K\]"),
        (lambda x, w, b: ops.linear_wgrad(x[1:], x), "linear_wgrad: x is"),
        (lambda x, w, b: ops.linear_wgrad_(x, x, x.new_zeros(8, 7)), "linear_wgrad_: main_grad is"),
        (
            lambda x, w, b: ops.linear_wgrad_(x, x, x.new_zeros(8, 8).half()),
            "linear_wgrad_: main_grad is .*wanted Float",
        ),
        (lambda x, w, b: ops.linear_wgrad_(x, x, x.new_zeros(8, 8).t()), "linear_wgrad_: main_grad is .*contiguous"),
    ],
)
def test_refusals(call, words):
    x, w, b, _ = inputs(4, 8, 6, torch.float32)
    with pytest.raises(ValueError, match=words):
        call(x, w, b)


def test_mode_is_a_name():
    with pytest.raises(ValueError, match="wanted 'measured', 'first' or 'unfused'"):
        _C.set_linear_mode("fastest")
