"""One layout's run, and how far it is from the serial one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import ParamRecord, Range
from megacore.subject import Subject, Trial
from megacore.train.config import OptimSettings
from megacore.train.step import TrainStep

Key = tuple[str, tuple[Range, ...]]  # a parameter, and a box of its full tensor
Piece = tuple[str, tuple[Range, ...], Tensor]  # with the values


@dataclass(frozen=True)
class Outcome:
    """What one rank of one layout saw."""

    losses: list[float]
    norms: list[float]
    gradients: list[Piece]
    weights: list[Piece]
    digests: dict[Key, str]  # of every box held here, counted or not
    refused: str = ""


def run_layout(subject: Subject, trial: Trial, layout: Layout, schedule: str) -> Outcome:
    """One rank's part, through the step function of `megacore train`; runs in a worker."""
    mesh = Mesh.build(layout)
    try:
        build, plan, init = subject.resolve(trial.seed)
        settings = OptimSettings(
            lr=trial.lr,
            beta1=trial.betas[0],
            beta2=trial.betas[1],
            eps=trial.eps,
            weight_decay=trial.weight_decay,
            clip=trial.clip,
        )
        if layout.dp > trial.global_batch:
            raise ValueError(
                f"dp={layout.dp} is more than global_batch={trial.global_batch}: a rank would have no sample"
            )
        step = TrainStep(
            build, plan, mesh, seed=trial.seed, precision=trial.precision, schedule=schedule, optim=settings, init=init,
            bucket_bytes=16 << 10,  # several buckets even in a toy
        )  # fmt: skip
    except ValueError as error:
        mesh.destroy()
        return Outcome([], [], [], [], {}, refused=str(error))
    losses, norms, gradients = [], [], []

    def keep_first(buffers: GradBuffers) -> None:
        if not gradients:
            gradients.extend(_pieces(step.recs, {n: buffers.grad(n) for n in buffers.slots}))

    for number in range(trial.steps):
        batch = trial.batch(number, plan.vocab_size)
        result = step.step(trial.share(batch, mesh.dp.index, mesh.dp.size), batch.valid, trial.lr, keep_first)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    digests = dict(_digests(step))
    counted = mesh.dp_cp.index == 0
    weights = _pieces(step.recs, {n: p.detach() for n, p in step.params.items()})
    outcome = Outcome(losses, norms, gradients if counted else [], weights if counted else [], digests)
    mesh.destroy()
    return outcome


def _pieces(recs: dict[str, ParamRecord], local: dict[str, Tensor]) -> list[Piece]:
    cut = []
    for name, tensor in local.items():
        for box in recs[name].counted():
            cut.append((recs[name].canonical, box.full, tensor[tuple(slice(*r) for r in box.local)].clone()))
    return cut


def _digests(step: TrainStep) -> Iterator[tuple[Key, str]]:
    for name, param in step.params.items():
        for box in step.recs[name].boxes:
            values = param.detach()[tuple(slice(*r) for r in box.local)].reshape(-1).view(torch.uint8)
            digest = hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()
            yield (step.recs[name].canonical, box.full), digest


def assemble(
    outcomes: Sequence[Outcome], which: Callable[[Outcome], list[Piece]], like: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Full tensors from the pieces of all ranks. Raises ValueError unless every element came exactly once."""
    full = {name: torch.zeros_like(t) for name, t in like.items()}
    seen = {name: torch.zeros(t.shape, dtype=torch.int8) for name, t in like.items()}
    for outcome in outcomes:
        for name, box, values in which(outcome):
            if name not in full:
                raise ValueError(f"{name} is no parameter of the plain model")
            at = tuple(slice(*r) for r in box)
            full[name][at] = values
            seen[name][at] += 1
    for name, count in seen.items():
        if bool((count != 1).any()):
            raise ValueError(
                f"{name}: {int((count == 0).sum())} elements belong to no rank, {int((count > 1).sum())} to several"
            )
    return full


def worst(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> tuple[float, str]:
    """(largest error, a parameter): the first one out of bounds, in the model's order, or else the one with the largest
    error. By the formula of megacore.verify; NaN counts as infinite."""
    peak = max((float(t.abs().max()) for t in want.values() if t.numel()), default=0.0)
    errors = {}
    for name, ref in want.items():
        if ref.numel():
            scale = max(float(ref.abs().max()), 0.1 * peak) or 1.0
            error = float((got[name] - ref).abs().max()) / scale
            errors[name] = error if error == error else float("inf")
    largest = max(errors.values(), default=0.0)
    wrong = [name for name, error in errors.items() if error > bound]
    return largest, (wrong or [name for name, error in errors.items() if error == largest] or [""])[0]


def relative(got: Sequence[float], want: Sequence[float]) -> float:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(got, want, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def copies_that_differ(outcomes: Sequence[Outcome]) -> list[str]:
    first: dict[Key, tuple[str, int]] = {}
    for rank, outcome in enumerate(outcomes):
        for key, digest in outcome.digests.items():
            other, at = first.setdefault(key, (digest, rank))
            if other != digest:
                return [f"weight {key[0]}: ranks {at} and {rank} hold copies with different bits"]
    return []
