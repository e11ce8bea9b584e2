"""Dropout keyed by coordinates: the same bits as csrc/cpu/dropout.cpp, whose head defines them.

A program owns ROWS rows (b, g, s) and BLOCKS Philox counters of each, that is 4 * BLOCKS features. The counters of a row
start at its first element rounded down to a multiple of four, so each is drawn once and gives four elements to one
thread; the elements before and after the row are masked. One read and one write of x: 2*n*size bytes is the bound while
ten Philox rounds per four elements (about 15 integer operations an element) stay below it. Not yet run on a GPU.
"""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction


@triton.jit(do_not_specialize=["key", "scale_bits", "threshold"])  # they change from step to step: no new compilation
def dropout_kernel(
    x_ptr, y_ptr, sample_ptr, position_ptr, key, scale_bits, threshold,
    rows, groups, seq, count, across, feature_start, features, group_start,
    x_batch, x_group, x_seq, x_stride, y_batch, y_group, y_seq, y_stride,
    sample_stride, position_batch, position_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y = x * scale where draw >= threshold, else 0; scale_bits are the bits of the fp64 factor."""
    tile = tl.program_id(0)  # `across` of them cover the features of ROWS rows
    row = (tile // across).to(INDEX) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    s, g, b = (row % seq).to(tl.int64), (row // seq % groups).to(tl.int64), (row // seq // groups).to(tl.int64)
    sample = tl.load(sample_ptr + b * sample_stride, mask=live, other=0)
    position = tl.load(position_ptr + b * position_batch + s * position_stride, mask=live, other=0)
    first = (group_start + g) * features + feature_start
    block = (first // 4)[:, None] + ((tile % across) * BLOCKS + tl.arange(0, BLOCKS))[None, :]
    still = tl.zeros([ROWS, BLOCKS], tl.int64)
    w0, w1, w2, w3 = tl.philox(
        tl.cast(key, tl.int64),
        block.to(tl.uint32),
        (still + position[:, None]).to(tl.uint32),
        (still + sample[:, None]).to(tl.uint32),
        (still + (sample >> 32)[:, None]).to(tl.uint32),
    )
    draw = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ROWS, 4 * BLOCKS])  # last index first: 0, 1, 2, 3
    feature = (tile % across).to(tl.int64) * (4 * BLOCKS) + tl.arange(0, 4 * BLOCKS)
    feature = feature[None, :] - (first % 4)[:, None]
    inside = live[:, None] & (feature >= 0) & (feature < count)
    from_row = x_ptr + (b * x_batch + g * x_group + s * x_seq)
    x = tl.load(from_row[:, None] + feature * x_stride, mask=inside, other=0.0).to(ACC)
    scale = tl.cast(scale_bits, tl.int64).to(tl.float64, bitcast=True).to(ACC)
    y = tl.where(draw >= tl.cast(threshold, tl.int64).to(tl.uint32), x * scale, 0.0)
    to_row = y_ptr + (b * y_batch + g * y_group + s * y_seq)
    tl.store(to_row[:, None] + feature * y_stride, y.to(y_ptr.dtype.element_ty), mask=inside)


DRAWS = 256  # Philox counters a program draws: 2 a thread at 4 warps, 8 elements; more costs registers, so occupancy


def _tile(blocks: int, rows: int, dtype: torch.dtype) -> dict:
    blocks = min(triton.next_power_of_2(blocks), DRAWS)
    acc, index = tl.float64 if dtype == torch.float64 else tl.float32, tl.int32 if rows < 2**30 else tl.int64
    return {"ROWS": DRAWS // blocks, "BLOCKS": blocks, "INDEX": index, "ACC": acc}


def _counters(count: int, groups: int, feature_start: int, features: int, group_start: int) -> int:
    """The most Philox counters that one row touches: its first element may be any of the four of a counter."""
    aligned = features % 4 == 0 or groups == 1
    lane = (group_start * features + feature_start) % 4 if aligned else 3
    return triton.cdiv(lane + count, 4)


def interpreted() -> bool:
    """True when TRITON_INTERPRET was set at import: the only way this kernel serves CPU tensors."""
    return not isinstance(dropout_kernel, JITFunction)


def dropout(
    x: Tensor, p: float, key: int, sample: Tensor, position: Tensor, feature_start: int, features: int, group_start: int
) -> Tensor:
    """x [B, S, F] or [B, G, S, F], any strides; sample [B], position [S] or [B, S], int64; key signed -> like x.

    Arguments are checked by the caller. 0 <= p < 1."""
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    x4, y4 = (t if t.dim() == 4 else t.unsqueeze(1) for t in (x, y))
    batch, groups, seq, count = x4.shape
    rows, counters = batch * groups * seq, _counters(count, groups, feature_start, features, group_start)
    tile = _tile(counters, rows, x.dtype)
    across = triton.cdiv(counters, tile["BLOCKS"])
    grid = (triton.cdiv(rows, tile["ROWS"]) * across,)
    scale_bits = struct.unpack("<q", struct.pack("<d", 1.0 / (1.0 - p)))[0]  # a float argument would be rounded to fp32
    dropout_kernel[grid](
        x4, y4, sample, position, key, scale_bits, math.floor(p * 2.0**32),
        rows, groups, seq, count, across, feature_start, features, group_start,
        *x4.stride(), *y4.stride(),
        sample.stride(0), position.stride(0) if position.dim() == 2 else 0, position.stride(-1),
        **tile,
    )  # fmt: skip
    return y


def _ahead_of_time() -> dict[str, list[tuple[dict, dict, dict]]]:
    """Of each dtype a short and a long row of contiguous memory; of one, strided memory and row numbers of 64 bits."""
    names = ("rows", "groups", "seq", "count", "across", "feature_start", "features", "group_start")
    size = {name: "i32" for name in names}
    size |= {name: "i64" for name in ("key", "scale_bits", "threshold", "sample_stride")}
    size |= {f"{name}_{axis}": "i64:16" for name in ("x", "y") for axis in ("batch", "group", "seq")}
    size |= {"position_batch": "i64", "position_stride": "i64", "sample_ptr": "*i64:16", "position_ptr": "*i64:16"}
    entries = []
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.half), ("fp32", torch.float), ("fp64", torch.double)):
        tensors = {"x_ptr": f"*{kind}:16", "y_ptr": f"*{kind}:16"}
        for count in (64, 1 << 13):
            entries.append((tensors | size, _tile(count // 4, 1024, dtype) | {"x_stride": 1, "y_stride": 1}, {}))
    strided = {"x_ptr": "*fp64", "y_ptr": "*fp64", "x_stride": "i64", "y_stride": "i64"}
    entries.append((size | strided, _tile(16, 2**40, torch.double), {}))
    return {"dropout_kernel": entries}


AOT = _ahead_of_time()
