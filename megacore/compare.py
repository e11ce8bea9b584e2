"""One layout's run, and how far it is from the serial one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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
    early: dict[Key, str] = field(default_factory=dict)  # the digests after the first step
    each: list[tuple[list[Piece], list[Piece]]] = field(default_factory=list)  # gradients and weights of every step


def run_layout(subject: Subject, trial: Trial, layout: Layout, schedule: str, every: bool = False) -> Outcome:
    """One rank's part, through the step function of `megacore train`; runs in a worker. every: keep gradients and
    weights of all steps, not only the first gradients and the last weights."""
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
    outcome = _steps(step, trial, plan.vocab_size, every)
    mesh.destroy()
    return outcome


def _steps(step: TrainStep, trial: Trial, vocab_size: int, every: bool) -> Outcome:
    mesh, found = step.mesh, Outcome([], [], [], [], {})
    counted = mesh.dp_cp.index == 0  # the replicas' pieces are the same, which the digests show
    kept: list[list[Piece]] = []

    def keep(buffers: GradBuffers) -> None:
        if counted and (every or not kept):
            kept.append(_pieces(step.recs, {n: buffers.grad(n) for n in buffers.slots}))

    def weights() -> list[Piece]:
        return _pieces(step.recs, {n: p.detach() for n, p in step.params.items()}) if counted else []

    for number in range(trial.steps):
        batch = trial.batch(number, vocab_size)
        result = step.step(trial.share(batch, mesh.dp.index, mesh.dp.size), batch.valid, trial.lr, keep)
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
        if number == 0:
            found.early.update(_digests(step))
        if every:
            found.each.append((kept[-1] if counted else [], weights()))
    found.gradients.extend(kept[0] if counted else [])
    found.weights.extend(weights())
    found.digests.update(_digests(step))
    return found


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


def worst(got: dict[str, Tensor], want: dict[str, Tensor], bound: float, backward: bool = False) -> tuple[float, str]:
    """(largest error, a parameter): the first one out of bounds, in the model's order (backward: the last, which
    backward reaches first), or else the one with the largest error. By the formula of megacore.verify; NaN counts as
    infinite."""
    peak = max((float(t.abs().max()) for t in want.values() if t.numel()), default=0.0)
    errors = {}
    for name, ref in want.items():
        if ref.numel():
            scale = max(float(ref.abs().max()), 0.1 * peak) or 1.0
            error = float((got[name] - ref).abs().max()) / scale
            errors[name] = error if error == error else float("inf")
    largest = max(errors.values(), default=0.0)
    wrong = [name for name, error in errors.items() if error > bound]
    named = wrong[-1:] if backward else wrong[:1]
    return largest, (named or [name for name, error in errors.items() if error == largest] or [""])[0]


def relative(got: Sequence[float], want: Sequence[float]) -> float:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(got, want, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def copies_that_differ(outcomes: Sequence[Outcome], early: bool = False) -> list[str]:
    """The first parameter of which two ranks hold different bits, after the last step (early: after the first)."""
    first: dict[Key, tuple[str, int]] = {}
    for rank, outcome in enumerate(outcomes):
        for key, digest in (outcome.early if early else outcome.digests).items():
            other, at = first.setdefault(key, (digest, rank))
            if other != digest:
                return [f"weight {key[0]}: ranks {at} and {rank} hold copies with different bits"]
    return []
