"""Cross-entropy over a vocabulary shard: row statistics, their merge over ranks, and the gradient.

R rows, C true columns of this shard, W columns of the shard with its padding, V true global vocabulary, t ranks.
A program owns ROWS rows and walks their columns in tiles of COLS, so a row is read once by `stats_kernel` (R*W*size
bytes) and read and written once by `backward_kernel` (2*R*W*size): with nothing else of that size, memory bandwidth is
the bound. Short rows share a program (ROWS > 1), or a small vocabulary would start one program per few bytes.
All arithmetic is in ACC (fp32; fp64 for fp64). Formulas: megacore/ops/cross_entropy.py. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

DIGIT = tl.constexpr(1 << 20)  # a column number travels as two digits, each exact in fp32


@triton.jit
def stats_kernel(
    x_ptr, target_ptr, out_ptr, rows, columns, stride, vocab_start, ignore_index,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out[r] = (max, sum exp(x - max), x[target] or 0, sum (x - max)); out[rows] = (start, count), two digits each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    first = x_ptr + row * stride  # int64: a row may lie beyond 2^31 elements
    peak = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    below = tl.zeros([ROWS], ACC)
    for at in range(0, columns, COLS):
        column = at + tl.arange(0, COLS)
        mask = live[:, None] & (column < columns)[None, :]
        x = tl.load(first[:, None] + column[None, :], mask=mask, other=float("-inf")).to(ACC)
        higher = tl.maximum(peak, tl.max(x, 1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        shift = tl.where(peak == float("-inf"), 0.0, peak - origin)
        seen = tl.cast(at, ACC)
        total = total * tl.exp(shift) + tl.sum(tl.where(mask, tl.exp(x - origin[:, None]), 0.0), 1)
        below = below + seen * shift + tl.sum(tl.where(mask, x - origin[:, None], 0.0), 1)
        peak = higher
    target = tl.load(target_ptr + row, mask=live, other=-1)
    local = target - vocab_start
    owned = live & (target != ignore_index) & (local >= 0) & (local < columns)
    picked = tl.load(first + local, mask=owned, other=0.0).to(ACC)
    tl.store(out_ptr + row * 4, peak, mask=live)
    tl.store(out_ptr + row * 4 + 1, total, mask=live)
    tl.store(out_ptr + row * 4 + 2, picked, mask=live)
    tl.store(out_ptr + row * 4 + 3, below, mask=live)
    if tl.program_id(0) == 0:
        header = out_ptr + tl.cast(rows, tl.int64) * 4
        tl.store(header, tl.cast(vocab_start // DIGIT, ACC))
        tl.store(header + 1, tl.cast(vocab_start % DIGIT, ACC))
        tl.store(header + 2, tl.cast(columns // DIGIT, ACC))
        tl.store(header + 3, tl.cast(columns % DIGIT, ACC))


@triton.jit
def merge_kernel(
    stats_ptr, target_ptr, loss_ptr, norm_ptr, rows, ranks, vocab_size, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Statistics of every rank, [t, R+1, 4], in rank order -> loss [R], norm [R, 2] = (max, log sum exp(x - max))."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    block = (tl.cast(rows, tl.int64) + 1) * 4
    peak = tl.full([ROWS], float("-inf"), ACC)
    for rank in range(ranks):
        peak = tl.maximum(peak, tl.load(stats_ptr + rank * block + row * 4, mask=live, other=float("-inf")))
    total = tl.zeros([ROWS], ACC)
    picked = tl.zeros([ROWS], ACC)
    below = tl.zeros([ROWS], ACC)
    for rank in range(ranks):
        at = stats_ptr + rank * block + row * 4
        header = stats_ptr + rank * block + (block - 4)
        columns = tl.load(header + 2) * DIGIT + tl.load(header + 3)
        mine = tl.load(at, mask=live, other=float("-inf"))
        shift = tl.where(mine == float("-inf"), 0.0, mine - peak)
        total += tl.load(at + 1, mask=live, other=0.0) * tl.exp(shift)
        picked += tl.load(at + 2, mask=live, other=0.0)
        below += tl.load(at + 3, mask=live, other=0.0) + columns * shift
    rest = tl.log(total)
    loss = peak - picked + rest
    if SMOOTHING != 0.0:
        smoothing = tl.full([], SMOOTHING, ACC)
        loss = (1.0 - smoothing) * loss + smoothing * (rest - below / tl.cast(vocab_size, ACC))
    if Z_LOSS != 0.0:
        loss += tl.full([], Z_LOSS, ACC) * (peak + rest) * (peak + rest)
    target = tl.load(target_ptr + row, mask=live, other=0)
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss), mask=live)
    tl.store(norm_ptr + row * 2, peak, mask=live)
    tl.store(norm_ptr + row * 2 + 1, rest, mask=live)


@triton.jit
def backward_kernel(
    grad_ptr, x_ptr, target_ptr, norm_ptr, dx_ptr, rows, columns, width, grad_stride, x_stride, dx_stride,
    vocab_start, vocab_size, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx = g * ((1 + 2 z lse) p - eps/V - (1 - eps) [column is the target]); 0 for ignored rows and padding columns.

    dx may be x itself: each element is read and then written by the one program that owns it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    target = tl.load(target_ptr + row, mask=live, other=0)
    counted = live & (target != ignore_index)
    grad = tl.load(grad_ptr + row * grad_stride, mask=counted, other=0.0)
    peak = tl.load(norm_ptr + row * 2, mask=live, other=0.0)
    rest = tl.load(norm_ptr + row * 2 + 1, mask=live, other=0.0)
    smoothing = tl.full([], SMOOTHING, ACC)
    extra = tl.full([], 2 * Z_LOSS, ACC) * (peak + rest)
    spread = smoothing / tl.cast(vocab_size, ACC)
    local = target - vocab_start
    for at in range(0, width, COLS):
        column = at + tl.arange(0, COLS)
        inside = live[:, None] & (column < width)[None, :]
        real = counted[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=real, other=0.0).to(ACC)
        p = tl.exp((x - peak[:, None]) - rest[:, None])
        hit = local[:, None] == column[None, :]
        dx = (p - tl.where(hit, 1.0 - smoothing, 0.0) - spread) + extra[
            :, None
        ] * p  # p - 1 first: it is exact near p = 1
        dx = tl.where(real, grad[:, None] * dx, 0.0)
        tl.store(dx_ptr + row[:, None] * dx_stride + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


TILE = 4096  # elements a program holds: 16 per thread at 8 warps
MERGE_ROWS = 256


def interpreted() -> bool:
    """True when TRITON_INTERPRET was set at import: the only way these kernels serve CPU tensors."""
    return not isinstance(stats_kernel, JITFunction)


def _tile(width: int, acc: torch.dtype) -> dict:
    size = TILE // 2 if acc == torch.float64 else TILE
    cols = min(max(triton.next_power_of_2(width), 16), size)
    return {"ROWS": size // cols, "COLS": cols, "ACC": _triton_type(acc), "num_warps": 8}


def _triton_type(acc: torch.dtype) -> tl.dtype:
    return tl.float64 if acc == torch.float64 else tl.float32


def _acc(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _true_columns(width: int, vocab_start: int, vocab_size: int) -> int:
    return max(0, min(width, vocab_size - vocab_start))


def stats(logits: Tensor, target: Tensor, vocab_start: int, vocab_size: int, ignore_index: int) -> Tensor:
    """logits [R, W] (any strides; a column stride other than 1 costs a copy), target [R] -> [R+1, 4]."""
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, width), acc = x.shape, _acc(x)
    out = torch.empty(rows + 1, 4, dtype=acc, device=x.device)
    columns = _true_columns(width, vocab_start, vocab_size)
    tile = _tile(columns, acc)
    grid = (max(1, triton.cdiv(rows, tile["ROWS"])),)  # one program at least writes the header
    stats_kernel[grid](x, target.contiguous(), out, rows, columns, x.stride(0), vocab_start, ignore_index, **tile)
    return out


def merge(
    stats: Tensor, target: Tensor, ranks: int, vocab_size: int, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """stats [t*(R+1), 4] contiguous, target [R] -> loss [R], norm [R, 2]."""
    rows = target.shape[0]
    loss, norm = stats.new_empty(rows), stats.new_empty(rows, 2)
    if rows:
        merge_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
            stats, target.contiguous(), loss, norm, rows, ranks, vocab_size, ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, ROWS=MERGE_ROWS, ACC=_triton_type(stats.dtype),
        )  # fmt: skip
    return loss, norm


def backward(
    grad: Tensor, logits: Tensor, target: Tensor, norm: Tensor, dx: Tensor,
    vocab_start: int, vocab_size: int, ignore_index: int, label_smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    """Writes the gradient [R, W] into dx (column stride 1), which may be logits itself. grad [R], any stride."""
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, width), acc = x.shape, _acc(x)
    if rows == 0 or width == 0:
        return
    tile = _tile(width, acc)
    backward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
        grad, x, target.contiguous(), norm, dx, rows, _true_columns(width, vocab_start, vocab_size), width,
        grad.stride(0), x.stride(0), dx.stride(0), vocab_start, vocab_size, ignore_index,
        SMOOTHING=label_smoothing, Z_LOSS=z_loss, **tile,
    )  # fmt: skip


def _ahead_of_time() -> dict[str, list[tuple[dict, dict, dict]]]:
    """kernel -> [(signature, constexprs, options)]: what the launchers ask for, vocabulary sizes in int32."""
    size = {name: "i32" for name in ("rows", "columns", "width", "ranks", "vocab_start", "vocab_size")}
    size |= {name: "i64" for name in ("stride", "x_stride", "dx_stride", "grad_stride", "ignore_index")}
    stats, merge, backward = [], [], []
    for kind in ("bf16", "fp16", "fp32", "fp64"):
        acc = "fp64" if kind == "fp64" else "fp32"
        tensors = {"x_ptr": f"*{kind}", "dx_ptr": f"*{kind}", "target_ptr": "*i64"}
        tensors |= {f"{name}_ptr": f"*{acc}" for name in ("out", "stats", "loss", "norm", "grad")}
        for width in (50, 1 << 17):
            tile = _tile(width, torch.float64 if kind == "fp64" else torch.float32)
            options = {"num_warps": tile.pop("num_warps")}
            smooth = {"SMOOTHING": 0.1, "Z_LOSS": 1e-4}
            stats.append((tensors | size, tile, options))
            backward.append((tensors | size, tile | smooth, options))
        if kind == acc:
            merge.append((tensors | size, {"ROWS": MERGE_ROWS, "ACC": tile["ACC"]} | smooth, {}))
    return {"stats_kernel": stats, "merge_kernel": merge, "backward_kernel": backward}


AOT = _ahead_of_time()
