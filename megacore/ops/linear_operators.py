"""The raw operators of the linear family: fakes, gradients, the Triton kernels as operators, and plain torch.

What `linear.py` and `weight_grads.py` call: forward, dpre, dgrad, wgrad and add_wgrad of one implementation. C++ has an
operator for each. Of Triton only the two passes are kernels of ours; its products in backward are torch's.
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
    return as_rows(dpre).sum(0, dtype=main_dtype(dpre.dtype)).to(dpre.dtype)


def dgrad(impl: str, dpre: Tensor, weight: Tensor) -> Tensor:
    if impl == "cpp":
        return torch.ops.megacore.linear_dgrad(dpre, weight)
    return (as_rows(dpre) @ weight).view(*dpre.shape[:-1], weight.shape[1])


def wgrad(impl: str, dpre: Tensor, x: Tensor) -> Tensor:
    if impl == "cpp":
        return torch.ops.megacore.linear_wgrad(dpre, x)
    return as_rows(dpre).t() @ as_rows(x)


def add_wgrad(impl: str, dpre: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """main_grad [N, K] += dpre.T @ x, summed in the dtype of main_grad and never rounded to 16 bits."""
    if impl == "cpp":
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


# ---- fakes and gradients ----


def _fakes(suffix: str) -> None:
    @torch.library.register_fake(f"megacore::linear{suffix}")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @torch.library.register_fake(f"megacore::linear_gelu{suffix}")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
        shape = (*x.shape[:-1], weight.shape[0])
        return x.new_empty(shape), x.new_empty(shape)

    @torch.library.register_fake(f"megacore::linear_swiglu{suffix}")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        n = weight.shape[0]
        return x.new_empty((*x.shape[:-1], n // 2)), x.new_empty((*x.shape[:-1], n))

    @torch.library.register_fake(f"megacore::linear_gelu_dpre{suffix}")
    def _(dy: Tensor, pre: Tensor, bias_grad: bool, approximate: str) -> tuple[Tensor, Tensor]:
        return pre.new_empty(pre.shape), pre.new_empty(pre.shape[-1] if bias_grad else 0)

    @torch.library.register_fake(f"megacore::linear_swiglu_dpre{suffix}")
    def _(dy: Tensor, pre: Tensor, bias_grad: bool) -> tuple[Tensor, Tensor]:
        return pre.new_empty(pre.shape), pre.new_empty(pre.shape[-1] if bias_grad else 0)


@torch.library.register_fake("megacore::linear_dbias")
def _(dpre: Tensor) -> Tensor:
    return dpre.new_empty(dpre.shape[-1])


@torch.library.register_fake("megacore::linear_dgrad")
def _(dpre: Tensor, weight: Tensor) -> Tensor:
    return dpre.new_empty((*dpre.shape[:-1], weight.shape[1]))


@torch.library.register_fake("megacore::linear_wgrad")
def _(dpre: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((dpre.shape[-1], x.shape[-1]))


@torch.library.register_fake("megacore::linear_wgrad_")
def _(dpre: Tensor, x: Tensor, main_grad: Tensor) -> None:
    return None


def _gradient(op: str, impl: str) -> None:
    def save(ctx, inputs: tuple, output: Tensor | tuple[Tensor, Tensor]) -> None:
        x, weight, _, *ctx.form = inputs
        ctx.set_materialize_grads(False)  # or autograd would make a zero gradient of the size of pre
        need_x, need_weight = ctx.needs_input_grad[:2]
        pre = None if op == "linear" else output[1]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None, pre)

    def backward(ctx, dy: Tensor | None, extra: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, pre = ctx.saved_tensors
        need_x, need_weight, need_bias = asked(ctx)
        rest = [None] * len(ctx.form)
        if dy is None and extra is None:
            return (None, None, None, *rest)
        kind = (dy if extra is None else extra).device.type
        with torch.autocast(kind, enabled=False):  # a backward inside autocast keeps the dtypes of its forward
            if extra is None:
                d, db = dpre(op, impl, dy, pre, need_bias, ctx.form)
            else:  # only a caller of the raw operator can have used its second output
                d = extra if dy is None else extra + dpre(op, impl, dy, pre, False, ctx.form)[0]
                db = dbias(impl, d) if need_bias else None
            dx = dgrad(impl, d, weight) if need_x else None
            dw = wgrad(impl, d, x) if need_weight else None
        return (dx, dw, db if need_bias else None, *rest)

    torch.library.register_autograd(f"megacore::{op}{SUFFIX[impl]}", backward, setup_context=save)
    if op == "linear":
        return

    def refuse(ctx, *_: Tensor | None) -> None:  # or double backward would drop a term in silence
        raise NotImplementedError(f"{op} has no second derivative; use('reference', {op!r}) has")

    torch.library.register_autograd(f"megacore::{op}_dpre{SUFFIX[impl]}", refuse)


for _impl, _suffix in SUFFIX.items():
    _fakes(_suffix)
    for _op in OPERATORS:
        _gradient(_op, _impl)


# The products are bilinear, so `linear` has derivatives of every order.
def _keep_both(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _dgrad_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad [..., K]
    d, weight = ctx.saved_tensors
    need_d, need_weight = ctx.needs_input_grad
    return (
        torch.ops.megacore.linear(grad, weight, None) if need_d else None,
        torch.ops.megacore.linear_wgrad(d, grad) if need_weight else None,
    )


def _wgrad_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad [N, K]
    d, x = ctx.saved_tensors
    need_d, need_x = ctx.needs_input_grad
    return (
        torch.ops.megacore.linear(x, grad, None) if need_d else None,
        torch.ops.megacore.linear_dgrad(d, grad) if need_x else None,
    )


def _keep_shape(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _dbias_backward(ctx, grad: Tensor) -> Tensor:
    return grad.expand(ctx.shape)


torch.library.register_autograd("megacore::linear_dgrad", _dgrad_backward, setup_context=_keep_both)
torch.library.register_autograd("megacore::linear_wgrad", _wgrad_backward, setup_context=_keep_both)
torch.library.register_autograd("megacore::linear_dbias", _dbias_backward, setup_context=_keep_shape)


# ---- Triton ----


@torch.library.impl("megacore::linear_triton", ("cpu", "cuda"))
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _triton_forward("linear", x, weight, bias, ())[0]


@torch.library.impl("megacore::linear_gelu_triton", ("cpu", "cuda"))
def _(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return _triton_forward("linear_gelu", x, weight, bias, (approximate,))


@torch.library.impl("megacore::linear_swiglu_triton", ("cpu", "cuda"))
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _triton_forward("linear_swiglu", x, weight, bias, ())


@torch.library.impl("megacore::linear_gelu_dpre_triton", ("cpu", "cuda"))
def _(dy: Tensor, pre: Tensor, bias_grad: bool, approximate: str) -> tuple[Tensor, Tensor]:
    return _triton_dpre("linear_gelu", dy, pre, bias_grad, (approximate,))


@torch.library.impl("megacore::linear_swiglu_dpre_triton", ("cpu", "cuda"))
def _(dy: Tensor, pre: Tensor, bias_grad: bool) -> tuple[Tensor, Tensor]:
    return _triton_dpre("linear_swiglu", dy, pre, bias_grad, ())


def _triton_forward(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form
) -> tuple[Tensor, Tensor | None]:
    check_arguments(op, x, weight, bias, form)
    y, pre = _kernels().forward(as_rows(x), weight, bias, _kernel_name(op, form))
    lead = x.shape[:-1]
    return y.view(*lead, y.shape[-1]), None if pre is None else pre.view(*lead, pre.shape[-1])


def _triton_dpre(op: str, dy: Tensor, pre: Tensor, bias_grad: bool, form: Form) -> tuple[Tensor, Tensor]:
    wanted = (*pre.shape[:-1], pre.shape[-1] // (2 if op == "linear_swiglu" else 1))
    name = f"{op}_dpre"
    _check(dy.dtype == pre.dtype and dy.shape == wanted, name, "dy", _describe(dy), f"{list(wanted)} in pre's dtype")
    _check_form(name, form)
    found, db = _kernels().dpre(as_rows(dy), as_rows(pre), bias_grad, _kernel_name(op, form))
    return found.view(pre.shape), db if bias_grad else pre.new_empty(0)


def _kernel_name(op: str, form: Form) -> str:
    return {"linear": "", "linear_gelu": form[0] if form else "", "linear_swiglu": "swiglu"}[op]


def _kernels():
    from megacore.triton_kernels import linear as kernels  # only here: a CPU install may lack triton

    return kernels


# ---- checks, for Triton and plain torch; those of C++ are in csrc/cpu/linear.cpp ----

_NAMES = {torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16", torch.float16: "Half"}


def check_arguments(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> None:
    """ValueError, one line: operator, argument, got, wanted."""
    _check_form(op, form)
    _check(x.dtype in _NAMES, op, "x", _describe(x), "dtype Float, Double, BFloat16 or Half")
    _check(x.dim() >= 1, op, "x", _describe(x), "[..., K]")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None:
            _check(other.dtype == x.dtype, op, name, _describe(other), f"dtype {_NAMES[x.dtype]} as x")
            _check(other.device == x.device, op, name, _describe(other), f"device {x.device} as x")
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[-1]
    _check(fits, op, "weight", _describe(weight), f"[N, {x.shape[-1]}], the last size of x")
    paired = op != "linear_swiglu" or weight.shape[0] % 2 == 0
    _check(paired, op, "weight", _describe(weight), "[2F, K]: gate rows, then as many up rows")
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == weight.shape[0]
        _check(fits, op, "bias", _describe(bias), f"[{weight.shape[0]}], the rows of weight")


def _check_form(op: str, form: Form) -> None:
    for approximate in form:
        _check(approximate in ("tanh", "none"), op, "approximate", repr(approximate), "'tanh' or 'none' (erf)")


def _check(holds: bool, op: str, name: str, got: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{op}: {name} is {got}; wanted {wanted}")


def _describe(t: Tensor) -> str:
    return f"{list(t.shape)} {_NAMES.get(t.dtype, str(t.dtype).removeprefix('torch.'))} on {t.device}"
