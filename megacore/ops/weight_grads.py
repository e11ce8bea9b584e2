"""Where the weight gradients of linear layers go: straight into main-gradient buffers, at once or when asked for.

>>> grads = WeightGrads(defer=True)  # one for each chunk of a pipeline
>>> grads.into(layer.weight, main["weight"]).into(layer.bias, main["bias"])  # fp32, of the parameters' shapes
>>> y = linear_gelu(x, layer.weight, layer.bias, weight_grad=grads)
>>> y.sum().backward()  # dx, and the bias gradient
>>> grads.run()  # dW = dpre.T @ x, added to main["weight"]
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megacore.ops.linear_parts import Form, add_wgrad, asked, dgrad, dpre, forward, main_dtype

Targets = tuple[Tensor | None, Tensor | None]  # the buffers of weight and bias


@dataclass(frozen=True)
class _Product:
    impl: str
    dpre: Tensor
    x: Tensor
    main_grad: Tensor
    versions: tuple[int, int]  # of dpre and x when backward met them

    def run(self) -> None:
        for what, t, version in zip(("upstream gradient", "input"), (self.dpre, self.x), self.versions, strict=True):
            if t._version != version:  # a receive buffer that the next micro-batch was read into, say
                raise RuntimeError(f"WeightGrads.run: the {what} of a linear was changed in place after its backward")
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            add_wgrad(self.impl, self.dpre, self.x, self.main_grad)


class WeightGrads:
    """Main-gradient buffers of some parameters, and the products that are still to be added to them.

    main_grad += dpre.T @ x is one product, accumulated in fp32 (fp64 for fp64) without rounding dW to 16 bits. With
    `defer` backward only notes it (keeping dpre and x alive) and run() does it: the same bits, since the order is
    that in which backward came by. A gradient is added each time a backward asks for it, so a weight used twice gets
    both; a backward that does not (autograd.grad(y, x)) adds none. Buffers are written on the stream of the caller.
    """

    def __init__(self, defer: bool = False) -> None:
        self.defer = defer
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # id(param): (param, main_grad)
        self._deferred: deque[_Product] = deque()

    def __len__(self) -> int:
        """Products noted and not yet done."""
        return len(self._deferred)

    def __bool__(self) -> bool:
        return True

    def into(self, param: Tensor, main_grad: Tensor) -> WeightGrads:
        """The gradient of `param` (a weight or a bias) is added to `main_grad`: of its shape, on its device, fp32 (fp64
        for fp64). The buffer is not cleared. Returns self. ValueError if it does not fit."""
        wanted = main_dtype(param.dtype)
        fits = (main_grad.shape, main_grad.device, main_grad.dtype) == (param.shape, param.device, wanted)
        if not fits or main_grad.requires_grad:
            got = f"{list(main_grad.shape)} {main_grad.dtype} on {main_grad.device}"
            raise ValueError(
                f"WeightGrads.into: main_grad is {got}, requires_grad={main_grad.requires_grad}; "
                f"wanted {list(param.shape)} {wanted} on {param.device} without gradient, as param"
            )
        self._buffers[id(param)] = (param, main_grad)
        return self

    def run(self) -> int:
        """Do the products that were deferred, first come first; how many there were. RuntimeError where one of their
        factors, dpre or x, was changed in place since backward noted it."""
        count = 0
        while self._deferred:
            self._deferred.popleft().run()  # its dpre and x are freed before the next
            count += 1
        return count

    def targets(self, op: str, weight: Tensor, bias: Tensor | None) -> Targets:
        """The buffers of `weight` and `bias`. A bias that is not registered keeps its gradient in autograd."""
        found = self._of(weight)
        if found is None and weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: weight is {list(weight.shape)} {weight.dtype}, which weight_grad does not know; "
                "wanted a parameter registered by WeightGrads.into, or a view of one"
            )
        return found, None if bias is None else self._of(bias)

    def _of(self, t: Tensor) -> Tensor | None:
        if id(t) in self._buffers:
            return self._buffers[id(t)][1]
        base, main = self._buffers.get(id(t._base), (None, None)) if t._is_view() else (None, None)
        if base is None:
            return None
        if base.stride() == main.stride():  # the same view of the buffer: weight.t() of a layer that stores [K, N], say
            shift = t.storage_offset() - base.storage_offset()
            return main.as_strided(t.shape, t.stride(), main.storage_offset() + shift)
        if t.dim() != 2 or base.dim() != 2:
            return None
        turned = (t.shape, t.stride(), t.storage_offset()) == (base.t().shape, base.t().stride(), base.storage_offset())
        return main.t() if turned else None

    def add(self, impl: str, dpre: Tensor, x: Tensor, main_grad: Tensor) -> None:
        """main_grad += dpre.T @ x, now or at run()."""
        product = _Product(impl, dpre, x, main_grad, (dpre._version, x._version))
        if self.defer:
            self._deferred.append(product)
        else:
            product.run()


@dataclass(frozen=True)
class _Call:
    op: str
    impl: str
    form: Form
    grads: WeightGrads
    targets: Targets


def into_main_grads(
    op: str,
    impl: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Form,
    grads: WeightGrads,
    targets: Targets,
) -> Tensor:
    return _IntoMainGrads.apply(x, weight, bias, _Call(op, impl, form, grads, targets))


class _IntoMainGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        y, pre = forward(call.op, call.impl, x, weight, bias, call.form)
        ctx.call = call
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None, pre)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, weight, pre) = ctx.call, ctx.saved_tensors
        need_x, need_weight, need_bias = asked(ctx)
        with torch.autocast(dy.device.type, enabled=False):
            d, dbias = dpre(call.op, call.impl, dy, pre, need_bias, call.form)
            dx = dgrad(call.impl, d, weight) if need_x else None
            if need_weight:
                call.grads.add(call.impl, d, x, call.targets[0])
            if need_bias and call.targets[1] is not None:
                call.targets[1].add_(dbias)
                dbias = None
        return dx, None, dbias if need_bias else None, None
