"""Inputs and oracles of the tests of linear_cross_entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops import linear_cross_entropy
from tests.ops.cross_entropy_cases import plain


def inputs(rows=9, width=7, vocab=11, dtype=torch.float32, seed=0, bias=True, ignored=True):
    """(x [R, K], weight [V, K], bias [V] or None, target [R] with one ignored row)."""
    g = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((rows, width), (vocab, width), (vocab,)))
    y = torch.randint(0, vocab, (rows,), generator=g)
    if ignored and rows > 1:
        y[1] = -100
    return x.to(dtype), (2 * weight / width**0.5).to(dtype), b.to(dtype) if bias else None, y


def upstream(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1.5, like.numel(), dtype=torch.float64).reshape(like.shape).to(like.dtype)


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The loss and the gradients of the leaves, under an upstream gradient that differs from row to row."""
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream(loss) if loss.dim() else None)]


def ours(x, weight, bias, target, vocab_size=None, **options) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    b = leaves[2] if bias is not None else None
    vocab_size = vocab_size or weight.shape[0]
    return gradients(linear_cross_entropy(*leaves[:2], target, bias=b, vocab_size=vocab_size, **options), leaves)


def torchs(x, weight, bias, target, reduction="mean", scale=1.0, dtype=None, **options) -> list[Tensor]:
    """F.linear, then the loss of cross_entropy's cases: in `dtype`, or else in that of x."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, weight, bias) if t is not None]
    loss = plain(F.linear(*leaves), target, **options)
    counted = (target != options.get("ignore_index", -100)).sum().clamp(min=1)
    loss = {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counted}[reduction]
    return gradients(loss * scale, leaves)
