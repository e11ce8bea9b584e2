"""Which derivatives an operator has: the reverse one by `gradient`, the forward one of none.

Forward mode (torch.func.jvp and jacfwd, torch.autograd.forward_ad, forward over reverse) carries a tangent beside each
value. torch.library.register_autograd knows nothing of it: the tangent would be gone after the operator, that is 0,
without a word. So each operator refuses one at the Autograd key, where torch's transforms unwrap their tensors, whether
the public function or torch.ops.megacore was called. A formula could not be right for all: beside parameters that
require a gradient, what backward saves has no tangent, and forward over reverse would lack a term.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from megacore.ops.dispatch import SERVED

# A device's own keys go before the alias "Autograd", where torch puts a gradient and warns about a second kernel.
KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")
_LIBRARY = torch.library.Library("megacore", "FRAGMENT")  # its registrations end with it


def gradient(op: str, backward: Callable, setup_context: Callable | None = None) -> None:
    """torch.library.register_autograd for megacore::`op`, which refuses tangents from now on."""
    torch.library.register_autograd(f"megacore::{op}", backward, setup_context=setup_context)
    refuse_tangents(op)


def refuse_tangents(*ops: str) -> None:
    """NotImplementedError where a tensor with a tangent enters one of these; else what was registered before runs.
    For operators without a gradient; `gradient` does it for the others. Cost: 3 us a call."""
    for op in ops:
        for key in KEYS:
            _LIBRARY.impl(op, _refusing(op, key), key, with_keyset=True)


def check_no_tangent(op: str, *arguments: object) -> None:
    """NotImplementedError, one line, if one of these is a tensor with a tangent."""
    if any(isinstance(t, Tensor) and unpack_dual(t).tangent is not None for t in arguments):
        public = max((name for name in SERVED if op.startswith(name)), key=len, default=None)
        remedy = f"use('reference', {public!r}) has, in one process" if public else "plain torch has"
        raise NotImplementedError(f"{op} has no forward-mode derivative (jvp, jacfwd, forward_ad); {remedy}")


def _refusing(op: str, key: str) -> Callable:
    kernel = torch.library.get_kernel(f"megacore::{op}", key)

    def checked(keyset: torch._C.DispatchKeySet, *args: object) -> object:
        check_no_tangent(op, *args)
        return kernel.call_boxed(keyset, *args)

    return checked


class FirstDerivative(torch.autograd.Function):
    """x, whose gradient has no gradient. For what takes the values of other ranks as constants: its first derivative is
    right, while a second one, or a tangent, would lack what comes by those ranks. `why` names operator and remedy."""

    @staticmethod
    def forward(x: Tensor, why: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.why = inputs[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Last.apply(grad, ctx.why), None

    @staticmethod
    def jvp(ctx, *_: Tensor | None) -> Tensor:
        raise NotImplementedError(ctx.why)


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, why: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.why = inputs[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError(ctx.why)

    @staticmethod
    def jvp(ctx, *_: Tensor | None) -> Tensor:
        raise NotImplementedError(ctx.why)
