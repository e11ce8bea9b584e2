"""y = act(pre), pre = x W^T + b: one persistent kernel; and one pass for the gradient of pre and of the bias.

M rows, K inputs, N outputs; F = N/2 for SwiGLU, whose weight holds F gate rows, then F up rows. As many programs as
the GPU holds at once walk the tiles of y in bands of GROUP tile rows, so that those which run together share weights
and rows in L2. A tile sums in fp32; bias and activation follow in registers and y and pre are stored from there: beyond
the product's own traffic only the write of pre is paid, max(2MNK/F, size (MK + NK + 2MN)/BW). The activation is taken
of pre as stored, so that computing y again from pre gives its bits.
`dpre` moves 3MN elements and a partial sum of 4 bytes for each SUM_ROWS of them. Not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction


@triton.jit
def curve(v, FORM: tl.constexpr):
    """(v s, d(v s)/dv): s as in csrc/cpu/gelu.h for "tanh"; by erf for "none"; the logistic function for "swiglu".

    Each clamp keeps inf * 0 out: beyond it the other factor is 0."""
    if FORM == "none":
        s = 0.5 + 0.5 * tl.erf(v * 0.7071067811865476)
        bell = 0.3989422804014327 * tl.exp(-0.5 * v * v)
        return v * s, s + tl.minimum(tl.maximum(v, -100.0), 100.0) * bell
    elif FORM == "tanh":
        keep: tl.constexpr = tl.PropagateNan.ALL
        c = tl.minimum(tl.maximum(v, -11.0, keep), 11.0, keep)  # beyond it s is 0 or 1, and the cube cannot overflow
        square = c * c
        z = c * (1.5957691216057308 + 0.07135481282749108 * square)
        e = tl.exp(-tl.abs(z))
        d = 1.0 / (1.0 + e)
        less = e * d  # the smaller of s and 1 - s, with no cancellation; their product is s'(z)
        s = tl.where(z < 0, less, d)
        return v * s, s + c * (d * less * (1.5957691216057308 + 0.21406443848247325 * square))
    else:
        e = tl.exp(-v)  # infinite below -88, where s is 0
        s = 1.0 / (1.0 + e)
        rest = tl.where(v < 0, 1.0 - s, e * s)  # 1 - s, with no cancellation
        return v * s, s * (1.0 + tl.minimum(tl.maximum(v, -128.0), 128.0) * rest)


@triton.jit
def finish(acc, up, bias_ptr, y_ptr, pre_ptr, rows, outs, top, left, FORM: tl.constexpr, BIAS: tl.constexpr):
    """Bias, activation and the stores of y and pre of the tile at (top, left); `up` counts for "swiglu" only."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    m, n = tl.arange(0, BM), left + tl.arange(0, BN)
    inside = (top + m < rows)[:, None] & (n < outs)[None, :]
    half, first = tl.cast(outs, tl.int64), tl.cast(top, tl.int64)
    spot = m[:, None] * outs + n[None, :]  # 32 bits within a tile: addresses of 64 would cost registers
    kind = y_ptr.dtype.element_ty
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    y = acc.to(kind)
    if FORM == "swiglu":
        if BIAS:
            up += tl.load(bias_ptr + half + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
        gate_at = pre_ptr + 2 * first * half + (spot + m[:, None] * outs)
        tl.store(gate_at, y, mask=inside)
        tl.store(gate_at + half, up.to(kind), mask=inside)
        v = y.to(tl.float32)
        y = (curve(v, FORM)[0] * up.to(kind).to(tl.float32)).to(kind)
    elif FORM != "":
        tl.store(pre_ptr + first * half + spot, y, mask=inside)
        v = y.to(tl.float32)
        y = curve(v, FORM)[0].to(kind)
    tl.store(y_ptr + first * half + spot, y, mask=inside)


@triton.jit
def forward_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, pre_ptr, rows, outs, inner, x_row, x_col, w_row, w_col,
    FORM: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y [rows, outs] and pre [rows, outs] ([rows, 2 outs] for "swiglu"; none for ""), both contiguous."""
    down, across = tl.cdiv(rows, BM), tl.cdiv(outs, BN)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0)):
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        top = (first + tile % (GROUP * across) % height) * BM
        left = tile % (GROUP * across) // height * BN
        m, n = top + tl.arange(0, BM), left + tl.arange(0, BN)
        k = tl.arange(0, BK)
        m_inside, n_inside = (m < rows)[:, None], (n < outs)[None, :]
        x_at = x_ptr + m.to(tl.int64)[:, None] * x_row + k.to(tl.int64)[None, :] * x_col
        w_at = w_ptr + n.to(tl.int64)[None, :] * w_row + k.to(tl.int64)[:, None] * w_col
        half = tl.cast(outs, tl.int64)
        acc = tl.zeros([BM, BN], tl.float32)
        other = tl.zeros([BM, BN], tl.float32)
        for at in range(0, inner, BK):
            k_inside = k < inner - at
            x = tl.load(x_at, mask=m_inside & k_inside[None, :], other=0.0)
            w = tl.load(w_at, mask=n_inside & k_inside[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
            if FORM == "swiglu":
                w = tl.load(w_at + half * w_row, mask=n_inside & k_inside[:, None], other=0.0)
                other = tl.dot(x, w, other, input_precision="ieee")
            x_at += BK * tl.cast(x_col, tl.int64)
            w_at += BK * tl.cast(w_col, tl.int64)
        if BN < 128:
            finish(acc, other, bias_ptr, y_ptr, pre_ptr, rows, outs, top, left, FORM, BIAS)
        else:  # in halves, one after the other: the activation of a whole tile would take more registers than there are
            low, high = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN // 2]), [0, 2, 1]))
            finish(low, low, bias_ptr, y_ptr, pre_ptr, rows, outs, top, left, FORM, BIAS)
            finish(high, high, bias_ptr, y_ptr, pre_ptr, rows, outs, top, left + BN // 2, FORM, BIAS)


@triton.jit
def dpre_kernel(
    dy_ptr, pre_ptr, dpre_ptr, sum_ptr, rows, outs, dy_row, dy_col, pre_row, pre_col,
    FORM: tl.constexpr, SUM: tl.constexpr, SUM_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dpre = dy act'(pre), contiguous; sum[i] = sums over SUM_ROWS rows of it before rounding, in order."""
    block = tl.program_id(0) // tl.cdiv(outs, BN)
    n = tl.program_id(0) % tl.cdiv(outs, BN) * BN + tl.arange(0, BN)
    column = n.to(tl.int64)[None, :]
    half = tl.cast(outs, tl.int64)
    width = 2 * half if FORM == "swiglu" else half
    kind = dpre_ptr.dtype.element_ty
    total = tl.zeros([BM, BN], tl.float32)
    total_up = tl.zeros([BM, BN], tl.float32)
    for at in range(0, SUM_ROWS, BM):
        m = tl.cast(block, tl.int64) * SUM_ROWS + at + tl.arange(0, BM)
        row, inside = m[:, None], (m < rows)[:, None] & (n < outs)[None, :]
        dy = tl.load(dy_ptr + row * dy_row + column * dy_col, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(pre_ptr + row * pre_row + column * pre_col, mask=inside, other=0.0).to(tl.float32)
        y, slope = curve(v, FORM)
        if FORM == "swiglu":
            up = tl.load(pre_ptr + row * pre_row + (column + half) * pre_col, mask=inside, other=0.0).to(tl.float32)
            dup = dy * y
            dy = dy * up
            tl.store(dpre_ptr + row * width + half + column, dup.to(kind), mask=inside)
            total_up += dup
        d = dy * slope
        tl.store(dpre_ptr + row * width + column, d.to(kind), mask=inside)
        total += d
    if SUM:
        to = sum_ptr + block * width + n
        tl.store(to, tl.sum(total, 0), mask=n < outs)
        if FORM == "swiglu":
            tl.store(to + half, tl.sum(total_up, 0), mask=n < outs)


DEVICE_FUNCTIONS = ("curve", "finish")
SUM_ROWS = 128  # rows of one partial sum of the bias gradient


@dataclass(frozen=True)
class Config:
    """A tile of y (`cols` of gate and of up together), and how a program works on it. `rate`: products a second of a
    full GPU relative to the first of its list, as assumed from the reuse in a tile: not measured."""

    rows: int
    cols: int
    inner: int
    warps: int
    stages: int
    resident: int  # programs on one multiprocessor at once
    rate: float

    def meta(self, form: str) -> dict:
        cols = self.cols // 2 if form == "swiglu" else self.cols
        return {"BM": self.rows, "BN": cols, "BK": self.inner, "GROUP": 8}

    def options(self) -> dict:
        return {"num_warps": self.warps, "num_stages": self.stages}


HALF = (Config(128, 128, 64, 8, 3, 1, 1.0), Config(64, 128, 64, 4, 4, 1, 0.8), Config(64, 64, 64, 4, 4, 2, 0.6))
FULL = (Config(64, 64, 32, 8, 2, 2, 1.0), Config(32, 64, 32, 4, 2, 4, 0.8))


def interpreted() -> bool:
    """True when TRITON_INTERPRET was set at import: the only way these kernels serve CPU tensors."""
    return not isinstance(forward_kernel, JITFunction)


def configs(dtype: torch.dtype) -> tuple[Config, ...]:
    return FULL if dtype == torch.float32 else HALF


def choose(rows: int, cols: int, dtype: torch.dtype, processors: int) -> Config:
    """The configuration with the least modelled time for y [rows, cols]: tiles of the busiest multiprocessor times
    their size over their rate. A pure function of the problem and the GPU, so that each rank, run and restart sums in
    the same order; a measured choice would not be."""

    def time(config: Config) -> float:
        tiles = triton.cdiv(rows, config.rows) * triton.cdiv(cols, config.cols)
        return triton.cdiv(tiles, processors) * config.rows * config.cols / config.rate

    return min(configs(dtype), key=time)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: Config | None = None
) -> tuple[Tensor, Tensor | None]:
    """x [M, K], weight [N, K], any strides; bias [N] or None; activation "", "tanh", "none" (GELU by tanh and by erf)
    or "swiglu" -> y [M, N] ([M, N/2] for "swiglu") and pre [M, N], contiguous; pre is None for "". Sums in fp32.

    fp32, bf16 or fp16, all of one dtype. ValueError for another dtype, for an unknown activation, for shapes that do
    not fit. `config` is for a benchmark; the default is `choose`."""
    _check("linear", x, activation, ("", "tanh", "none", "swiglu"))
    for name, t, shape in (("weight", weight, (len(weight), x.shape[-1])), ("bias", bias, (len(weight),))):
        if t is not None and (t.shape != shape or t.dtype != x.dtype):
            raise _wrong("linear", name, f"{list(t.shape)} {t.dtype}", f"{list(shape)} {x.dtype}, to fit x and weight")
    (rows, inner), wide = x.shape, weight.shape[0]
    if activation == "swiglu" and wide % 2:
        raise _wrong("linear", "weight", list(weight.shape), "an even number of rows: gate, then up")
    outs = wide // 2 if activation == "swiglu" else wide
    y = torch.empty(rows, outs, dtype=x.dtype, device=x.device)
    pre = torch.empty(rows, wide, dtype=x.dtype, device=x.device) if activation else None
    if y.numel() == 0:
        return y, pre
    processors = _processors(x.device)
    config = config or choose(rows, wide, x.dtype, processors)
    meta = config.meta(activation)
    tiles = triton.cdiv(rows, meta["BM"]) * triton.cdiv(outs, meta["BN"])
    forward_kernel[(min(tiles, processors * config.resident),)](
        x, weight, y if bias is None else bias.contiguous(), y, y if pre is None else pre, rows, outs, inner,
        *x.stride(), *weight.stride(),
        FORM=activation, BIAS=bias is not None, **meta, **config.options(),
    )  # fmt: skip
    return y, pre


def dpre(dy: Tensor, pre: Tensor, bias_grad: bool, activation: str) -> tuple[Tensor, Tensor]:
    """dy [M, N] ([M, N/2] for "swiglu"), pre [M, N], any strides, stride 0 too -> dpre [M, N] contiguous, and its sums
    over rows [N] in the dtype of pre (empty unless bias_grad): in fp32, in the same order at each call.

    Activations, dtypes and errors as in `forward`, without ""."""
    _check("linear_dpre", pre, activation, ("tanh", "none", "swiglu"))
    rows, wide = pre.shape
    outs = wide // 2 if activation == "swiglu" else wide
    if dy.shape != (rows, outs) or dy.dtype != pre.dtype or (activation == "swiglu" and wide % 2):
        raise _wrong("linear_dpre", "dy", f"{list(dy.shape)} {dy.dtype}", f"{[rows, outs]} {pre.dtype}, to fit pre")
    out = torch.empty(rows, wide, dtype=pre.dtype, device=pre.device)
    blocks = triton.cdiv(rows, SUM_ROWS)
    sums = torch.empty(blocks if bias_grad else 0, wide, dtype=torch.float32, device=pre.device)
    if out.numel():
        tile = _pass_tile(outs)
        dpre_kernel[(blocks * triton.cdiv(outs, tile["BN"]),)](
            dy, pre, out, sums if bias_grad else out, rows, outs, *dy.stride(), *pre.stride(),
            FORM=activation, SUM=bias_grad, SUM_ROWS=SUM_ROWS, **tile, num_warps=4,
        )  # fmt: skip
    return out, sums.sum(0).to(pre.dtype) if bias_grad else pre.new_empty(0)


def _pass_tile(outs: int) -> dict:
    cols = min(max(triton.next_power_of_2(outs), 64), 128)
    return {"BM": 1024 // cols, "BN": cols}


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter runs programs in turn: few, so that each walks several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


def _wrong(op: str, argument: str, got: object, wanted: str) -> ValueError:
    return ValueError(f"{op}: {argument} is {got}; wanted {wanted}")


def _check(op: str, x: Tensor, activation: str, served: tuple[str, ...]) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() != 2:
        raise _wrong(op, "x" if op == "linear" else "pre", f"{list(x.shape)} {x.dtype}", "2-D fp32, bf16 or fp16")
    if activation not in served:
        raise _wrong(op, "activation", repr(activation), f"one of {served}")


def _ahead_of_time() -> dict[str, list[tuple[dict, dict, dict]]]:
    """Every configuration and form, contiguous and aligned; one with a transposed weight, one with no alignment."""
    size = {name: "i32:16" for name in ("rows", "outs", "inner")} | {"dy_row": "i64:16", "pre_row": "i64:16"}
    size |= {"x_row": "i64:16", "w_row": "i64:16", "sum_ptr": "*fp32:16"}
    names = ("x", "w", "bias", "y", "pre", "dy", "dpre")
    ones, forward, backward = {"x_col": 1, "w_col": 1}, [], []
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.half), ("fp32", torch.float)):
        types = size | {f"{name}_ptr": f"*{kind}:16" for name in names}
        for form in (
            ("tanh",) if kind == "fp16" else ("", "tanh", "none", "swiglu")
        ):  # fp16 differs from bf16 in name only
            for c in configs(dtype)[: 1 if kind == "fp16" else None]:
                forward.append((types, c.meta(form) | {"FORM": form, "BIAS": True} | ones, c.options()))
            if form:
                how = {"FORM": form, "SUM": True, "SUM_ROWS": SUM_ROWS, "dy_col": 1, "pre_col": 1}
                backward.append((types, _pass_tile(4096) | how, {"num_warps": 4}))
    c = HALF[0]
    types = size | {f"{name}_ptr": "*bf16:16" for name in names}
    meta = c.meta("tanh") | {"FORM": "tanh", "BIAS": False}
    forward.append((types | {"w_col": "i64:16"}, meta | {"x_col": 1, "w_row": 1}, c.options()))
    strided = {name: kind.removesuffix(":16") for name, kind in types.items()}
    strided |= {name: "i64" for name in ("x_col", "w_col", "dy_col", "pre_col")}
    forward.append((strided, meta, c.options()))
    how = {"FORM": "swiglu", "SUM": False, "SUM_ROWS": SUM_ROWS}
    backward.append((strided, _pass_tile(4096) | how, {"num_warps": 4}))
    return {"forward_kernel": forward, "dpre_kernel": backward}


AOT = _ahead_of_time()
