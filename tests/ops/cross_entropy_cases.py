"""Cases of cross-entropy with their right values: worked out apart from this project (shared cases MB-01 to MB-11), or
by fp64. test_cross_entropy.py simulates the ranks in one process, test_cross_entropy_parallel.py has real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore import _C
from megacore.comm.collectives import split_range
from megacore.ops import cross_entropy, implementations, use

IMPLS = implementations("cross_entropy", "cpu")
KERNELS = {"cpp": "", "triton": "_triton"}  # suffixes of the local operators
PATHS = [*IMPLS, "cpp-avx2", "cpp-portable"]  # the narrower instruction sets of the C++ kernels too
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 1.0, "z_loss": 0.1, "ignore_index": 0}]


@dataclass(frozen=True)
class Case:
    name: str
    logits: Tensor  # [R, V], the true columns of the whole vocabulary
    target: Tensor
    losses: Tensor  # fp64 [R]
    gradient: Tensor | None = None  # fp64: the first columns or rows of the gradient of sum(weights * loss)
    weights: Tensor | None = None
    options: dict = field(default_factory=dict)
    padded: int | None = None  # columns of all ranks with padding, split evenly; None: no padding, uneven split
    ranks: tuple[int, ...] = (1, 2, 3, 4)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def shard(self, rank: int, ranks: int) -> tuple[Tensor, int]:
        """This rank's columns, padding filled with what must not matter, and the id of the first."""
        total = self.padded or self.vocab_size
        start, stop = split_range(total, ranks, rank)
        wide = F.pad(self.logits, (0, total - self.vocab_size), value=torch.nan)
        return wide[:, start:stop].clone(), start

    def check(self, loss: Tensor, gradient: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """loss [R] and gradient [R, V] against the right values."""
        torch.testing.assert_close(loss.double(), self.losses, rtol=rtol, atol=atol)
        if self.gradient is not None:
            rows, columns = self.gradient.shape
            torch.testing.assert_close(gradient[:rows, :columns].double(), self.gradient, rtol=rtol, atol=atol)
        ignored = self.target == self.options.get("ignore_index", -100)
        assert not loss[ignored].any() and not gradient[ignored].any(), "an ignored row counts"


def plain(x: Tensor, y: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Plain torch in the dtype of x, at least fp32."""
    wide = x if x.dtype == torch.float64 else x.float()
    loss = F.cross_entropy(wide, y, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing)
    return loss + z_loss * torch.logsumexp(wide, 1).square().masked_fill(y == ignore_index, 0.0) if z_loss else loss


def plain_gradient(x: Tensor, y: Tensor, weights: Tensor, **options) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    loss = plain(x, y, **options)
    return loss.detach(), torch.autograd.grad(loss, x, weights.to(loss.dtype))[0]


def numbers(*rows: object) -> Tensor:
    return torch.tensor(rows if len(rows) > 1 or isinstance(rows[0], list) else rows[0], dtype=torch.float64)


def _mb_01() -> list[Case]:
    n, v = torch.arange(4).unsqueeze(1), torch.arange(8)
    logits, target = ((3 * n + 5 * v) % 7 - 3).float(), torch.tensor([0, 3, 4, 7])
    losses = numbers([6.196830, 2.588777, 2.110496, 4.381784])[0]
    row = numbers([-0.910934, 0.219892, 0.018951, -0.008244, 0.619207, 0.072992, -0.000930, -0.010934])
    scaled = numbers([5737.5, 2100.0, 1163.193147, 3912.5])[0]
    smooth = {"label_smoothing": 0.1}
    return [
        Case("MB-01", logits, target, losses, row, options=smooth),
        Case("MB-01 x1000", logits * 1000, target, scaled, options=smooth),
    ]


def _mb_02() -> list[Case]:
    logits, zero = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)), torch.zeros(3, dtype=torch.float64)
    none = torch.zeros(3, 8, dtype=torch.float64)
    return [
        Case("MB-02 -100", logits, torch.full((3,), -100), zero, none, options={"label_smoothing": 0.1}),
        Case("MB-02 0", logits, torch.zeros(3, dtype=torch.int64), zero, none, options={"ignore_index": 0}),
    ]


def _mb_03() -> list[Case]:
    logits = torch.tensor([[1, -1, 0.5, 2, 0, -2, 1.5, 0.25], [0, 0.5, -1, 1, 2, -0.5, 0.75, -1.5]])
    target, losses = torch.tensor([6, 7]), numbers([1.445753, 4.276991])[0]
    both = numbers([0.142880, 0.019337], [0.062225, 0.102592])
    second = numbers([0.124451, 0.205185, 0.045783, 0.338293, 0.919574, 0.075483, 0.263463, -1.972231])
    weighted = torch.cat([torch.zeros(1, 8, dtype=torch.float64), second])
    weights = torch.tensor([0.0, 2.0])
    return [
        Case("MB-03 a", logits, target, losses, both),
        Case("MB-03 b", logits, target, losses, weighted, weights),
    ]


def _mb_04() -> list[Case]:
    row = torch.tensor([[60000.0, -60000, 0, 0, 0, 0, 0, 0]], dtype=torch.float16).repeat(3, 1)
    flat = torch.zeros(1, 8192, dtype=torch.bfloat16)
    return [
        Case("MB-04 a", row, torch.tensor([0, 1, 2]), numbers([0.0, 120000, 60000])[0]),
        Case("MB-04 b", flat, torch.tensor([5]), numbers([9.010913])[0], ranks=(1, 2, 4)),
    ]


def _mb_11() -> list[Case]:
    target, losses = torch.tensor([0, 13, 49]), torch.full((3,), 3.912023, dtype=torch.float64)
    zero, gradient = torch.zeros(3, 50), torch.full((3, 50), 0.02, dtype=torch.float64)
    gradient[torch.arange(3), target] -= 1
    made = [Case(f"MB-11 padded to {p}", zero, target, losses, gradient, padded=p) for p in (52, 64, 128)]
    # 128 columns on 2 ranks leave the second one without a true column
    return [*made, Case("MB-11 uneven", zero, target, losses, gradient)]


def _against_fp64() -> list[Case]:
    made = []
    g = torch.Generator().manual_seed(7)
    for vocab, padded in ((50, None), (50, 52), (1031, None), (3, 8), (2, None)):
        logits, target = 4 * torch.randn(6, vocab, generator=g), torch.randint(0, vocab, (6,), generator=g)
        target[2] = 1
        weights = torch.randn(6, generator=g)
        for options in ({}, {"label_smoothing": 0.3, "z_loss": 1e-2, "ignore_index": 1}):
            losses, gradient = plain_gradient(logits.double(), target, weights.double(), **options)
            name = f"fp64 {vocab} {padded} {len(options)}"
            made.append(Case(name, logits, target, losses, gradient, weights, options, padded))
    return made


CASES = [*_mb_01(), *_mb_02(), *_mb_03(), *_mb_04(), *_mb_11(), *_against_fp64()]


@contextmanager
def serving(path: str) -> Iterator[str]:
    """One of PATHS serves cross_entropy within the block; gives the name of its implementation."""
    name, _, isa = path.partition("-")
    if not _C.set_cpu_path(isa):
        pytest.skip(f"this machine has no {isa}")
    try:
        with use(name, "cross_entropy"):
            yield name
    finally:
        _C.set_cpu_path("")


def inputs(rows, vocab, dtype=torch.float32, seed=0, ignored=True):
    g = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(rows, vocab, generator=g, dtype=torch.float64)).to(dtype)
    y = torch.randint(0, vocab, (rows,), generator=g)
    if ignored and rows > 1:
        y[1] = -100
    return x, y, torch.randn(rows, generator=g, dtype=torch.float64)


def with_gradient(x, y, weights, vocab_size=None, **options):
    x = x.detach().requires_grad_()
    loss = cross_entropy(x, y, vocab_size=vocab_size or x.shape[-1], **options)
    return loss.detach(), torch.autograd.grad(loss, x, weights.to(loss.dtype))[0]
