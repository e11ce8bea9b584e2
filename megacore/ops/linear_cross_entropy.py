"""loss[r] = scale * cross_entropy(logits[r], y_r),  logits[r, v] = sum_k x[r, k] weight[v, k] + bias[v]

R rows, K inputs, V vocabulary split over t ranks, W columns of one rank, y target. Formula of the loss and of
dlogits[r, v]: cross_entropy.py. Only a chunk of C rows of the logits exists at a time, and dlogits is written over it:

    dx[r, k] = sum_v dlogits[r, v] weight[v, k]    dweight[v, k] = sum_r dlogits[r, v] x[r, k]    (fp32 over the chunks)

| reduction | forward | backward | products |
|---|---|---|---|
| sum, mean | statistics and the gradients, chunk by chunk | the gradients, times a scalar | 3 |
| none | statistics | logits again, chunk by chunk, then the gradients | 4 |

A gradient made in forward cannot serve an upstream gradient for each row: dweight has summed the rows already.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.comm.mesh import SOLO, Group
from megacore.ops.cross_entropy import (
    FLOATS,
    acc_dtype,
    check_options,
    check_shards,
    check_targets,
    gather_stats,
    local_operator,
    true_columns,
    wrong,
)
from megacore.ops.cross_entropy import reference as cross_entropy_reference
from megacore.ops.derivatives import gradient
from megacore.ops.dispatch import as_autocast, check_devices, chosen

OP = "linear_cross_entropy"
SMALL = 4 << 20  # bytes of logits that are held whole: the chunks of a small problem would cost more than they save
FEWEST = {"cpu": 128, "cuda": 1024}  # rows of a chunk, see chunk_rows_for
BLOCK = 1024  # columns of a product with a bias on a CPU, which is not made in place
MOST = 8192  # rows of a chunk: past it the traffic of dweight is below a tenth of one product everywhere


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    vocab_size: int,
    vocab_start: int = 0,
    group: Group = SOLO,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    scale: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """scale * cross_entropy(F.linear(x, weight, bias), target, ...) without ever holding all logits.

    x [..., K]; weight [W, K] and bias [W]: this rank's part of the vocabulary, from `vocab_start`; target [...] int64.
    All floats of one dtype: fp32, fp64, bf16 or fp16; any strides (a weight whose rows are not dense costs a copy). The
    other options are those of cross_entropy. Logits are rounded to the dtype of x as F.linear rounds them; 16 bits are
    multiplied in fp32 where the CPU has no arithmetic of them, as in `linear`. Statistics and loss are fp32 (fp64 for
    fp64); dweight and dbias are summed over the chunks in that dtype and rounded once.
    Under torch.autocast x, weight and bias are cast.
    `scale` multiplies loss and gradients where it costs nothing: with it, upstream is 1 and backward has no pass over
    dweight. In fp16 give the factor of a gradient scaler here: dlogits would underflow before upstream can scale it.
    chunk_rows: rows of logits at a time, on every rank the same; None: chunk_rows_for.

    With a `group`, x and target are the same on every rank, so is the loss, bit for bit; dx is this rank's part, which
    the caller sums over the group (copy_to does).
    ValueError, on every rank: as cross_entropy, before any exchange where a target is wrong.
    Cost: 3 products of 2 R W K FLOP, 4 for "none", 1 where nothing needs a gradient. Memory beyond arguments and their
    gradients: one chunk of logits [C, W] (and dweight in fp32 for 16 bits). One all-gather a chunk, 4 (C + 1) numbers a
    rank. A second backward through one graph computes the logits again.
    """
    check_devices(OP, x, weight=weight, target=target, bias=bias)
    x, weight, bias = (as_autocast(t) for t in (x, weight, bias))
    _check(x, weight, target, bias, chunk_rows)
    check_options(OP, vocab_size, vocab_start, label_smoothing, z_loss, reduction)
    how = (ignore_index, label_smoothing, z_loss)
    impl = chosen(OP, x.device)
    if impl == "reference":
        return reference(x, weight, target, bias, vocab_start, vocab_size, group, *how, reduction, scale)
    rows, ids = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1)
    # the widths of the ranks may differ, their numbers of chunks may not: the mean width decides
    chunk = chunk_rows or chunk_rows_for(rows.shape[0], -(-vocab_size // group.size), x.dtype, x.device.type)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    loss = torch.ops.megacore.linear_cross_entropy(
        rows, weight, bias, ids, vocab_start, vocab_size, group.name, *how, reduction, scale, chunk, *wanted, impl
    )[0]
    return loss.reshape(target.shape) if reduction == "none" else loss


def chunk_rows_for(rows: int, columns: int, dtype: torch.dtype, device: str) -> int:
    """Rows of a chunk: all of them up to 4 MiB of logits, else an eighth, but 128 at least (1024 on a GPU), in even
    parts.

    Each chunk reads and writes dweight in fp32, 8 W K bytes beside the 2 C W K FLOP of its product. On a CPU (64, 96
    and 128 rows of [1024, 768] x [50304, 768] took 6.6, 6.2 and 5.6 s, one thread) 128 rows are enough. On an H200, at
    790 TFLOP/s and 4.3 TB/s, the traffic takes 735 / C of the product's time, so fewer than 1024 rows starve it.
    """
    if rows * columns * dtype.itemsize <= SMALL:
        return max(rows, 1)
    most = max(FEWEST.get(device, FEWEST["cpu"]), min(rows // 8, MOST))
    return -(-rows // -(-rows // most))


def reference(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, vocab_start: int, vocab_size: int, group: Group,
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, scale: float,
) -> Tensor:  # fmt: skip
    """The same in plain torch under its autograd, with all logits."""
    logits, ids = F.linear(x, weight, bias), target.reshape(-1)
    logits = logits.reshape(ids.numel(), logits.shape[-1])
    how = (ignore_index, label_smoothing, z_loss)
    loss = cross_entropy_reference(logits, ids, vocab_start, vocab_size, group, *how, op=OP)
    if reduction == "none":
        return loss.reshape(target.shape) * scale
    return loss.sum() * _factor(loss, ids, ignore_index, reduction, scale)


def _check(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, chunk_rows: int | None) -> None:
    if x.dim() < 1 or x.dtype not in FLOATS:
        raise wrong(OP, "x", _describe(x), "[..., inputs] of fp32, fp64, bf16 or fp16")
    if weight.dim() != 2 or weight.dtype != x.dtype or weight.shape[1] != x.shape[-1]:
        raise wrong(OP, "weight", _describe(weight), f"[columns, {x.shape[-1]}] {x.dtype}, as x")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise wrong(OP, "bias", _describe(bias), f"[{weight.shape[0]}] {x.dtype}, one for each row of weight")
    if target.dtype != torch.int64 or target.shape != x.shape[:-1]:
        raise wrong(OP, "target", _describe(target), f"{list(x.shape[:-1])} torch.int64, one id for each row of x")
    if chunk_rows is not None and chunk_rows < 1:
        raise wrong(OP, "chunk_rows", chunk_rows, "at least 1, or None")


def _describe(t: Tensor) -> str:
    return f"{list(t.shape)} {t.dtype}"


def _factor(like: Tensor, target: Tensor, ignore_index: int, reduction: str, scale: float) -> Tensor:
    """What each row's loss is multiplied by, a scalar in the dtype of `like`."""
    if reduction == "mean":
        return scale / (target != ignore_index).sum().clamp(min=1).to(like.dtype)
    return torch.full((), scale, dtype=like.dtype, device=like.device)


# ---- the operators: chunks of rows ----


class _Gradients:
    """dx, dweight and dbias of the chunks given to `add`; those not wanted stay empty. `weight` has the true columns
    alone; of `width`, the rest is padding."""

    def __init__(self, x: Tensor, weight: Tensor, width: int, wanted: tuple[bool, bool, bool]):
        x_grad, weight_grad, bias_grad = wanted
        self.x, self.weight, self.true, acc = x, weight, weight.shape[0], acc_dtype(x)
        self.dx = torch.empty_like(x) if x_grad else None
        self.dweight = weight.new_empty(width, x.shape[1], dtype=acc) if weight_grad else None
        self.dbias = weight.new_zeros(width, dtype=acc) if bias_grad else None
        if self.dweight is not None:
            self.dweight[self.true :] = 0

    def add(self, rows: slice, dlogits: Tensor) -> None:
        if self.dx is not None:
            torch.ops.megacore.matmul_into(dlogits, self.weight, self.dx[rows], False)
        if self.dweight is not None:
            first = rows.start == 0  # it writes, which saves a pass of zeros
            torch.ops.megacore.matmul_into(dlogits.t(), self.x[rows], self.dweight[: self.true], not first)
        if self.dbias is not None:
            self.dbias[: self.true] += dlogits.sum(0, dtype=self.dbias.dtype)

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        made = (self.dx, self.dweight, self.dbias)
        return tuple(self.x.new_empty(0) if t is None else t.to(self.x.dtype) for t in made)


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None, start: int, size: int) -> tuple[Tensor, ...]:
    """x, weight and bias as the products take them, without the padding of the vocabulary.

    Dense rows, or each product of a chunk would make a copy; a transposed view is copied too, since the BLAS would give
    it other bits than its copy."""
    true = true_columns(weight.shape[0], start, size)
    dense = weight.stride(1) == 1 and weight.stride(0) >= weight.shape[1]
    weight = (weight if dense else weight.contiguous())[:true]
    return x.contiguous(), weight, None if bias is None else bias[:true]


def _chunks(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits), each in the same memory. No rows are one chunk, or a rank would miss the exchange."""
    count, width = x.shape[0], weight.shape[0]
    held = x.new_empty(min(chunk, count), width)
    for start in range(0, max(count, 1), chunk):
        rows = slice(start, min(start + chunk, count))
        logits = held[: rows.stop - start]
        if bias is None:
            torch.ops.megacore.matmul_into(x[rows], weight.t(), logits, False)
        elif x.is_cuda:
            torch.addmm(bias, x[rows], weight.t(), out=logits)
        else:  # rounded once, with the bias
            for at in (slice(b, b + BLOCK) for b in range(0, width, BLOCK)):
                logits[:, at] = torch.ops.megacore.linear(x[rows], weight[at], bias[at])
        yield rows, logits


@torch.library.impl("megacore::linear_cross_entropy", ("cpu", "cuda"))
def _(
    x, weight, bias, target, vocab_start, vocab_size, group, ignore_index, label_smoothing, z_loss,
    reduction, scale, chunk_rows, x_grad, weight_grad, bias_grad, impl,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    check_targets(OP, target, vocab_size, ignore_index)
    width, acc, how = weight.shape[0], acc_dtype(x), (ignore_index, label_smoothing, z_loss)
    x, weight, bias = _operands(x, weight, bias, vocab_start, vocab_size)
    loss, norm = x.new_empty(x.shape[0], dtype=acc), x.new_empty(x.shape[0], 2, dtype=acc)
    factor = _factor(loss, target, ignore_index, reduction, scale)
    now = reduction != "none" and (x_grad or weight_grad or bias_grad)
    made = _Gradients(x, weight, width, (x_grad, weight_grad, bias_grad) if now else (False,) * 3)
    for rows, logits in _chunks(x, weight, bias, chunk_rows):
        ids = target[rows]
        mine = local_operator("stats", impl)(logits, ids, vocab_start, vocab_size, ignore_index)
        stats = gather_stats(mine, group)
        ranks = stats.shape[0] // mine.shape[0]
        if rows.start == 0:  # a wait for the device on a GPU, and the same for every chunk
            check_shards(OP, "weight", stats.view(ranks, -1, 4)[:, -1], vocab_size)
        loss[rows], norm[rows] = local_operator("merge", impl)(stats, ids, ranks, vocab_size, *how)
        if now:
            upstream = factor.expand(ids.shape[0])
            local_operator("bwd", impl, "_")(upstream, logits, ids, norm[rows], vocab_start, vocab_size, *how)
            made.add(rows, logits)
    return (loss if reduction == "none" else loss.sum()) * factor, norm, *made.finished()


@torch.library.impl("megacore::linear_cross_entropy_bwd", ("cpu", "cuda"))
def _(
    grad, x, weight, bias, target, norm, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    chunk_rows, x_grad, weight_grad, bias_grad, impl,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = weight.shape[0]
    x, weight, bias = _operands(x, weight, bias, vocab_start, vocab_size)
    made = _Gradients(x, weight, width, (x_grad, weight_grad, bias_grad))
    how = (vocab_start, vocab_size, ignore_index, label_smoothing, z_loss)
    for rows, logits in _chunks(x, weight, bias, chunk_rows):
        local_operator("bwd", impl, "_")(grad[rows], logits, target[rows], norm[rows], *how)
        made.add(rows, logits)
    return made.finished()


# ---- fakes and gradient ----


@torch.library.register_fake("megacore::linear_cross_entropy")
def _(
    x, weight, bias, target, vocab_start, vocab_size, group, ignore_index, label_smoothing, z_loss,
    reduction, scale, chunk_rows, x_grad, weight_grad, bias_grad, impl,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    acc, now = acc_dtype(x), reduction != "none"
    loss, norm = x.new_empty(x.shape[:1] if not now else (), dtype=acc), x.new_empty(x.shape[0], 2, dtype=acc)
    return loss, norm, *_fake_gradients(x, weight, now and x_grad, now and weight_grad, now and bias_grad)


@torch.library.register_fake("megacore::linear_cross_entropy_bwd")
def _(
    grad, x, weight, bias, target, norm, vocab_start, vocab_size, ignore_index, label_smoothing, z_loss,
    chunk_rows, x_grad, weight_grad, bias_grad, impl,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake_gradients(x, weight, x_grad, weight_grad, bias_grad)


def _fake_gradients(x: Tensor, weight: Tensor, *wanted: bool) -> tuple[Tensor, ...]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(x.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True))


def _save(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x, weight, bias, target, *rest = inputs
    start, size, _, ignore_index, smoothing, z_loss, ctx.reduction, ctx.scale, chunk, *wanted, impl = rest
    ctx.loss_of, ctx.rest = (start, size, ignore_index, smoothing, z_loss), (chunk, *ctx.needs_input_grad[:3], impl)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, target, output[1])
    # no saved tensors: the first backward scales them where they are and gives them away
    ctx.made = output[2:] if ctx.reduction != "none" and tuple(wanted) == ctx.needs_input_grad[:3] else None


def _backward(ctx, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 17
    if ctx.made is not None and not torch.is_grad_enabled():  # a graph of the backward must know where they come from
        made, ctx.made = _scaled(ctx.made, grad), None
    else:
        x, weight, bias, target, norm = ctx.saved_tensors
        upstream = grad * _factor(grad, target, ctx.loss_of[2], ctx.reduction, ctx.scale)
        upstream = upstream.expand(target.shape[0])
        made = torch.ops.megacore.linear_cross_entropy_bwd(
            upstream, x, weight, bias, target, norm, *ctx.loss_of, *ctx.rest
        )
    dx, dweight, dbias = (t if need else None for t, need in zip(made, ctx.needs_input_grad, strict=False))
    return dx, dweight, dbias, *[None] * 14


def _scaled(made: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """`made` times `grad`, in its own memory: dweight is as large as the weight."""
    if type(grad) is not Tensor:  # traced by torch.compile, which plans memory itself
        return tuple(t * grad for t in made)
    if grad.device.type != "cpu" or grad.item() != 1:  # on a GPU the question would cost more than the pass
        for t in made:
            t.mul_(grad)
    return made


def _no_second_derivative(ctx, *_: Tensor | None) -> None:
    raise NotImplementedError(f"{OP} has no second derivative; use('reference', '{OP}') has")


gradient(OP, _backward, _save)
gradient(f"{OP}_bwd", _no_second_derivative)
