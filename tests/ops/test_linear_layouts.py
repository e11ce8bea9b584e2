"""The linear family on views, expanded gradients and addresses beyond 31 bits (MB-21, MB-23)."""

import pytest
import torch

from tests.ops.linear_cases import ACTIVATED, CASES, KERNELS, PATHS, SERVED, name, serving, with_gradients
from tests.oracle import offset_by_one, views

by_case = pytest.mark.parametrize("case", CASES, ids=name)


@pytest.fixture(params=PATHS)
def path(request):
    with serving(request.param):
        yield request.param


@by_case
@pytest.mark.parametrize(("path", "dtype"), [run for run in SERVED if run[0] != "reference"], indirect=["path"])
def test_views_give_the_bits_of_contiguous_copies(case, dtype, path):
    """MB-23 for x, weight, bias and the upstream gradient."""
    x, w, b, dy = case.inputs(6, 10, 10, dtype)
    whole = with_gradients(case, x, w, b, dy)

    def same(what, x_=x, w_=w, b_=b, dy_=dy):
        leaves = [t.detach().requires_grad_() for t in (x_, w_, b_)]  # keeps the strides
        y = case(*leaves)
        found = [y, *torch.autograd.grad(y, leaves, dy_)]
        for which, got, want in zip(["y", "dx", "dw", "db"], found, whole, strict=True):
            assert torch.equal(got, want), (what, which)

    for what, view in views(x).items():
        same(what, x_=view)
    for what, view in views(w).items():
        same(what, w_=view)
    for what, view in views(dy).items():
        same(what, dy_=view)
    same("every second", b_=b.new_full((2 * len(b),), 7.0)[::2].copy_(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_what_the_parts_of_backward_take(dtype, path):
    if path.startswith("triton"):
        pytest.skip("C++ operators")
    ops = torch.ops.megacore
    x, w, _, d = CASES[0].inputs(6, 10, 10, dtype)
    main = torch.randn(10, 10)
    sums = main.clone()
    ops.linear_wgrad_(d, x, sums)
    for view_d, view_x, view_w in zip(views(d).values(), views(x).values(), views(w).values(), strict=True):
        assert torch.equal(ops.linear_dbias(view_d), ops.linear_dbias(d))
        assert torch.equal(ops.linear_dgrad(view_d, view_w), ops.linear_dgrad(d, w))
        assert torch.equal(ops.linear_wgrad(view_d, view_x), ops.linear_wgrad(d, x))
        for buffer in views(main).values():
            ops.linear_wgrad_(view_d, view_x, buffer)
            torch.testing.assert_close(buffer, sums)


@by_case
def test_storage_offset(case, path):
    """A contiguous tensor that begins off a cache line is its own .contiguous(): MKL may sum it in another order."""
    x, w, b, dy = case.inputs(6, 10, 10, torch.float32)
    off = [offset_by_one(t) for t in (x, w, b, dy)]
    leaves = [t.requires_grad_() for t in off[:3]]
    y = case(*leaves)
    got = [y, *torch.autograd.grad(y, leaves, off[3])]
    for g, r in zip(got, with_gradients(case, x, w, b, dy), strict=True):
        torch.testing.assert_close(g, r, rtol=1e-6, atol=2e-6)


@by_case
def test_transposed_batch_and_expanded_gradients(case, path):
    """[S, B, K] seen as [B, S, K]; gradients with stride 0 in every dimension, and along the rows only."""
    base = torch.randn(5, 3, 10)
    _, w, b, _ = case.inputs(1, 10, 7, torch.float32)
    row = torch.randn(7)
    for dy in (torch.tensor(1.0).expand(3, 5, 7), row.expand(3, 5, 7), torch.randn(7, 5, 3).permute(2, 1, 0)):
        got = with_gradients(case, base.transpose(0, 1), w, b, dy)
        want = with_gradients(case, base.transpose(0, 1).contiguous(), w, b, dy.contiguous())
        for g, h in zip(got, want, strict=True):
            assert torch.equal(g, h)


@by_case
def test_one_vector_and_one_expanded_row(case, path):
    x, w, b, dy = case.inputs(1, 10, 7, torch.float32)
    want = with_gradients(case, x, w, b, dy)
    for got, ref in zip(with_gradients(case, x[0], w, b, dy[0]), want, strict=True):
        assert torch.equal(got, ref.reshape(got.shape))
    got = with_gradients(case, x.expand(6, 10), w, b, dy.expand(6, 7))
    whole = with_gradients(case, x.repeat(6, 1), w, b, dy.repeat(6, 1))
    for g, r in zip(got, whole, strict=True):
        torch.testing.assert_close(g, r)


@pytest.mark.parametrize("case", ACTIVATED, ids=name)
@pytest.mark.parametrize("impl", KERNELS)
def test_rows_that_lie_2_to_the_30_apart(case, impl):
    """MB-21 b: 4 GiB of addresses, of which three rows are touched."""
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    far.copy_(torch.randn(3, 64))
    pre = torch.randn(3, 64 * case.halves).bfloat16()
    op = case.raw_dpre(impl)
    for got, want in zip(op(far, pre, True, *case.form), op(far.clone(), pre, True, *case.form), strict=True):
        assert torch.equal(got, want)
    x = far.view(3, 64)
    w = torch.randn(4, 64).bfloat16()
    assert torch.equal(case.raw(impl)(x, w, None, *case.form)[0], case.raw(impl)(x.clone(), w, None, *case.form)[0])
    if impl == "cpp":
        assert torch.equal(torch.ops.megacore.linear_dbias(far), torch.ops.megacore.linear_dbias(far.clone()))


@pytest.mark.parametrize("case", ACTIVATED, ids=name)
@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_row_counts_around_2_to_the_16(case, rows, path):
    """MB-21 c."""
    if path == "triton":
        pytest.skip("its grids have one dimension, of 31 bits; the interpreter knows no limit and is slow")
    impl, w = path.partition("-")[0], torch.eye(4 * case.halves, 4)
    dy, pre = torch.randn(rows, 4), torch.randn(rows, 4 * case.halves)
    whole = case.raw_dpre(impl)(dy, pre, True, *case.form)
    cut = 65530
    parts = [case.raw_dpre(impl)(dy[s], pre[s], True, *case.form) for s in (slice(cut), slice(cut, None))]
    assert torch.equal(whole[0], torch.cat([p[0] for p in parts]))
    torch.testing.assert_close(whole[1], parts[0][1] + parts[1][1], rtol=1e-5, atol=1e-3)
    x = torch.randn(rows, 4)
    y = case(x, w, None)
    assert torch.equal(y, torch.cat([case(x[:cut], w, None), case(x[cut:], w, None)]))


@by_case
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("isa", ["", "avx2"])
def test_a_product_large_enough_to_be_ours(case, bias, isa):
    """csrc/cpu/product.h: ours on a CPU where MKL has no AVX-512, the library's on the narrower path and elsewhere."""
    inputs = case.inputs(260, 260, 251, torch.float32, bias)
    exact = with_gradients(case.plain, *(t if t is None else t.double() for t in inputs))
    turned = [t if t is None or t.dim() == 1 else t.t().contiguous().t() for t in inputs]
    theirs = with_gradients(case.plain, *inputs)
    with serving(f"cpp-{isa}" if isa else "cpp"):
        found, again = with_gradients(case, *inputs), with_gradients(case, *turned)
    for mine, torchs, true, view in zip(found, theirs, exact, again, strict=True):
        error, bound = ((t.double() - true).abs().max() for t in (mine, torchs))
        assert error <= 2 * bound
        assert torch.equal(mine, view)
