"""loss[r] = (1 - eps) (lse_r - x[r, y_r]) + eps (lse_r - (1/V) sum_v x[r, v]) + z lse_r^2
lse_r = log sum_v exp x[r, v]
dx[r, v] = g_r ((1 + 2 z lse_r) exp(x[r, v] - lse_r) - eps / V - (1 - eps) [v = y_r])

R rows, V vocabulary split over t ranks, W columns of one rank, y target. A row whose target is ignore_index has loss 0
and gradient 0. eps is torch's label smoothing: spread over the whole true vocabulary, the target included.

Two passes over the logits. Forward: the statistics of each row of the shard (max m, sum of exp(x - m), x[y] or 0, sum
of x - m), one all-gather of these four numbers, and their merge in rank order, which gives every rank the same bits.
Backward is local. It keeps (m, log sum exp(x - m)) and not lse, because m + log(...) would round away, for large
logits, what x - m keeps exactly; the sum of x - m is exchanged instead of the sum of x for the same reason.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from megacore.comm.mesh import SOLO, Group
from megacore.ops.derivatives import FirstDerivative, gradient, refuse_tangents
from megacore.ops.dispatch import chosen

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DIGIT = 1 << 20  # a column number travels as two digits, each exact in fp32
_SUFFIX = {"cpp": "", "triton": "_triton"}  # names of the local operators that an implementation registers


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    vocab_start: int = 0,
    group: Group = SOLO,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "none",
    inplace_backward: bool = False,
) -> Tensor:
    """Cross-entropy of logits whose vocabulary is split over `group`; the same bits on each of its ranks.

    logits [..., W]: this rank's columns [vocab_start, vocab_start + W) of the vocabulary; fp32, fp64, bf16 or fp16. W
    may differ between ranks and may be 0. Columns at or past `vocab_size`, the true global size, are padding: they
    never enter the softmax and get gradient 0. target [...] int64: global ids, the same on every rank. Any strides
    (columns that are not adjacent cost a copy). ignore_index may be an id of the vocabulary.
    reduction "none" gives [...], "sum" and "mean" a scalar; mean divides by the number of counted targets (0 if there
    are none). Statistics, loss and gradient are computed in fp32 (fp64 for fp64), the dtype of the loss.
    inplace_backward=True writes the gradient over the logits in backward: only for logits that nothing else uses. Under
    torch.compile, which plans memory itself, it changes nothing.

    ValueError, on every rank: a shape, dtype or option that does not fit; a target outside [0, vocab_size) that is not
    ignore_index; shards that do not cover each column of the vocabulary once, such as gathered logits for a shard.
    Cost: the logits are read once forward, read and written once backward; an all-gather of 4 (R + 1) numbers a rank.
    """
    _check(logits, target)
    check_options("cross_entropy", vocab_size, vocab_start, label_smoothing, z_loss, reduction)
    rows, ids = logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1)
    inplace = inplace_backward and not torch.compiler.is_compiling()
    if inplace and not (rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]):
        got = f"{list(rows.shape)} with strides {rows.stride()}"
        raise wrong("cross_entropy", "logits", got, "dense rows for inplace_backward=True")
    how = (ignore_index, label_smoothing, z_loss)
    impl = chosen("cross_entropy", logits.device)
    if impl == "reference":
        loss = reference(rows, ids, vocab_start, vocab_size, group, *how)
    else:
        loss, _ = torch.ops.megacore.cross_entropy(rows, ids, vocab_start, vocab_size, group.name, *how, inplace, impl)
    if reduction == "none":
        return loss.reshape(target.shape)
    counted = (ids != ignore_index).sum().clamp(min=1)
    return loss.sum() / counted if reduction == "mean" else loss.sum()


def reference(
    logits: Tensor, target: Tensor, vocab_start: int, vocab_size: int, group: Group,
    ignore_index: int, label_smoothing: float, z_loss: float, op: str = "cross_entropy",
) -> Tensor:  # fmt: skip
    """The same in plain torch under its autograd, in fp64 for every dtype: logits [R, W], target [R] -> loss [R]."""
    check_targets(op, target, vocab_size, ignore_index)
    if group.size > 1:
        lacks = f"{op} over {group.size} ranks has no second and no forward-mode derivative"
        logits = FirstDerivative.apply(logits, f"{lacks}; in one process the reference has")
    columns = true_columns(logits.shape[1], vocab_start, vocab_size)
    ignored, local = target == ignore_index, target - vocab_start
    x = logits[:, :columns].double().masked_fill(ignored.unsqueeze(1), 0.0)  # or 0 * inf would make a NaN gradient
    lowest = x.new_full((x.shape[0], 1), -math.inf)
    peak = torch.cat([x.detach(), lowest], 1).amax(1)
    offset = x - peak.masked_fill(peak == -math.inf, 0.0).unsqueeze(1)
    hit = torch.arange(columns, device=x.device) == local.unsqueeze(1)
    picked = torch.where(hit, x, 0.0).sum(1)
    mine = torch.stack([peak, offset.exp().sum(1), picked, offset.sum(1)], 1)
    start, count = divmod(vocab_start, _DIGIT), divmod(columns, _DIGIT)
    mine = torch.cat([mine, mine.new_tensor([[*start, *count]])])
    shards = list(gather_stats(mine.detach(), group.name).chunk(group.size))
    check_shards(op, "logits", torch.stack([shard[-1] for shard in shards]), vocab_size)
    columns_of = [shard[-1, 2] * _DIGIT + shard[-1, 3] for shard in shards]
    shards[group.index] = mine  # the others are constants here: each rank holds the gradient of its own columns
    m, total, picked, below = torch.stack([shard[:-1] for shard in shards]).unbind(2)  # [t, R] each
    shift = (m - m.amax(0)).masked_fill(m == -math.inf, 0.0)
    peak, rest = m.amax(0), (total * shift.exp()).sum(0).log()
    loss = peak - picked.sum(0) + rest
    if label_smoothing:
        mean = (below + torch.stack(columns_of).unsqueeze(1) * shift).sum(0) / vocab_size
        loss = (1 - label_smoothing) * loss + label_smoothing * (rest - mean)
    loss = loss + z_loss * (peak + rest) ** 2 if z_loss else loss
    return loss.masked_fill(ignored, 0.0).to(acc_dtype(logits))


# ---- checks: of what can be traced here, of values inside the operator ----


def wrong(op: str, argument: str, got: object, wanted: str) -> ValueError:
    return ValueError(f"{op}: {argument} is {got}; wanted {wanted}")


def _check(logits: Tensor, target: Tensor) -> None:
    op = "cross_entropy"
    if logits.dim() < 1 or logits.dtype not in FLOATS:
        got = f"{list(logits.shape)} {logits.dtype}"
        raise wrong(op, "logits", got, "[..., columns] of fp32, fp64, bf16 or fp16")
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1] or target.device != logits.device:
        wanted = f"{list(logits.shape[:-1])} torch.int64 on {logits.device}, one id for each row of logits"
        raise wrong(op, "target", f"{list(target.shape)} {target.dtype} on {target.device}", wanted)


def check_options(
    op: str, vocab_size: int, vocab_start: int, label_smoothing: float, z_loss: float, reduction: str
) -> None:
    """ValueError, in the name of `op`, for an option of the loss that does not fit."""
    if vocab_size < 1:
        raise wrong(op, "vocab_size", vocab_size, "the true size of the whole vocabulary, at least 1")
    if vocab_start < 0:
        raise wrong(op, "vocab_start", vocab_start, "the global id of this rank's first column, at least 0")
    if not 0 <= label_smoothing <= 1:
        raise wrong(op, "label_smoothing", label_smoothing, "a share in [0, 1]")
    if not z_loss >= 0:
        raise wrong(op, "z_loss", z_loss, "a factor of at least 0")
    if reduction not in ("none", "sum", "mean"):
        raise wrong(op, "reduction", repr(reduction), "'none', 'sum' or 'mean'")


def check_targets(op: str, target: Tensor, vocab_size: int, ignore_index: int) -> None:
    """ValueError for an id outside the vocabulary; before any exchange."""
    bad = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if bad.any():  # on a GPU the one wait for the device; every rank has every target, so all raise
        at = int(bad.nonzero()[0])
        raise wrong(op, f"target[{at}]", int(target[at]), f"an id in [0, {vocab_size}) or ignore_index={ignore_index}")


def check_shards(op: str, argument: str, headers: Tensor, vocab_size: int) -> None:
    """headers [t, 4]: first column and number of true columns of each rank. All ranks see all of them, so all raise."""
    shards = [(int(a) * _DIGIT + int(b), int(c) * _DIGIT + int(d)) for a, b, c, d in headers.tolist()]
    covered = 0
    for start, count in sorted(shard for shard in shards if shard[1]):
        covered = covered + count if start == covered else -1
        if covered < 0:
            break
    if covered != vocab_size:
        got = " ".join(f"[{start}, {start + count})" for start, count in shards)
        wanted = f"each of vocab_size={vocab_size} columns on one rank: pass this rank's shard, not gathered {argument}"
        raise wrong(
            op, argument, f"split over the ranks as columns {got}", f"{wanted}, and where it starts as vocab_start"
        )


def true_columns(width: int, vocab_start: int, vocab_size: int) -> int:
    return max(0, min(width, vocab_size - vocab_start))


def acc_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- the operator that communicates: statistics, exchange, merge ----


def gather_stats(stats: Tensor, group: str) -> Tensor:
    """[n, 4] of each rank, joined in rank order. An empty name is a group of one."""
    if not group:
        return stats
    size = _resolve_process_group(group).size()
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(stats, size, group))


def local_operator(name: str, impl: str, inplace: str = ""):
    return getattr(torch.ops.megacore, f"cross_entropy_{name}{_SUFFIX[impl]}{inplace}")


@torch.library.impl("megacore::cross_entropy", ("cpu", "cuda"))
def _(
    logits, target, vocab_start, vocab_size, group, ignore_index, label_smoothing, z_loss, inplace_backward, impl
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_targets("cross_entropy", target, vocab_size, ignore_index)
    mine = local_operator("stats", impl)(logits, target, vocab_start, vocab_size, ignore_index)
    stats = gather_stats(mine, group)
    ranks = stats.shape[0] // mine.shape[0]
    check_shards("cross_entropy", "logits", stats.view(ranks, -1, 4)[:, -1], vocab_size)
    return local_operator("merge", impl)(stats, target, ranks, vocab_size, ignore_index, label_smoothing, z_loss)


@torch.library.register_fake("megacore::cross_entropy")
def _(
    logits, target, vocab_start, vocab_size, group, ignore_index, label_smoothing, z_loss, inplace_backward, impl
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, acc = logits.shape[0], acc_dtype(logits)
    return logits.new_empty(rows, dtype=acc), logits.new_empty(rows, 2, dtype=acc)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    logits, target, vocab_start, vocab_size, _, ignore_index, label_smoothing, z_loss, ctx.inplace, ctx.impl = inputs
    norm = output[1]
    ctx.mark_non_differentiable(norm)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, norm)
    ctx.rest = (vocab_start, vocab_size, ignore_index, label_smoothing, z_loss)


def _backward(ctx, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    logits, target, norm = ctx.saved_tensors
    if ctx.inplace and not torch.is_grad_enabled():  # a graph of the backward needs the logits as they were
        dx = logits.detach()
        local_operator("bwd", ctx.impl, "_")(grad, dx, target, norm, *ctx.rest)
        torch.autograd.graph.increment_version(
            logits
        )  # who saved these logits too is told, rather than given the gradient
    else:
        dx = local_operator("bwd", ctx.impl)(grad, logits, target, norm, *ctx.rest)
    return dx, *[None] * 9


def _no_second_derivative(ctx, *_: Tensor | None) -> None:
    raise NotImplementedError("cross_entropy has no second derivative; use('reference', 'cross_entropy') has")


gradient("cross_entropy", _backward, _save)


# ---- the local operators: fakes of both implementations, and the Triton kernels as operators ----

for _suffix in _SUFFIX.values():

    @torch.library.register_fake(f"megacore::cross_entropy_stats{_suffix}")
    def _(logits, target, vocab_start, vocab_size, ignore_index) -> Tensor:
        return logits.new_empty(logits.shape[0] + 1, 4, dtype=acc_dtype(logits))

    @torch.library.register_fake(f"megacore::cross_entropy_merge{_suffix}")
    def _(stats, target, ranks, vocab_size, ignore_index, label_smoothing, z_loss) -> tuple[Tensor, Tensor]:
        return stats.new_empty(target.shape[0]), stats.new_empty(target.shape[0], 2)

    @torch.library.register_fake(f"megacore::cross_entropy_bwd{_suffix}")
    def _(grad, logits, *_) -> Tensor:
        return logits.new_empty(logits.shape)

    @torch.library.register_fake(f"megacore::cross_entropy_bwd{_suffix}_")
    def _(grad, logits, *_) -> None:
        return None

    gradient(f"cross_entropy_bwd{_suffix}", _no_second_derivative)
    refuse_tangents(*(f"cross_entropy_{part}" for part in (f"stats{_suffix}", f"merge{_suffix}", f"bwd{_suffix}_")))


@torch.library.impl("megacore::cross_entropy_stats_triton", ("cpu", "cuda"))
def _(logits, target, vocab_start, vocab_size, ignore_index) -> Tensor:
    return _kernels().stats(logits, target, vocab_start, vocab_size, ignore_index)


@torch.library.impl("megacore::cross_entropy_merge_triton", ("cpu", "cuda"))
def _(stats, target, ranks, vocab_size, ignore_index, label_smoothing, z_loss) -> tuple[Tensor, Tensor]:
    return _kernels().merge(stats, target, ranks, vocab_size, ignore_index, label_smoothing, z_loss)


@torch.library.impl("megacore::cross_entropy_bwd_triton", ("cpu", "cuda"))
def _(grad, logits, target, norm, *rest) -> Tensor:
    dx = logits.new_empty(logits.shape)
    _kernels().backward(grad, logits, target, norm, dx, *rest)
    return dx


@torch.library.impl("megacore::cross_entropy_bwd_triton_", ("cpu", "cuda"))
def _(grad, logits, target, norm, *rest) -> None:
    _kernels().backward(grad, logits, target, norm, logits, *rest)


def _kernels():
    from megacore.triton_kernels import cross_entropy as kernels  # only here: a CPU install may lack triton

    return kernels
