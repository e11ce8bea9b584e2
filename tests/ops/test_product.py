"""The fp32 product of csrc/cpu/product.cpp, where this machine has it: edges of tiles, chains and blocks; its bits."""

import pytest
import torch

from megacore import _C

op = torch.ops.megacore.matmul_into
SIZES = [  # M, N, K: tiles are 8 x 48, blocks 112 x 240 or 1008 x 768, chains 128
    (8, 48, 30000),
    (9, 4801, 200),
    (113, 241, 769),
    (450, 1009, 127),
    (131, 1537, 129),
    (449, 97, 1537),
]
KINDS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}


@pytest.fixture(autouse=True)
def ours():
    assert _C.set_cpu_path("")
    if not _C.own_product():
        pytest.skip("the library's product serves this machine")


def operands(m, n, k, kind="nn", seed=0):
    g = torch.Generator().manual_seed(seed)
    turned = KINDS[kind]
    a, b = torch.randn(m, k, generator=g), torch.randn(k, n, generator=g)
    return tuple(t.t().contiguous().t() if turn else t for t, turn in zip((a, b), turned, strict=True))


def run(a, b, start=None):
    out = torch.full((a.shape[0], b.shape[1]), torch.nan) if start is None else start.clone()
    op(a, b, out, start is not None)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_as_exact_as_the_librarys(size, kind):
    a, b = operands(*size, kind)
    exact = a.double() @ b.double()
    error, theirs = ((t.double() - exact).abs().max() for t in (run(a, b), a @ b))
    assert error <= 2 * theirs
    start = torch.randn(exact.shape)
    assert (
        torch.equal(run(a, b, start) - start, (run(a, b) + start) - start) or size[2] > 768
    )  # one block: one addition


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_depend_on_k_alone(size):
    """Not on layouts, threads, or how many rows and columns are computed at once."""
    m, n, k = size
    a, b = operands(*size)
    whole = run(a, b)
    for kind in KINDS:
        assert torch.equal(run(*operands(*size, kind)), whole), kind
    wide_a, wide_b = torch.zeros(m, k + 3)[:, :k].copy_(a), torch.zeros(k, n + 5)[:, 1 : n + 1].copy_(b)
    assert torch.equal(run(wide_a, wide_b), whole)
    if m > 16 and n > 96 and (m // 2) * (n // 2) * k > 8 << 20:
        assert torch.equal(run(a[: m // 2], b[:, : n // 2]), whole[: m // 2, : n // 2])
    threads = torch.get_num_threads()
    try:
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(a, b), whole), count
    finally:
        torch.set_num_threads(threads)


def test_adds_into_rows_of_a_larger_buffer_and_nowhere_else():
    a, b = operands(113, 241, 769)
    buffer = torch.full((113, 300), 7.0)
    op(a, b, buffer[:, 20:261], True)
    assert torch.allclose(buffer[:, 20:261], a @ b + 7, atol=1e-3)
    assert (buffer[:, :20] == 7).all() and (buffer[:, 261:] == 7).all()


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = operands(113, 241, 769)
    a[3, 5], b[7, 9] = torch.inf, torch.nan
    out = run(a, b)
    strange = torch.zeros(113, 241, dtype=torch.bool)
    strange[3], strange[:, 9] = True, True
    assert torch.equal(~torch.isfinite(out), strange)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b, out: op(a, b[1:], out, False), r"matmul_into: b is .*wanted \[K, N\] with the K of a"),
        (lambda a, b, out: op(a, b.double(), out, False), "matmul_into: b is .*wanted dtype Float as a"),
        (lambda a, b, out: op(a, b, out[1:], False), r"matmul_into: out is .*wanted \[8, 6\]"),
        (lambda a, b, out: op(a, b, out.double(), False), "matmul_into: out is .*wanted dtype Float as a"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(8, 4), torch.ones(4, 6), torch.ones(8, 6))
