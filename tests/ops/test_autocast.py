"""The operators under torch.autocast, against F.linear, F.gelu and F.cross_entropy under the same autocast."""

import pytest
import torch
import torch.nn.functional as F

from megacore.comm.mesh import Mesh
from megacore.models.gpt import GPT, GPTConfig, plan
from megacore.ops import cross_entropy, dropout, linear_gelu, use
from megacore.parallel.plan import parallelize

INSIDE = [True, False]  # backward inside or outside of the autocast context
IMPLS = ["cpp", "reference"]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SERVED = [("cpu", "cpp"), ("cpu", "reference"), pytest.param("cuda", "reference", marks=NEEDS_GPU)]


def plain(x, w, b, approximate="tanh"):
    return F.gelu(F.linear(x, w, b), approximate=approximate)


def run(f, leaves, inside, low=torch.bfloat16, device="cpu"):
    """Output and gradients of fresh leaves; the upstream gradient is a fixed function of the output's shape."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in leaves]
    wanted = [t for t in leaves if t is not None]
    with torch.autocast(device, low):
        y = f(*leaves)
        dy = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).to(y.dtype)
        grads = torch.autograd.grad(y, wanted, dy) if inside else None
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if grads is None else grads)]


def inputs(m, k, n, dtypes=(torch.float32,) * 3, device="cpu"):
    g = torch.Generator().manual_seed(0)
    shapes = [(2, m, k), (n, k), (n,)]
    return [torch.randn(s, generator=g).to(d).to(device) / s[-1] ** 0.5 for s, d in zip(shapes, dtypes, strict=True)]


def assert_close_to_low_precision(got, want, low):
    assert got.dtype == want.dtype and got.shape == want.shape
    scale = want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0, atol=4 * torch.finfo(low).eps * scale)


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device, impl", SERVED)
def test_linear_gelu_is_linear_and_gelu(device, impl, low, inside):
    for m, k, n in [(1, 1, 1), (7, 13, 31), (65, 40, 1030)]:
        for bias in (True, False):
            leaves = inputs(m, k, n, device=device)
            leaves = leaves if bias else [*leaves[:2], None]
            with use(impl, "linear_gelu", device):
                got = run(linear_gelu, leaves, inside, low, device)
            want = run(plain, leaves, inside, low, device)
            assert got[0].dtype == low and {t.dtype for t in got[1:]} == {torch.float32}
            for ours, theirs in zip(got, want, strict=True):
                assert_close_to_low_precision(ours, theirs, low)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("inside", INSIDE)
def test_linear_gelu_takes_mixed_dtypes_under_autocast_only(impl, inside):
    leaves = inputs(5, 8, 6, (torch.bfloat16, torch.float32, torch.float32))
    with use(impl, "linear_gelu"):
        got = run(linear_gelu, leaves, inside)
        with pytest.raises(ValueError, match="linear_gelu: weight is .*Float"):
            linear_gelu(*leaves)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert linear_gelu(leaves[0].float(), *leaves[1:]).dtype == torch.float32
    for ours, theirs in zip(got, run(plain, leaves, inside), strict=True):
        assert_close_to_low_precision(ours, theirs, torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLS)
def test_linear_gelu_keeps_fp64_under_autocast_as_torch_does(impl):
    leaves = inputs(5, 8, 6, (torch.float64,) * 3)
    with use(impl, "linear_gelu"):
        got = run(linear_gelu, leaves, True)
    for ours, theirs in zip(got, run(plain, leaves, True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_raw_operator_is_deaf_to_autocast(dtype):
    """Its kernel reads the product of aten's GEMM as the dtype of x: an autocast GEMM was memory corruption."""
    leaves = inputs(65, 40, 70, (dtype,) * 3)

    def raw(x, w, b):
        return torch.ops.megacore.linear_gelu(x, w, b, "tanh")

    def both(*leaves):
        y, pre = raw(*leaves)
        return y + pre  # the second output's gradient too

    for low in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", low):
            found = raw(*leaves)
        for ours, outside in zip(found, raw(*leaves), strict=True):
            assert torch.equal(ours, outside) and ours.dtype == dtype
        inside = run(both, leaves, True, low)
        for ours, outside in zip(inside, run(both, leaves, False, low), strict=True):
            assert torch.equal(ours, outside) and ours.dtype == dtype


@pytest.mark.parametrize("inside", INSIDE)
def test_linear_gelu_compiles_in_one_graph(inside):
    leaves = inputs(6, 10, 7)
    compiled = torch.compile(linear_gelu, fullgraph=True)
    outside = compiled(*leaves)
    got, want = run(compiled, leaves, inside), run(linear_gelu, leaves, inside)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert outside.dtype == torch.float32 and torch.equal(outside, linear_gelu(*leaves))


def ce(logits, target, reduction="mean"):
    return cross_entropy(logits, target, vocab_size=logits.shape[-1], reduction=reduction)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy(impl, inside, dtype, reduction):
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, 37, generator=g)).to(dtype)
    target = torch.randint(37, (9,), generator=g)
    target[2] = -100
    with use(impl, "cross_entropy"):
        got = run(lambda x: ce(x, target, reduction), [logits], inside)
    want = run(lambda x: F.cross_entropy(x, target, reduction=reduction), [logits], inside)
    assert got[0].dtype == torch.float32 and got[1].dtype == dtype
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert_close_to_low_precision(got[1], want[1], dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_does_not_see_autocast(impl, inside, dtype):
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    sample, position = torch.arange(2), torch.arange(5)

    def drop(x):
        return dropout(x, 0.3, key=7, sample=sample, position=position)

    leaf = x.clone().requires_grad_()
    y = drop(leaf)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype)
    want = [y.detach(), *torch.autograd.grad(y, leaf, dy)]
    with use(impl, "dropout"):
        got = run(drop, [x], inside)
    for ours, outside in zip(got, want, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, outside)
    assert (got[0] == 0).any() and (got[0] != 0).any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("inside", INSIDE)
def test_a_parallelized_gpt_is_the_plain_one(impl, inside):
    config = GPTConfig(layers=2, hidden=32, heads=4, vocab_size=61, seq_length=16)
    torch.manual_seed(0)
    models = [GPT(config), GPT(config)]
    models[1].load_state_dict(models[0].state_dict())
    parallelize(models[1], Mesh(), plan(config))
    ids = torch.randint(61, (3, 17))
    losses = []
    for model, parallel in zip(models, (False, True), strict=True):
        with use(impl, "*"), torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1])
            target = ids[:, 1:]
            loss = ce(logits, target) if parallel else F.cross_entropy(logits.flatten(0, 1), target.flatten())
            assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=4e-3, atol=0)
    theirs = dict(models[0].named_parameters())
    for name, param in models[1].named_parameters():
        assert param.grad.dtype == torch.float32
        error, size = (param.grad - theirs[name].grad).norm(), theirs[name].grad.norm()
        assert error <= 0.03 * size + 1e-6, name
