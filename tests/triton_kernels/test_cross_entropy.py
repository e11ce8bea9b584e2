"""Rows of a long vocabulary split over programs. All else: tests/ops/test_cross_entropy*.py run this kernel too."""

import pytest
import torch

from tests.interpreter import INTERPRETING

kernels = pytest.importorskip("megacore.triton_kernels.cross_entropy", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter: test_in_the_interpreter.py")


def truth(x, y, start, columns):
    x = x[:, :columns].double()
    peak = x.amax(1)
    offset = x - peak.masked_fill(peak == -torch.inf, 0.0).unsqueeze(1)
    local = y - start
    owned = (local >= 0) & (local < columns)
    picked = torch.where(owned, x.gather(1, local.clamp(0, columns - 1).unsqueeze(1)).squeeze(1), 0.0)
    return torch.stack([peak, offset.exp().sum(1), picked, offset.sum(1)], 1)


@pytest.mark.parametrize("span", [64, 100, 1000])
def test_triton_split_rows_have_the_statistics_of_whole_ones(span, monkeypatch):
    x = 4 * torch.randn(5, 310, generator=torch.Generator().manual_seed(1)) + 1000
    x[1, :128] = -torch.inf  # the first spans have no peak
    x[2, 128:] = -torch.inf
    x[3] = -torch.inf
    y = torch.tensor([7, 7 + 299, 7 + 100, 7 + 63, 2])
    launched = []
    kernel = kernels.join_kernel
    monkeypatch.setattr(kernels, "SPAN", span)
    monkeypatch.setattr(kernels, "join_kernel", {(1,): lambda *a, **k: launched.append(kernel[(1,)](*a, **k))})
    found = kernels.stats(x, y, 7, 307, -100)
    assert len(launched) == (span < 300)
    assert found[-1].tolist() == [0, 7, 0, 300]
    torch.testing.assert_close(found[:-1].double(), truth(x, y, 7, 300), rtol=2e-6, atol=1e-5)
    monkeypatch.setattr(kernels, "_programs", lambda device: 0)  # as on a full GPU
    whole = kernels.stats(x, y, 7, 307, -100)
    assert len(launched) == (span < 300), "rows that fill the GPU are not split"
    torch.testing.assert_close(found, whole, rtol=2e-6, atol=1e-5)
    assert torch.equal(found[:, 2], whole[:, 2])


def test_triton_a_row_longer_than_a_span():
    columns = kernels.SPAN + 33
    x = torch.randn(2, columns, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([columns - 1, 5])
    stats = kernels.stats(x, y, 0, columns, -100)
    torch.testing.assert_close(stats[:-1].double(), truth(x, y, 0, columns), rtol=1e-5, atol=1e-3)
    loss, norm = kernels.merge(stats, y, 1, columns, -100, 0.1, 0.0)
    leaf = x.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, y, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=1e-6)
    kernels.backward(torch.ones(2), x, y, norm, x, 0, columns, -100, 0.1, 0.0)  # over the logits
    torch.testing.assert_close(x.double(), torch.autograd.grad(want.sum(), leaf)[0], rtol=1e-4, atol=1e-9)
