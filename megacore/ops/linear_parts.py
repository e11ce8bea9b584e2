"""The parts of the linear family as one implementation has them: forward, dpre, dbias, dgrad, wgrad and add_wgrad.

C++ has an operator for each. Of Triton only forward and dpre are kernels of ours; its products in backward are torch's.
"reference" is plain torch. Torch's products and sums order by layout: copies make a view give the bits of a contiguous
tensor, as in C++.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import megacore._C as _C

SUFFIX = {"cpp": "", "triton": "_triton"}  # of the raw operators
OPERATORS = ("linear", "linear_gelu", "linear_swiglu")
Form = tuple[str, ...]  # (approximate,) of linear_gelu, () of the others


# ---- one implementation's parts ----


def forward(
    op: str, impl: str, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor | None]:
    """y and the pre-activation; none for `linear`, which needs none in backward."""
    if impl == "reference":
        check_arguments(op, x, weight, bias, form)
        pre = F.linear(x, weight, bias)
        return activation(op, pre, form), None if op == "linear" else pre
    out = getattr(torch.ops.megacore, op + SUFFIX[impl])(x, weight, bias, *form)
    return (out, None) if op == "linear" else out


def dpre(op: str, impl: str, dy: Tensor, pre: Tensor | None, bias_grad: bool, form: Form) -> tuple[Tensor, Tensor]:
    """The gradient of the pre-activation, and the sum of its rows if `bias_grad` (else nothing to use)."""
    if op == "linear":
        return dy, dbias(impl, dy) if bias_grad else dy
    if impl != "reference":
        return getattr(torch.ops.megacore, f"{op}_dpre{SUFFIX[impl]}")(dy, pre, bias_grad, *form)
    with torch.enable_grad():
        leaf = pre.detach().requires_grad_()
        (found,) = torch.autograd.grad(activation(op, leaf, form), leaf, dy)
    return found, dbias(impl, found) if bias_grad else found


def dbias(impl: str, dpre: Tensor) -> Tensor:
    if impl == "cpp":
        return torch.ops.megacore.linear_dbias(dpre)
    return as_rows(dpre).contiguous().sum(0, dtype=main_dtype(dpre.dtype)).to(dpre.dtype)


def dgrad(impl: str, dpre: Tensor, weight: Tensor) -> Tensor:
    if impl == "cpp":
        return torch.ops.megacore.linear_dgrad(dpre, weight)
    return (as_rows(dpre).contiguous() @ weight.contiguous()).view(*dpre.shape[:-1], weight.shape[1])


def wgrad(impl: str, dpre: Tensor, x: Tensor) -> Tensor:
    if impl == "cpp":
        return torch.ops.megacore.linear_wgrad(dpre, x)
    return as_rows(dpre).contiguous().t() @ as_rows(x).contiguous()


def add_wgrad(impl: str, dpre: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """main_grad [N, K] += dpre.T @ x, summed in the dtype of main_grad and never rounded to 16 bits."""
    if impl == "cpp":
        if main_grad.stride(1) != 1 and main_grad.stride(0) == 1:  # of a weight stored [K, N]; cuBLASLt writes rows
            dpre, x, main_grad = x, dpre, main_grad.t()
        torch.ops.megacore.linear_wgrad_(dpre, x, main_grad)
        return
    a, b = as_rows(dpre).t(), as_rows(x)
    if a.dtype == main_grad.dtype:
        main_grad.addmm_(a, b)
    elif main_grad.is_cuda:  # 16-bit operands, fp32 sum
        torch.ops.aten.addmm.dtype_out(main_grad, a, b, main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(a.to(main_grad.dtype), b.to(main_grad.dtype))


def activation(op: str, pre: Tensor, form: Form) -> Tensor:
    """Plain torch."""
    if op == "linear_gelu":
        return F.gelu(pre, approximate=form[0])
    if op == "linear_swiglu":
        gate, up = pre.chunk(2, dim=-1)
        return F.silu(gate) * up
    return pre


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of parameters of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_rows(t: Tensor) -> Tensor:  # [..., n] -> [rows, n]
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)


def asked(ctx) -> list[bool]:
    """Which of (x, weight, bias) the backward that runs now was asked for: autograd.grad(y, x) does not want the weight
    gradient, and a pipeline schedule that splits backward calls it so. ctx.needs_input_grad tells only what requires a
    gradient at all."""
    wanted = zip(ctx.needs_input_grad[:3], (*ctx.next_functions, (None, 0)), strict=False)  # the last: no bias
    return [need and _in_this_backward(node) for need, (node, _) in wanted]


def _in_this_backward(node: torch.autograd.graph.Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # "not supported" for a leaf that autograd.grad was asked for by name
        return True


@torch.compiler.assume_constant_result
def widens(device: str, dtype: torch.dtype) -> bool:
    """Whether the C++ operators multiply `dtype` in fp32 on `device`, because the CPU has no arithmetic of it: there
    torch's own products are several times slower than ours."""
    native = {torch.bfloat16: _C.native_bf16, torch.float16: _C.native_fp16}.get(dtype)
    return device == "cpu" and native is not None and not native()


# ---- checks, for Triton and plain torch; those of C++ are in csrc/cpu/linear.cpp ----

_NAMES = {torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half"}


def check_arguments(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> None:
    """ValueError, one line: operator, argument, got, wanted."""
    check_form(op, form)
    check(x.dtype in _NAMES, op, "x", describe(x), "dtype Float, Double, BFloat16 or Half")
    check(x.dim() >= 1, op, "x", describe(x), "[..., K]")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            check(other.dtype == x.dtype, op, name, describe(other), f"dtype {_NAMES[x.dtype]} as x")
            check(other.device == x.device, op, name, describe(other), f"device {x.device} as x")
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1]
    check(fits, op, "weight", describe(weight), f"[N, {x.shape[-1]}], the last size of x")
    paired = op != "linear_swiglu" or weight.shape[0] % 2 == 0
    check(paired, op, "weight", describe(weight), "[2F, K]: gate rows, then as many up rows")
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        check(fits, op, "bias", describe(bias), f"[{weight.shape[0]}], the rows of weight")


def check_form(op: str, form: Form) -> None:
    for approximate in form:
        check(approximate in ("tanh", "none"), op, "approximate", repr(approximate), "'tanh' or 'none' (erf)")


def check(holds: bool, op: str, name: str, got: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{op}: {name} is {got}; wanted {wanted}")


def describe(t: Tensor) -> str:
    return f"{list(t.shape)} {_NAMES.get(t.dtype, str(t.dtype).removeprefix('torch.'))} on {t.device}"
