"""y[..., n] = gelu(pre[..., n]),  pre[..., n] = sum_k x[..., k] weight[n, k] + bias[n].   K inputs, N outputs.

gelu(v) = v * sigmoid(2u), u = sqrt(2/pi) (v + 0.044715 v^3)   approximate="tanh" (the same as v/2 (1 + tanh u))
gelu(v) = v * Phi(v), Phi the normal distribution function     approximate="none"
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import as_autocast, check_devices, chosen


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """gelu(x @ weight.T + bias): x [..., K], weight [N, K], bias [N] or None -> [..., N].

    fp32, fp64, bf16 and fp16, all arguments of one dtype; any strides. GELU, its derivative and the sums of the bias
    gradient are computed in fp32 (fp64 for fp64). Besides its inputs it saves the pre-activation only.
    Under torch.autocast all three are cast to its dtype first (fp64 stays), as torch casts those of F.linear; y has
    that dtype, each gradient the dtype of its argument.
    ValueError for a shape, dtype, device or `approximate` that does not fit.
    Cost: one GEMM and one pass over [..., N] forward; two GEMMs and one pass backward.
    Under autocast also one copy of each argument that is cast, at each call.
    """
    check_devices("linear_gelu", x, weight=weight, bias=bias)
    x, weight, bias = (as_autocast(t) for t in (x, weight, bias))
    if chosen("linear_gelu", x.device) == "reference":
        return reference(x, weight, bias, approximate=approximate)
    return torch.ops.megacore.linear_gelu(x, weight, bias, approximate)[0]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """The formula in plain torch."""
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


@torch.library.register_fake("megacore::linear_gelu")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


@torch.library.register_fake("megacore::linear_gelu_dpre")
def _(dy: Tensor, pre: Tensor, bias_grad: bool, approximate: str) -> tuple[Tensor, Tensor]:
    return pre.new_empty(pre.shape), pre.new_empty(pre.shape[-1] if bias_grad else 0)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.approximate = inputs
    ctx.set_materialize_grads(False)  # or autograd would make a zero gradient of the size of pre
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, weight if need_x else None, output[1])


def _backward(ctx, dy: Tensor | None, dpre_out: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, pre = ctx.saved_tensors
    with torch.autocast(pre.device.type, enabled=False):  # a backward inside autocast keeps the dtypes of its forward
        return _gradients(ctx, x, weight, pre, dy, dpre_out)


def _gradients(
    ctx, x: Tensor | None, weight: Tensor | None, pre: Tensor, dy: Tensor | None, dpre_out: Tensor | None
) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias, _ = ctx.needs_input_grad
    dy = torch.zeros_like(pre) if dy is None else dy
    dpre, dbias = torch.ops.megacore.linear_gelu_dpre(dy, pre, need_bias, ctx.approximate)
    if dpre_out is not None:  # only a caller of the raw operator can have used its second output
        dpre = dpre + dpre_out
        dbias = dpre.reshape(-1, pre.shape[-1]).sum(0)
    rows = dpre.flatten(0, -2) if dpre.dim() > 1 else dpre.unsqueeze(0)
    dx = dweight = None
    if need_x:  # contiguous as in forward: a view gives the bits of its copy
        dx = (rows @ weight.contiguous()).view(*pre.shape[:-1], weight.shape[1])
    if need_weight:
        dweight = rows.t() @ x.reshape(rows.shape[0], x.shape[-1]).contiguous()
    return dx, dweight, dbias if need_bias else None, None


def _no_second_derivative(ctx, *_: Tensor | None) -> None:  # or double backward would drop a term in silence
    raise NotImplementedError("linear_gelu has no second derivative; use('reference', 'linear_gelu') has")


torch.library.register_autograd("megacore::linear_gelu", _backward, setup_context=_save)
torch.library.register_autograd("megacore::linear_gelu_dpre", _no_second_derivative)
