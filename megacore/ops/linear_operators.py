"""The raw operators of the linear family: their fakes and gradients, and the Triton kernels as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.ops.derivatives import gradient, refuse_tangents
from megacore.ops.linear_parts import (
    OPERATORS,
    SUFFIX,
    Form,
    as_rows,
    asked,
    check,
    check_arguments,
    check_form,
    dbias,
    describe,
    dgrad,
    dpre,
    wgrad,
)

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


@torch.library.register_fake("megacore::linear_wgrad_dbias")
def _(dpre: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((dpre.shape[-1], x.shape[-1])), dpre.new_empty(dpre.shape[-1])


@torch.library.register_fake("megacore::linear_gelu_dgrad")
def _(dpre: Tensor, weight: Tensor, pre: Tensor, bias_grad: bool, approximate: str) -> tuple[Tensor, Tensor]:
    return pre.new_empty(pre.shape), pre.new_empty(pre.shape[-1] if bias_grad else 0)


@torch.library.register_fake("megacore::linear_wgrad_")
def _(dpre: Tensor, x: Tensor, main_grad: Tensor) -> None:
    return None


@torch.library.register_fake("megacore::matmul_into")
def _(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    return None


@torch.library.impl("megacore::matmul_into", "cuda")
def _(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    if out.dtype != a.dtype:  # 16-bit operands, fp32 sum
        torch.ops.aten.addmm.dtype_out(out if add else out.zero_(), a, b, out.dtype, out=out)
    elif add:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


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
            together = op == "linear" and impl == "cpp" and need_weight and need_bias and extra is None
            if extra is None:
                d, db = dpre(op, impl, dy, pre, need_bias and not together, ctx.form)
            else:  # only a caller of the raw operator can have used its second output
                d = extra if dy is None else extra + dpre(op, impl, dy, pre, False, ctx.form)[0]
                db = dbias(impl, d) if need_bias else None
            dx = dgrad(impl, d, weight) if need_x else None
            if together:  # a GPU has the bias gradient from the epilogue of the product
                dw, db = torch.ops.megacore.linear_wgrad_dbias(d, x)
            else:
                dw = wgrad(impl, d, x) if need_weight else None
        return (dx, dw, db if need_bias else None, *rest)

    gradient(op + SUFFIX[impl], backward, save)
    if op == "linear":
        return

    def refuse(ctx, *_: Tensor | None) -> None:  # or double backward would drop a term in silence
        raise NotImplementedError(f"{op} has no second derivative; use('reference', {op!r}) has")

    gradient(f"{op}_dpre{SUFFIX[impl]}", refuse)
    if (op, impl) == ("linear_gelu", "cpp"):
        gradient("linear_gelu_dgrad", refuse)


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


def _wgrad_dbias_backward(ctx, grad: Tensor, dbias_grad: Tensor) -> tuple[Tensor | None, ...]:
    d, x = ctx.saved_tensors
    need_d, need_x = ctx.needs_input_grad
    dd = torch.ops.megacore.linear(x, grad, None) if need_d else None
    return (
        None if dd is None else dd + dbias_grad,
        torch.ops.megacore.linear_dgrad(d, grad) if need_x else None,
    )


def _keep_shape(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _dbias_backward(ctx, grad: Tensor) -> Tensor:
    return grad.expand(ctx.shape)


gradient("linear_dgrad", _dgrad_backward, _keep_both)
gradient("linear_wgrad", _wgrad_backward, _keep_both)
gradient("linear_wgrad_dbias", _wgrad_dbias_backward, _keep_both)
gradient("linear_dbias", _dbias_backward, _keep_shape)
refuse_tangents("linear_wgrad_", "matmul_into")


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
    hint = f"dtype Float, BFloat16 or Half, of which Triton has kernels; use('reference', {op!r}) has all"
    check(x.dtype != torch.float64, op, "x", describe(x), hint)
    y, pre = _kernels().forward(as_rows(x), weight, bias, _kernel_name(op, form))
    lead = x.shape[:-1]
    return y.view(*lead, y.shape[-1]), None if pre is None else pre.view(*lead, pre.shape[-1])


def _triton_dpre(op: str, dy: Tensor, pre: Tensor, bias_grad: bool, form: Form) -> tuple[Tensor, Tensor]:
    wanted = (*pre.shape[:-1], pre.shape[-1] // (2 if op == "linear_swiglu" else 1))
    name = f"{op}_dpre"
    check(dy.dtype == pre.dtype and dy.shape == wanted, name, "dy", describe(dy), f"{list(wanted)} in pre's dtype")
    check_form(name, form)
    found, db = _kernels().dpre(as_rows(dy), as_rows(pre), bias_grad, _kernel_name(op, form))
    return found.view(pre.shape), db if bias_grad else pre.new_empty(0)


def _kernel_name(op: str, form: Form) -> str:
    return {"linear": "", "linear_gelu": form[0] if form else "", "linear_swiglu": "swiglu"}[op]


def _kernels():
    from megacore.triton_kernels import linear as kernels  # only here: a CPU install may lack triton

    return kernels
