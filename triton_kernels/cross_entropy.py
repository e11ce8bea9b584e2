"""Cross-entropy over a vocabulary shard: row statistics, their merge over ranks, and the gradient.

R rows, C true columns of this shard, W columns of the shard with its padding, V true global vocabulary, t ranks.
A row is read once by `stats_kernel` (R*W*size bytes) and read and written once by `backward_kernel` (2*R*W*size): with
nothing else of that size, 3*R*W*size/BW is the bound. To come near it, 8 programs of 256 threads fit on a
multiprocessor (32 registers), each thread with 16 or 32 bytes under way, and no thread waits for another before its row
ends: each of LANES lanes keeps statistics of its own, from EACH adjacent elements at a time; the last step joins them.
Short rows share a program (ROWS > 1), or a small vocabulary would start one program per few bytes; where rows are fewer
than the programs a GPU holds, a long row is split into spans of SPAN columns, which `join_kernel` merges in order.
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
def write_header(to, vocab_start, columns, ACC: tl.constexpr):
    tl.store(to, tl.cast(vocab_start // DIGIT, ACC))
    tl.store(to + 1, tl.cast(vocab_start % DIGIT, ACC))
    tl.store(to + 2, tl.cast(columns // DIGIT, ACC))
    tl.store(to + 3, tl.cast(columns % DIGIT, ACC))


@triton.jit
def distance(peak, origin):
    """peak - origin; 0 where there is no peak yet, because -inf - -inf would be NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak - origin)


@triton.jit
def stats_kernel(
    x_ptr, target_ptr, out_ptr, rows, columns, span, stride, vocab_start, ignore_index,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Of the columns [i span, (i+1) span) of this shard, i = program 1:
    out[i rows + r] = (max, sum exp(x - max), x[target] or 0, sum (x - max)).
    WHOLE (one span): out[rows] = (start, count), two digits each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    first = x_ptr + row * stride  # int64: a row may lie beyond 2^31 elements
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, columns)
    lane = tl.arange(0, LANES) * EACH
    peak = tl.full([ROWS, LANES], float("-inf"), ACC)
    total = tl.zeros([ROWS, LANES], ACC)
    below = tl.zeros([ROWS, LANES], ACC)
    seen = tl.zeros([LANES], ACC)
    for at in range(begin, end, LANES * EACH):
        column = at + lane[:, None] + tl.arange(0, EACH)[None, :]
        mask = live[:, None, None] & (column < end)[None, :, :]
        x = tl.load(first[:, None, None] + column[None, :, :], mask=mask, other=float("-inf")).to(ACC)
        higher = tl.maximum(peak, tl.max(x, 2))
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        shift = distance(peak, origin)
        offset = tl.where(mask, x - origin[:, :, None], 0.0)
        total = total * tl.exp(shift) + tl.sum(tl.where(mask, tl.exp(offset), 0.0), 2)
        below = below + seen[None, :] * shift + tl.sum(offset, 2)
        seen += tl.minimum(tl.maximum(end - at - lane, 0), EACH).to(ACC)
        peak = higher
    top = tl.max(peak, 1)
    shift = distance(peak, tl.where(top == float("-inf"), 0.0, top)[:, None])
    target = tl.load(target_ptr + row, mask=live, other=-1)
    local = target - vocab_start
    owned = live & (target != ignore_index) & (local >= begin) & (local < end)
    to = out_ptr + (tl.program_id(1) * tl.cast(rows, tl.int64) + row) * 4
    tl.store(to, top, mask=live)
    tl.store(to + 1, tl.sum(total * tl.exp(shift), 1), mask=live)
    tl.store(to + 2, tl.load(first + local, mask=owned, other=0.0).to(ACC), mask=live)
    tl.store(to + 3, tl.sum(below + seen[None, :] * shift, 1), mask=live)
    if WHOLE and tl.program_id(0) == 0:
        write_header(out_ptr + tl.cast(rows, tl.int64) * 4, vocab_start, columns, ACC)


@triton.jit
def join_kernel(
    part_ptr, out_ptr, rows, parts, columns, span, vocab_start, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Statistics of the spans of a shard, [parts, rows, 4], in order -> those of the shard, [rows + 1, 4]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    peak = tl.full([ROWS], float("-inf"), ACC)
    total = tl.zeros([ROWS], ACC)
    picked = tl.zeros([ROWS], ACC)
    below = tl.zeros([ROWS], ACC)
    for part in range(parts):
        at = part_ptr + (part * tl.cast(rows, tl.int64) + row) * 4
        mine = tl.load(at, mask=live, other=float("-inf"))
        higher = tl.maximum(peak, mine)
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = distance(peak, origin), distance(mine, origin)
        total = total * tl.exp(old) + tl.load(at + 1, mask=live, other=0.0) * tl.exp(new)
        picked += tl.load(at + 2, mask=live, other=0.0)
        before, count = part * span, tl.minimum(columns - part * span, span)
        below = below + tl.cast(before, ACC) * old + tl.load(at + 3, mask=live, other=0.0) + tl.cast(count, ACC) * new
        peak = higher
    to = out_ptr + row * 4
    tl.store(to, peak, mask=live)
    tl.store(to + 1, total, mask=live)
    tl.store(to + 2, picked, mask=live)
    tl.store(to + 3, below, mask=live)
    if tl.program_id(0) == 0:
        write_header(out_ptr + tl.cast(rows, tl.int64) * 4, vocab_start, columns, ACC)


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
    span, vocab_start, vocab_size, ignore_index,
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
    begin = tl.program_id(1) * span
    for at in range(begin, tl.minimum(begin + span, width), COLS):
        column = at + tl.arange(0, COLS)
        inside = live[:, None] & (column < width)[None, :]
        real = counted[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=real, other=0.0).to(ACC)
        p = tl.exp((x - peak[:, None]) - rest[:, None])
        hit = local[:, None] == column[None, :]
        dx = (p - tl.where(hit, 1.0 - smoothing, 0.0)) - spread  # p - 1 first: it is exact near p = 1
        dx += extra[:, None] * p
        dx = tl.where(real, grad[:, None] * dx, 0.0)
        tl.store(dx_ptr + row[:, None] * dx_stride + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


DEVICE_FUNCTIONS = ("write_header", "distance")
TILE = 2048  # elements a program holds: 8 a thread at 8 warps
SPAN = 16 * TILE  # columns of a row that one program walks, where a row is split: a multiple of every tile
MERGE_ROWS = 256


def interpreted() -> bool:
    """True when TRITON_INTERPRET was set at import: the only way these kernels serve CPU tensors."""
    return not isinstance(stats_kernel, JITFunction)


def _tile(width: int, acc: torch.dtype) -> dict:
    size = TILE // 2 if acc == torch.float64 else TILE
    cols = min(max(triton.next_power_of_2(width), 16), size)
    return {"ROWS": size // cols, "COLS": cols, "ACC": _triton_type(acc), "num_warps": 8}


def _lanes(width: int, acc: torch.dtype) -> dict:
    tile = _tile(width, acc)
    return {"LANES": tile.pop("COLS") // 8, "EACH": 8} | tile  # 8 of a 16-bit type are what a thread loads at once


def _programs(device: torch.device) -> int:
    """Programs of 8 warps that a GPU holds at once."""
    if device.type != "cuda":
        return 4  # the interpreter: few, so that tests of small size reach both cases
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count


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
    tile = _lanes(columns, acc)
    across = max(1, triton.cdiv(rows, tile["ROWS"]))  # one program at least writes the header
    parts = triton.cdiv(columns, SPAN) if across < _programs(x.device) and columns > SPAN and rows else 1
    target, span = target.contiguous(), SPAN if parts > 1 else columns
    found = out if parts == 1 else torch.empty(parts * rows, 4, dtype=acc, device=x.device)
    stats_kernel[(across, parts)](
        x, target, found, rows, columns, span, x.stride(0), vocab_start, ignore_index, WHOLE=parts == 1, **tile
    )
    if parts > 1:
        join_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
            found, out, rows, parts, columns, span, vocab_start, ROWS=MERGE_ROWS, ACC=tile["ACC"]
        )
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
    backward_kernel[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, SPAN))](  # spans need no merge here
        grad, x, target.contiguous(), norm, dx, rows, _true_columns(width, vocab_start, vocab_size), width,
        grad.stride(0), x.stride(0), dx.stride(0), SPAN, vocab_start, vocab_size, ignore_index,
        SMOOTHING=label_smoothing, Z_LOSS=z_loss, **tile,
    )  # fmt: skip


def _ahead_of_time() -> dict[str, list[tuple[dict, dict, dict]]]:
    """kernel -> [(signature, constexprs, options)]: what the launchers ask for, vocabulary sizes in int32."""
    names = ("rows", "columns", "width", "ranks", "parts", "span", "vocab_start", "vocab_size")
    size = {name: "i32" for name in names} | {"grad_stride": "i64", "ignore_index": "i64"}
    size |= {name: "i64:16" for name in ("stride", "x_stride", "dx_stride")}
    stats, join, merge, backward = [], [], [], []
    for kind in ("bf16", "fp16", "fp32", "fp64"):
        acc, wide = ("fp64", torch.float64) if kind == "fp64" else ("fp32", torch.float32)
        tensors = {"x_ptr": f"*{kind}:16", "dx_ptr": f"*{kind}:16", "target_ptr": "*i64:16"}
        tensors |= {f"{name}_ptr": f"*{acc}:16" for name in ("out", "part", "stats", "loss", "norm", "grad")}
        smooth, kept = {"SMOOTHING": 0.1, "Z_LOSS": 1e-4}, {"ROWS": MERGE_ROWS, "ACC": _triton_type(wide)}
        for width in (50, 1 << 17):
            tile, lanes = _tile(width, wide), _lanes(width, wide)
            options = {"num_warps": tile.pop("num_warps")} | {"num_warps": lanes.pop("num_warps")}
            even = size | {n: "i32:16" for n in ("columns", "width", "span")} if width % 16 == 0 else size
            for whole in (True, False) if width > SPAN else (True,):
                stats.append((tensors | even, lanes | {"WHOLE": whole}, options))
            backward.append((tensors | even, tile | smooth, options))
        if kind == acc:
            join.append((tensors | size, kept, {}))
            merge.append((tensors | size, kept | smooth, {}))
    return {"stats_kernel": stats, "join_kernel": join, "merge_kernel": merge, "backward_kernel": backward}


AOT = _ahead_of_time()
