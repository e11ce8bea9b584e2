"""Parallel equals serial, checked: `megacore verify`, and the function `megacore.verify(...)` for any model.

The plain model runs serially (megacore.serial), then every layout runs the same weights and batches through the step
function of `megacore train`. Compared: the loss and the gradient norm of every step, every gradient of the first step,
the weights after the last, and that copies on several ranks are the same bits.

    error(a, b) = max|a - b| / max(max|b|, 0.1 * max|all b|)        b serial; a key bias, say, has gradient exactly 0

fp64: all errors <= 1e-12. fp32: loss, norm and gradients <= 1e-5; weights are reported without a bound, since AdamW
amplifies rounding. All layouts share one pool of worker processes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megacore.comm.mesh import Layout, Mesh, layouts
from megacore.comm.workers import WorkerError, WorkerPool
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import ParamRecord, Range
from megacore.pipeline import SCHEDULES
from megacore.serial import Reference, run_serial
from megacore.subject import Subject, Trial
from megacore.train.config import OptimSettings
from megacore.train.step import TrainStep

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
Piece = tuple[str, tuple[Range, ...], Tensor]  # parameter, box of the full tensor, its values


@dataclass(frozen=True)
class Outcome:
    """What one rank of one layout saw."""

    losses: list[float]
    norms: list[float]
    gradients: list[Piece]
    weights: list[Piece]
    digests: dict[tuple[str, tuple[Range, ...]], str]  # of every box held here, counted or not
    refused: str = ""


@dataclass(frozen=True)
class Row:
    """The verdict on one layout and schedule. `where` names the first parameter out of bounds, and by how much."""

    layout: Layout
    schedule: str
    verdict: str  # passed, failed or refused
    loss: float | None = None
    grad: float | None = None
    norm: float | None = None
    weight: float | None = None
    where: str = ""

    @property
    def name(self) -> str:
        return f"tp{self.layout.tp} pp{self.layout.pp} dp{self.layout.dp}"


@dataclass(frozen=True)
class Report:
    precision: str
    rows: list[Row]

    def count(self, verdict: str) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def passed(self) -> bool:
        """Some layout passed and none failed. A refused layout is no pass."""
        return self.count("failed") == 0 and self.count("passed") > 0


def verify(
    model="gpt",
    plan=None,
    layouts: str | Iterable[Layout] = "all",
    *,
    world: int = 8,
    schedules: Sequence[str] = ("1f1b",),
    trial: Trial | None = None,
    pool: WorkerPool | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> Report:
    """Compare every layout with the serial run; see the module's head, Subject for `model` and `plan`, Trial for the rest.

    layouts: "all" (every tp, pp, dp whose product is at most `world`), "tp2-pp2-dp2,tp4", or Layouts. Refused layouts are
    rows of their own. `on_row` is called as each row is known. Needs `world` processes on this host; cost: serial time plus
    that of each layout. Raises ValueError for a layout, schedule, model or plan that cannot be read.
    """
    trial, subject = trial or Trial(), Subject(model, plan)
    if trial.precision not in TOLERANCE:
        raise ValueError(f"precision={trial.precision!r} has no bound to verify; choose one of {', '.join(TOLERANCE)}")
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    wanted = read_layouts(layouts, world) if isinstance(layouts, str) else list(layouts)
    reference = run_serial(subject, trial)
    own = WorkerPool(max(layout.world for layout in wanted)) if pool is None else None
    rows = []
    try:
        for layout in wanted:
            for schedule in schedules if layout.pp > 1 else schedules[:1]:  # one stage: every schedule is the same
                rows.append(_row(own or pool, subject, trial, layout, schedule, reference))
                if on_row is not None:
                    on_row(rows[-1])
    finally:
        if own is not None:
            own.close()
    return Report(trial.precision, rows)


def read_layouts(text: str, world: int) -> list[Layout]:
    """ "all", or names such as tp2-pp2-dp2 with commas between; an axis that is not named is 1."""
    if text == "all":
        return layouts(world)
    found = []
    for name in text.split(","):
        sizes = {}
        for part in name.strip().split("-"):
            axis, digits = part[:2], part[2:]
            if axis not in ("tp", "pp", "dp") or not digits.isdigit() or axis in sizes:
                raise ValueError(f"layouts={text!r}: {name.strip()!r} is not like tp2-pp2-dp2; or say 'all'")
            sizes[axis] = int(digits)
        layout = Layout(**sizes)
        if layout.world > world:
            raise ValueError(f"layouts={text!r}: {name.strip()!r} needs {layout.world} ranks, world={world}; raise world")
        found.append(layout)
    return found


def run_layout(subject: Subject, trial: Trial, layout: Layout, schedule: str) -> Outcome:
    """One rank's part, through the step function of `megacore train`; runs in a worker."""
    mesh = Mesh.build(layout)
    try:
        build, plan, init = subject.resolve(trial.seed)
        settings = OptimSettings(
            lr=trial.lr, beta1=trial.betas[0], beta2=trial.betas[1], eps=trial.eps, weight_decay=trial.weight_decay, clip=trial.clip
        )
        if layout.dp > trial.global_batch:
            raise ValueError(f"dp={layout.dp} is more than global_batch={trial.global_batch}: a rank would have no sample")
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
    digests = {(rec.canonical, box): digest for rec, box, digest in _digests(step)}
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


def _digests(step: TrainStep):
    for name, param in step.params.items():
        for box in step.recs[name].boxes:
            values = param.detach()[tuple(slice(*r) for r in box.local)].contiguous().view(torch.uint8)
            yield step.recs[name], box.full, hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def _row(pool: WorkerPool, subject: Subject, trial: Trial, layout: Layout, schedule: str, reference: Reference) -> Row:
    try:
        outcomes = pool.run(run_layout, subject, trial, layout, schedule, world=layout.world)
    except (WorkerError, TimeoutError) as error:
        return Row(layout, schedule, "failed", where=str(error).strip())
    refusals = {o.refused for o in outcomes}
    if refusals != {""}:
        alike = "" not in refusals
        return Row(layout, schedule, "refused" if alike else "failed", where=min(refusals - {""}))
    try:
        gradients = assemble(outcomes, lambda o: o.gradients, reference.gradients)
        weights = assemble(outcomes, lambda o: o.weights, reference.weights)
    except ValueError as error:
        return Row(layout, schedule, "failed", where=str(error))
    grad, grad_at = worst(gradients, reference.gradients)
    weight, weight_at = worst(weights, reference.weights)
    loss = max(_relative(o.losses, reference.losses) for o in outcomes)
    norm = max(_relative(o.norms, reference.norms) for o in outcomes)
    bound = TOLERANCE[trial.precision]
    checks = [("loss", loss, "loss"), ("gradient of", grad, grad_at), ("gradient norm", norm, "")]
    checks += [("weight", weight, weight_at)] if trial.precision == "fp64" else []
    wrong = [f"{what} {at}".strip() + f" differs by {error:.1e}" for what, error, at in checks if not error <= bound]
    wrong += _copies_that_differ(outcomes)
    return Row(layout, schedule, "failed" if wrong else "passed", loss, grad, norm, weight, wrong[0] if wrong else "")


def assemble(outcomes: Sequence[Outcome], which: Callable[[Outcome], list[Piece]], like: dict[str, Tensor]) -> dict[str, Tensor]:
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
            raise ValueError(f"{name}: {int((count == 0).sum())} elements belong to no rank, {int((count > 1).sum())} to several")
    return full


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """(largest error, the first parameter that has it), by the formula at the head; NaN counts as infinite."""
    peak = max(float(t.abs().max()) for t in want.values() if t.numel())
    largest, where = 0.0, ""
    for name, ref in want.items():
        if not ref.numel():
            continue
        scale = max(float(ref.abs().max()), 0.1 * peak) or 1.0
        error = float((got[name] - ref).abs().max()) / scale
        error = error if error == error else float("inf")
        if error > largest:
            largest, where = error, name
    return largest, where


def _relative(got: Sequence[float], want: Sequence[float]) -> float:
    errors = [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(got, want, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def _copies_that_differ(outcomes: Sequence[Outcome]) -> list[str]:
    first: dict = {}
    for rank, outcome in enumerate(outcomes):
        for key, digest in outcome.digests.items():
            other, at = first.setdefault(key, (digest, rank))
            if other != digest:
                return [f"weight {key[0]}: ranks {at} and {rank} hold copies with different bits"]
    return []


class _Callable(ModuleType):
    """`megacore.verify` names this module and is to be called as a function too."""

    def __call__(self, *args, **kwargs) -> Report:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
