"""Which implementation serves an operator on a device, and how a test or a benchmark chooses another.

`SERVED` names, per operator and device type, the implementations in order of preference: the first is the default.
Nothing falls back in silence: what is asked for runs, or an error says why it cannot.

    with use("reference", "cross_entropy"):          # "*" for every operator
        loss = cross_entropy(...)
    loss.backward()                                  # the choice was captured at forward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

IMPLEMENTATIONS = ("cpp", "triton", "reference")

_LINEAR: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpp", "reference", "triton"),
    "cuda": ("cpp", "triton", "reference"),  # "cpp" where megacore._C was built with CUDA
}
SERVED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "linear": _LINEAR,
    "linear_gelu": _LINEAR,
    "linear_swiglu": _LINEAR,
    "cross_entropy": {"cpu": ("cpp", "reference", "triton"), "cuda": ("triton", "reference")},
    "dropout": {"cpu": ("cpp", "reference", "triton"), "cuda": ("triton", "reference")},
    "linear_cross_entropy": {"cpu": ("cpp", "reference", "triton"), "cuda": ("triton", "reference")},
}

_HINTS: Mapping[tuple[str, str], str] = {
    ("triton", "cpu"): "; the interpreter needs TRITON_INTERPRET=1",
    ("cpp", "cuda"): "; it needs megacore._C built with CUDA, by `make cuda-build`",
}

_CHOSEN: ContextVar[Mapping[tuple[str, str], str]] = ContextVar("megacore.ops.chosen")


def implementations(op: str, device: str = "cpu") -> list[str]:
    """The implementations of `op` that can run here on `device`, the default first.

    Triton serves the CPU through its interpreter only, that is when TRITON_INTERPRET=1 was set before it was imported;
    C++ serves a GPU only if megacore._C was built with CUDA.
    """
    return [impl for impl in _served(op, device) if _runs(impl, op, device)]


@contextmanager
def use(impl: str, op: str, device: str = "cpu") -> Iterator[None]:
    """Within the block `impl` serves `op` ("*": each operator that has it) on `device`; ValueError if it cannot."""
    ops = list(SERVED) if op == "*" else [op]
    able = [name for name in ops if impl in implementations(name, device)]
    if not able or (op != "*" and able != ops):
        served = {name: implementations(name, device) for name in ops}
        hint = _HINTS.get((impl, device), "")
        raise ValueError(f"impl={impl!r} does not serve op={op!r} on device={device!r}; choose from {served}{hint}")
    token = _CHOSEN.set({**_CHOSEN.get({}), **{(name, device): impl for name in able}})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def chosen(op: str, device: torch.device) -> str:
    """The implementation that serves `op` on `device` now. A meta tensor takes the default of the CPU.

    Under torch.compile the choice is a constant of the compiled code: the one that held when it was traced.
    """
    return _choice(op, "cpu" if device.type == "meta" else device.type)


@torch.compiler.assume_constant_result  # Dynamo cannot trace a ContextVar
def _choice(op: str, device: str) -> str:
    return _CHOSEN.get({}).get((op, device)) or next(i for i in _served(op, device) if _runs(i, op, device))


def check_devices(op: str, x: Tensor, **others: Tensor | None) -> None:
    """ValueError unless all tensors are where `x` is: torch's dispatcher would name no argument."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}; wanted {x.device}, where the first argument is")


def as_autocast(x: Tensor | None) -> Tensor | None:
    """`x` as torch.autocast hands it to a matrix product: in its dtype; as it is outside, on other devices, in fp64."""
    kind = None if x is None else x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return x
    narrowed = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if narrowed else x


def _served(op: str, device: str) -> tuple[str, ...]:
    if op not in SERVED:
        raise ValueError(f"op={op!r} is no operator of megacore; choose one of {sorted(SERVED)}")
    if device not in SERVED[op]:
        raise ValueError(f"op={op!r} is not served on device={device!r}; choose one of {sorted(SERVED[op])}")
    return SERVED[op][device]


def _runs(impl: str, op: str, device: str) -> bool:
    if (impl, device) == ("triton", "cpu"):
        return _interpreting()
    if (impl, device) == ("cpp", "cuda"):
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"megacore::{op}", "CUDA")
    return True


def _interpreting() -> bool:
    try:
        from triton import knobs  # only here: importing triton takes a moment, and a CPU install may lack it
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
