"""Parallel equals serial, checked: `megacore verify`, and the function `megacore.verify(...)` for any model.

The plain model runs serially (megacore.serial), then every layout runs the same weights and batches through the step
function of `megacore train`. Compared: the loss and the gradient norm of every step, every gradient of the first step,
the weights after the last, and that copies on several ranks are the same bits.

    error(a, b) = max|a - b| / max(max|b|, 0.1 * max|all b|)        b serial; a key bias, say, has gradient exactly 0

fp64: all errors <= 1e-12. fp32: loss, norm and gradients <= 1e-5; weights are reported without a bound, since AdamW
amplifies rounding. A layout whose first step is right and whose trajectory then leaves the serial one is judged step by
step, each from its own state (megacore.judge). What is reported is the first thing wrong, in the order of cause. All
layouts share one pool of worker processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType

from rich.table import Table
from rich.text import Text

from megacore.comm.mesh import Layout
from megacore.comm.mesh import layouts as all_layouts
from megacore.comm.workers import WorkerError, WorkerPool
from megacore.compare import relative, run_layout
from megacore.judge import judge, judge_steps
from megacore.pipeline import SCHEDULES
from megacore.serial import Reference, run_serial
from megacore.subject import TOYS, Subject, Trial
from megacore.train.plain import screen

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


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
    """Compare every layout with the serial run: see the module's head, Subject for `model` and `plan`, Trial for the
    rest.

    layouts: "all" (every tp, pp, dp whose product is at most `world`), "tp2-pp2-dp2,tp4", or Layouts. Refused layouts
    are rows of their own. `on_row` is called as each row is known. Needs `world` processes on this host; cost: serial
    time plus that of each layout. Raises ValueError for a layout, schedule, model or plan that cannot be read.
    """
    trial, subject = trial or Trial(), Subject(model, plan)
    if trial.precision not in TOLERANCE:
        raise ValueError(f"precision={trial.precision!r} has no bound to verify; choose one of {', '.join(TOLERANCE)}")
    for schedule in schedules:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if world < 1:
        raise ValueError(f"world={world} is not a positive whole number; give world >= 1")
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
        return all_layouts(world)
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
            raise ValueError(
                f"layouts={text!r}: {name.strip()!r} needs {layout.world} ranks, world={world}; raise world"
            )
        found.append(layout)
    return found


def _row(pool: WorkerPool, subject: Subject, trial: Trial, layout: Layout, schedule: str, reference: Reference) -> Row:
    try:
        outcomes = pool.run(run_layout, subject, trial, layout, schedule, world=layout.world, timeout=trial.timeout)
    except (WorkerError, TimeoutError) as error:
        return Row(layout, schedule, "failed", where=_reason(error))
    refusals = {o.refused for o in outcomes}
    if refusals != {""}:
        alike = "" not in refusals
        return Row(layout, schedule, "refused" if alike else "failed", where=min(refusals - {""}))
    try:
        bound = TOLERANCE[trial.precision]
        found = judge(outcomes, reference, trial, bound)
        if found.step > 1:  # the first step is right: rounding that AdamW amplified, or a wrong step?
            again = pool.run(
                run_layout, subject, trial, layout, schedule, True, world=layout.world, timeout=trial.timeout
            )
            if any(relative(b.losses, a.losses) > bound for a, b in zip(outcomes, again, strict=True)):
                return Row(layout, schedule, "failed", where=f"{found.wrong}; a second run gave other losses")
            found = judge_steps(subject, trial, again, bound)
    except (ValueError, WorkerError, TimeoutError) as error:
        return Row(layout, schedule, "failed", where=_reason(error))
    wrong = found.wrong + (f"; {reference.hint}" if found.wrong and reference.hint else "")
    verdict = "failed" if wrong else "passed"
    return Row(layout, schedule, verdict, found.loss, found.grad, found.norm, found.weight, wrong)


def _reason(error: Exception) -> str:
    """One line for a mistake of the caller's that a rank refused; otherwise the rank's traceback."""
    text = str(error).strip()
    last = text.splitlines()[-1]
    return last.removeprefix("ValueError: ") if last.startswith("ValueError: ") else text


@dataclass(frozen=True)
class Settings:
    """Run a model serially and at every layout, on the same weights and batches, and compare. Exit code 0 only if some
    layout passed and none failed."""

    model: str = "gpt"  # gpt, gpt-uneven, or package.module:factory of a plain model
    plan: str | None = None  # package.module:name of a Plan or of a function of the model; known for GPT and HF GPT-2
    layouts: str = "all"  # all (every tp, pp, dp of at most `world` ranks), or names: tp2-pp2-dp2,tp4
    world: int = 8  # ranks at most
    precision: str = "fp64"  # fp64 (bound 1e-12) or fp32 (1e-5)
    schedule: str = "1f1b"  # pipeline schedules, with commas between: 1f1b,gpipe
    steps: int = 3  # optimizer steps
    global_batch: int = 16  # samples of a step
    micro_batches: int = 4  # of a rank and step
    seq_length: int = 16  # tokens of a sample
    timeout: float = 600.0  # seconds after which a layout has failed
    dropout: float | None = None  # of the two toys; their own is 0.1
    seed: int = 0  # of weights, tokens and dropout


def run(settings: Settings) -> int:
    """The command: a row a layout as it is known, the table, the exit code."""
    console = screen()
    model = settings.model
    if settings.dropout is not None:
        if model not in TOYS:
            raise ValueError(
                f"dropout={settings.dropout} is for the models {', '.join(TOYS)}; set it in your own factory"
            )
        model = replace(TOYS[model], dropout=settings.dropout)
    trial = Trial(
        precision=settings.precision, seed=settings.seed, steps=settings.steps, global_batch=settings.global_batch,
        micro_batches=settings.micro_batches, seq_length=settings.seq_length, timeout=settings.timeout,
    )  # fmt: skip
    with console.status("serial run") if console.is_terminal else nullcontext() as status:

        def on_row(row: Row) -> None:
            if status is not None:
                status.update(f"{row.name} {row.schedule} {row.verdict}")
            else:
                console.print(f"{row.name} {row.schedule}: {row.verdict}", highlight=False)

        report = verify(
            model, settings.plan, settings.layouts, world=settings.world,
            schedules=settings.schedule.split(","), trial=trial, on_row=on_row,
        )  # fmt: skip
    console.print(table(settings.model, report))
    for row in report.rows:
        if row.where:
            console.print(
                f"{row.name} {row.schedule} {row.verdict}: {row.where}", highlight=False, markup=False, soft_wrap=True
            )
    counts = ", ".join(f"{report.count(v)} {v}" for v in ("passed", "failed", "refused"))
    console.print(f"{counts}: parallel {'equals' if report.passed else 'DOES NOT equal'} serial", highlight=False)
    return 0 if report.passed else 1


def table(title: str, report: Report) -> Table:
    """One row a layout and schedule, with its errors against the serial run."""
    bound = f"bound {TOLERANCE[report.precision]:.0e}" + (", weights without" if report.precision == "fp32" else "")
    made = Table(title=f"{title}, {report.precision}, {bound}")
    for column in ("layout", "schedule", "loss", "gradients", "norm", "weights", "verdict"):
        made.add_column(column, no_wrap=True)
    colour = {"passed": "green", "failed": "red", "refused": "yellow"}
    for row in report.rows:
        errors = ["" if e is None else f"{e:.1e}" for e in (row.loss, row.grad, row.norm, row.weight)]
        made.add_row(row.name, row.schedule, *errors, Text(row.verdict, style=colour[row.verdict]))
    return made


class _Callable(ModuleType):
    """`megacore.verify` names this module and is to be called as a function too."""

    def __call__(self, *args, **kwargs) -> Report:
        return verify(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
