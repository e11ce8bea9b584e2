"""What a right answer is: fp64 is the truth, plain torch in the same dtype is the measure."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def assert_as_good_as_torch(got: Tensor, ref64: Tensor, torch_same_dtype: Tensor, factor: float = 2) -> None:
    """Largest error of `got` against fp64 <= factor * that of plain torch in the same dtype.

    Torch may hit the exact value by luck where there are few elements, so its error counts as at least half a unit in
    the last place of the largest value: what rounding the exact result alone may cost. In fp64 torch is its own truth,
    and the bound is 32 units of the largest value. NaN and infinities must agree.
    """
    assert got.dtype == torch_same_dtype.dtype, f"dtype {got.dtype}, torch gives {torch_same_dtype.dtype}"
    assert got.shape == ref64.shape == torch_same_dtype.shape, f"shape {tuple(got.shape)}, wanted {tuple(ref64.shape)}"
    finite = torch.isfinite(ref64)
    got64, torch64 = got.detach().double(), torch_same_dtype.detach().double()
    if not finite.all():
        strange = ~finite
        assert torch.equal(got64[strange].isnan(), torch64[strange].isnan()), "NaN at other places than torch"
        assert torch.equal(got64[strange].nan_to_num(), torch64[strange].nan_to_num()), "other infinities than torch"
    if not finite.any():
        return
    truth = ref64.detach()[finite]
    ours, theirs = (got64[finite] - truth).abs(), (torch64[finite] - truth).abs()
    unit = torch.finfo(got.dtype).eps / 2 * truth.abs().max().item() * (32 if got.dtype == torch.float64 else 1)
    bound = factor * max(theirs.max().item(), unit)
    worst = ours.max().item()
    assert worst <= bound, f"error {worst:.3e} > {factor} x torch's {theirs.max().item():.3e} (unit {unit:.3e})"


def shapes(*sizes: list[int]) -> list[tuple[int, ...]]:
    """Every combination, one list of sizes per dimension. Give ones, primes and sizes just past a block: a kernel's
    mistakes live at its edges."""
    return list(product(*sizes))


def views(like: Tensor) -> dict[str, Tensor]:
    """Tensors equal to `like` [R, C] whose memory is laid out otherwise (MB-23)."""
    rows, cols = like.shape
    return {
        "transposed": like.t().clone().t(),
        "every second column": like.new_full((rows, 2 * cols), 7.0)[:, ::2].copy_(like),
        "every second row": like.new_full((2 * rows, cols), 7.0)[::2].copy_(like),
        "slice of a fused result": like.new_full((rows, 3 * cols), 7.0)[:, cols : 2 * cols].copy_(like),
    }


def offset_by_one(like: Tensor) -> Tensor:
    """A contiguous tensor equal to `like` that starts one element into its storage."""
    return like.new_full((like.numel() + 1,), 7.0)[1:].view(like.shape).copy_(like)
