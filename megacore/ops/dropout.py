"""y = x * keep / (1 - p); keep is drawn from coordinates: (key, sample, position, feature) and nothing else.

B batch, G groups (heads), S sequence, F features of this slice, `features` of the whole.
The counter, the draw and the rounding are defined bit for bit at the head of csrc/cpu/dropout.cpp; `reference` restates
them in 64-bit integer arithmetic of plain torch.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megacore.ops.derivatives import gradient
from megacore.ops.dispatch import check_devices, chosen

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_SUFFIX = {"cpp": "", "triton": "_triton"}  # names of the operators that an implementation registers


def dropout_key(seed: int, step: int, module: str) -> int:
    """The 64-bit key of one module at one step: the same in every process, layout, machine and version."""
    text = f"{seed}\0{step}\0{module}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"dropout").digest(), "little")


def dropout(
    x: Tensor,
    p: float,
    *,
    key: int,
    sample: Tensor,
    position: Tensor,
    feature_start: int = 0,
    features: int | None = None,
    group_start: int = 0,
) -> Tensor:
    """x * keep / (1 - p), with probability p of dropping an element, 0 <= p < 1; p == 0 returns x.

    x [B, S, F] or [B, G, S, F], any strides, fp32, fp64, bf16 or fp16 (scaled in fp32; fp64 for fp64).
    Element (b, g, s, f) is keyed by (key, sample[b], position[s] or position[b, s],
    (group_start + g) * features + feature_start + f): sample int64 [B], position int64 [S] or [B, S]
    (taken modulo 2^32), features = the size of the whole last dimension (default F). So the dropout of a slice, given
    the slice's own coordinates, is the slice of the dropout. Backward redraws the mask; only the coordinates are kept.
    ValueError for shapes, dtypes or ranges that do not fit. Cost: one pass over x, ten Philox rounds per four elements.
    """
    if p == 0:
        return x
    features = x.shape[-1] if features is None else features
    check_devices("dropout", x, sample=sample, position=position)
    key = key - 2**64 if key >= 2**63 else key  # the schema's integers are signed
    impl = chosen("dropout", x.device)
    serve = reference if impl == "reference" else getattr(torch.ops.megacore, "dropout" + _SUFFIX[impl])
    return serve(x, p, key, sample, position, feature_start, features, group_start)


def reference(
    x: Tensor, p: float, key: int, sample: Tensor, position: Tensor, feature_start: int, features: int, group_start: int
) -> Tensor:
    """The same bits from plain torch."""
    _check(x, p, sample, position, feature_start, features, group_start)
    four = x if x.dim() == 4 else x.unsqueeze(1)
    b, g, s, f = four.shape
    group = torch.arange(group_start, group_start + g, device=x.device).view(1, g, 1, 1)
    feature = torch.arange(feature_start, feature_start + f, device=x.device).view(1, 1, 1, f)
    element = group * features + feature
    where = position.reshape(position.shape[:-1].numel(), 1, s, 1)  # [1 or B, 1, S, 1]
    who = sample.reshape(b, 1, 1, 1)
    counter = (element // 4, where, who, who >> 32)
    words = philox([(c & _WORD).expand(b, g, s, f) for c in counter], (key & _WORD, (key >> 32) & _WORD))
    lane = (element % 4).expand(b, g, s, f)
    draw = torch.stack(words, dim=-1).gather(-1, lane.unsqueeze(-1)).squeeze(-1).view(x.shape)
    wide = x if x.dtype == torch.float64 else x.float()
    kept = (wide * (1.0 / (1.0 - p))).to(x.dtype)
    return torch.where(draw >= int(p * 2**32), kept, torch.zeros((), dtype=x.dtype, device=x.device))


def _check(
    x: Tensor, p: float, sample: Tensor, position: Tensor, feature_start: int, features: int, group_start: int
) -> None:
    """What the C++ kernel checks, for the reference and for Triton."""

    def check(holds: bool, name: str, got: object, wanted: str) -> None:
        if not holds:
            raise ValueError(f"dropout: {name} is {got}; wanted {wanted}")

    check(x.is_floating_point(), "x", x.dtype, "dtype Float, Double, BFloat16 or Half")
    check(x.dim() in (3, 4), "x", list(x.shape), "[B, S, F] or [B, G, S, F]")
    check(0 <= p < 1, "p", p, "0 <= p < 1")
    b, s, f, g = x.shape[0], x.shape[-2], x.shape[-1], x.shape[1] if x.dim() == 4 else 1
    right = sample.dtype == torch.int64 and sample.shape == (b,)
    check(right, "sample", f"{list(sample.shape)} {sample.dtype}", f"[{b}] torch.int64, one per batch row of x")
    right = position.dtype == torch.int64 and position.shape in ((s,), (b, s))
    check(right, "position", f"{list(position.shape)} {position.dtype}", f"[{s}] or [{b}, {s}] torch.int64")
    check(group_start >= 0, "group_start", group_start, "0 or more")
    inside = 0 <= feature_start <= features - f
    check(inside, "feature_start", feature_start, f"a slice of {f} features inside features={features}")
    fits = (group_start + g) * features <= 2**34
    check(fits, "features", features, "(group_start + groups) * features of at most 2^34")


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): four words in int64 tensors
    of values below 2^32, key of two words -> four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, 0xD2511F53)
        high2, low2 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def _product(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product: in halves, because int64 is signed."""
    low = a * (m & 0xFFFF)  # < 2^48
    high = a * (m >> 16) + (low >> 16)  # < 2^49; the product is high * 2^16 + (low & 0xFFFF)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


@torch.library.impl("megacore::dropout_triton", ("cpu", "cuda"))
def _(x, p, key, sample, position, feature_start, features, group_start) -> Tensor:
    from megacore.triton_kernels import dropout as kernels  # only here: a CPU install may lack triton

    _check(x, p, sample, position, feature_start, features, group_start)
    return kernels.dropout(x, p, key, sample, position, feature_start, features, group_start)


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    _, ctx.p, ctx.key, sample, position, *ctx.slice = inputs
    ctx.save_for_backward(sample, position)


def _register(name: str) -> None:
    """Fake and gradient of one implementation: its backward redraws the mask by the same implementation."""

    @torch.library.register_fake(f"megacore::{name}")
    def _(x, p, key, sample, position, feature_start, features, group_start) -> Tensor:
        return torch.empty_like(x)

    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        sample, position = ctx.saved_tensors
        dx = getattr(torch.ops.megacore, name)(dy, ctx.p, ctx.key, sample, position, *ctx.slice)
        return dx, *[None] * 7

    gradient(name, backward, _save)


for _suffix in _SUFFIX.values():
    _register("dropout" + _suffix)
