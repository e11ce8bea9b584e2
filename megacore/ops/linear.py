"""y[..., n] = act(pre[..., n]),  pre[..., n] = sum_k x[..., k] weight[n, k] + bias[n].   K inputs, N outputs.

linear         y = pre
linear_gelu    y = gelu(pre):  v * sigmoid(2u), u = sqrt(2/pi) (v + 0.044715 v^3)   approximate="tanh": v/2 (1 + tanh u)
                               v * Phi(v), Phi the normal distribution function     approximate="none"
linear_swiglu  y[..., f] = silu(pre[..., f]) * pre[..., F + f],  silu(v) = v * sigmoid(v),  N = 2F: the gate's rows of
               weight, then the up projection's

Backward: dpre = dy * act'(pre), dbias = sum of the rows of dpre, dx = dpre @ weight, dweight = dpre.T @ x. Each is a
raw operator (linear_operators.py), so that a pipeline schedule can have the last one later (weight_grads.py).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import megacore.ops.linear_operators  # noqa: F401  their fakes and gradients
from megacore.ops.derivatives import check_no_tangent
from megacore.ops.dispatch import as_autocast, check_devices, chosen
from megacore.ops.linear_parts import activation, check_arguments, forward
from megacore.ops.weight_grads import WeightGrads, into_main_grads


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, weight_grad: WeightGrads | None = None) -> Tensor:
    """x @ weight.T + bias: x [..., K], weight [N, K], bias [N] or None -> [..., N].

    fp32, fp64, bf16 and fp16, all arguments of one dtype; any strides. On a CPU without arithmetic of a 16-bit dtype
    the products are computed in fp32 and rounded once. Sums of the bias gradient are at least fp32.
    Under torch.autocast all three are cast to its dtype first (fp64 stays), as torch casts those of F.linear; y has
    that dtype, each gradient the dtype of its argument.
    weight_grad: where the gradient of `weight` (and of a bias registered there) goes, instead of to autograd.
    ValueError for a shape, dtype or device that does not fit, and for a weight that `weight_grad` does not know.
    Cost: one GEMM forward; two and a pass for the bias gradient backward, of which only what is asked for is done. On
    the CPU, where the library makes the product, an argument that is not contiguous costs a copy, a transposed weight
    too: its bits depend on the layout. Our own product (csrc/cpu/product.h) and the widened one need none. Under
    autocast also one copy of what is cast, at each call.
    """
    return _run("linear", x, weight, bias, weight_grad)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "tanh",
    weight_grad: WeightGrads | None = None,
) -> Tensor:
    """gelu(x @ weight.T + bias): x [..., K], weight [N, K], bias [N] or None -> [..., N].

    As `linear`; GELU and its derivative are computed in fp32 (fp64 for fp64). Besides its inputs it saves the
    pre-activation only. ValueError also for an `approximate` that is neither "tanh" nor "none".
    Cost: one GEMM and one pass over [..., N] forward; two GEMMs and one pass backward.
    """
    return _run("linear_gelu", x, weight, bias, weight_grad, approximate)


def linear_swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, weight_grad: WeightGrads | None = None
) -> Tensor:
    """silu(gate) * up, gate and up being the halves of x @ weight.T + bias: x [..., K], weight [2F, K], bias [2F] or
    None -> [..., F]. The first F rows of weight make the gate.

    As `linear`; SiLU and its derivative are computed in fp32 (fp64 for fp64). Besides its inputs it saves the
    pre-activation [..., 2F] only. ValueError also for an odd number of rows.
    Cost: one GEMM and one pass over [..., 2F] forward; two GEMMs and one pass backward.
    """
    return _run("linear_swiglu", x, weight, bias, weight_grad)


def _run(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad: WeightGrads | None, *form: str
) -> Tensor:
    check_devices(op, x, weight=weight, bias=bias)
    targets = weight_grad and weight_grad.targets(op, weight, bias)  # before autocast makes copies of them
    x, weight, bias = (as_autocast(t) for t in (x, weight, bias))
    impl = chosen(op, x.device)
    if weight_grad is not None:
        check_no_tangent(op, x, weight, bias)
        return into_main_grads(op, impl, x, weight, bias, form, weight_grad, targets)
    if impl == "reference":
        return reference(op, x, weight, bias, *form)
    return forward(op, impl, x, weight, bias, form)[0]


def reference(op: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, *form: str) -> Tensor:
    """`op` in plain torch; form: `approximate` of linear_gelu."""
    check_arguments(op, x, weight, bias, form)
    return activation(op, F.linear(x, weight, bias), form)
