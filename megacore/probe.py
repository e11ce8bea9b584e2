"""Whether a plain model can be compared with itself at all: one line for each reason that it cannot, before any layout
runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megacore.ops import use
from megacore.parallel.batch import MicroBatch
from megacore.parallel.random import Streams
from megacore.parallel.stage import logits_of
from megacore.subject import Trial


def one_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def made(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """The factory's model. A factory that raises is a ValueError of one line."""
    try:
        return build()
    except ValueError as error:
        raise error if "\n" not in str(error) else ValueError(f"model={name} raises {one_line(error)}") from error
    except Exception as error:
        raise ValueError(f"model={name} raises {one_line(error)}; call the factory by itself first") from error


def probe(model: nn.Module, vocab_size: int, trial: Trial, streams: Streams) -> str:
    """Raises ValueError for a model that does not give logits [B, S, V] of this dtype, or not the same ones twice.
    Returns a hint for layouts that fail: why the loss of a sample may depend on its micro-batch; or "".

    Cost: four forwards and one backward. Buffers and torch's generator are put back.
    """
    generator = torch.get_rng_state()
    with _kept(model), use("reference", "*"):
        _runs(model, vocab_size, trial, streams)
        whole = _twice(model, trial.batch(0, vocab_size), streams)
        hint = _mixes(model, trial, vocab_size, streams, whole)
    torch.set_rng_state(generator)
    return hint


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Buffers afterwards are what they were."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        model.zero_grad()


def _runs(model: nn.Module, vocab_size: int, trial: Trial, streams: Streams) -> None:
    batch = trial.batch(0, vocab_size)
    want = (*batch.ids.shape, vocab_size)
    try:
        narrow = _forward_backward(model, batch, streams, want, trial.dtype)
    except _WrongOutput as wrong:
        raise ValueError(str(wrong)) from None
    except Exception as error:
        where = _place(error, model)
        if trial.precision == "fp64" and _runs_in_fp32(model, batch, streams):
            raise ValueError(f"model has no fp64 kernel{where} ({one_line(error)}); use --precision fp32") from error
        raise ValueError(f"model fails in one process{where}: {one_line(error)}; call it by itself first") from error
    if narrow:
        remedy = "use --precision fp32" if trial.precision == "fp64" else f"compute it in {trial.dtype}"
        raise ValueError(f"model computes in {narrow}, so no {trial.precision} bound can hold; {remedy}")


class _WrongOutput(Exception):
    pass


def _forward_backward(
    model: nn.Module, batch: MicroBatch, streams: Streams, want: tuple[int, ...], dtype: torch.dtype
) -> str:
    """One training forward and backward; the first place that computes in a narrower dtype, or ""."""
    model.eval()
    with torch.no_grad():  # what it gives, asked without anything of training
        logits = logits_of(model(batch.ids[:1]))
    if not isinstance(logits, Tensor) or tuple(logits.shape) != (1, *want[1:]):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise _WrongOutput(
            f"model gives {got} for ids of shape {(1, want[1])}, wanted logits {(1, *want[1:])}; "
            "check forward and vocab_size"
        )
    model.train()
    outputs: list[tuple[str, Any]] = []
    hooks = [
        module.register_forward_hook(lambda m, _, out, name=name: outputs.append((f"{name} ({type(m).__name__})", out)))
        for name, module in model.named_modules()
    ]
    try:
        with streams.at(batch):
            logits = logits_of(model(batch.ids))
    finally:
        for hook in hooks:
            hook.remove()
    narrow = _narrow_in(outputs, dtype)
    if logits.requires_grad:
        logits.sum().backward()
    return narrow


def _narrow_in(outputs: list[tuple[str, Any]], dtype: torch.dtype) -> str:
    """Where a graph node's result has fewer bits than `dtype`: constants have no node, so they may. Modules come
    innermost first, and each is charged with the nodes that no module within it has."""
    seen: set[Any] = set()
    for name, out in outputs:
        tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor)] or [
            t for t in getattr(out, "values", tuple)() if isinstance(t, Tensor)
        ]
        stack = [t.grad_fn for t in tensors if t.grad_fn is not None]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            kinds = [m.dtype for m in getattr(node, "_input_metadata", ())]  # of what the node's forward gave
            for kind in kinds:
                if kind.is_floating_point and kind.itemsize < dtype.itemsize:
                    return f"{str(kind).removeprefix('torch.')} inside {name}"
            stack.extend(child for child, _ in node.next_functions if child is not None)
    return ""


def _runs_in_fp32(model: nn.Module, batch: MicroBatch, streams: Streams) -> bool:
    try:
        with streams.at(batch):
            logits = logits_of(model.to(torch.float32).train()(batch.ids))
        if logits.requires_grad:
            logits.sum().backward()
        return True
    except Exception:
        return False


def _place(error: BaseException, model: nn.Module) -> str:
    """The innermost module whose code was running."""
    names, found, trace = {id(m): n for n, m in model.named_modules()}, "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = f" in {names[id(owner)]} ({type(owner).__name__})"
        trace = trace.tb_next
    return found


@torch.no_grad()
def _twice(model: nn.Module, batch: MicroBatch, streams: Streams) -> Tensor:
    """The logits in training, which must not depend on torch's generator."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with _kept(model), streams.at(batch):
            found.append(logits_of(model.train()(batch.ids)))
    if not torch.equal(*(x.nan_to_num() for x in found)):
        drops = [f"{n} ({type(m).__name__}, p={m.p})" for n, m in model.named_modules() if getattr(m, "p", 0)]
        drops = [d for d in drops if "ropout" in d and "streams" not in d]
        who = f"; it has {', '.join(drops[:3])}" if drops else ""
        raise ValueError(
            "model does not give the same logits twice: it draws from a generator of its own, which no layout can "
            f"repeat{who}; give dropouts a KeyedDropout() row, or p=0"
        )
    return found[0]


@torch.no_grad()
def _mixes(model: nn.Module, trial: Trial, vocab_size: int, streams: Streams, whole: Tensor) -> str:
    parts = []
    for batch in trial.share(trial.batch(0, vocab_size), 0, 1):
        with _kept(model), streams.at(batch):
            parts.append(logits_of(model.train()(batch.ids)))
    apart = (torch.cat(parts) - whole).abs().max()
    if not apart > (1e-9 if trial.precision == "fp64" else 1e-3) * whole.abs().max():
        return ""
    norms = [
        f"{n} ({type(m).__name__})" for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    who = f", by {norms[0]}" if norms else ""
    return (
        f"the logits of a sample depend on the other samples of its micro-batch{who}: no layout can equal one forward"
    )
