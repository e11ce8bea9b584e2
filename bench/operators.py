"""What every operator's benchmark does: verify all contestants, then time both directions beside the limit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from bench import harness, limits, memory
from bench.harness import Missing, Options
from bench.limits import Limit, Limits
from bench.poison import poisoned, spoil
from bench.report import Row, row
from megacore.ops.dispatch import SERVED, implementations, use

Operator = Callable[..., Tensor]
RIVAL_FACTOR = 8.0  # a rival may be less exact than torch; more than this and it computes something else
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Problem:
    """One case of one operator: what runs, on which inputs, and what cannot be undercut."""

    bench: str
    case: Mapping[str, object]  # without "dir"
    ours: Operator
    torchs: Operator  # the same in plain torch: in this dtype the yardstick, in fp64 the truth
    inputs: Sequence[Tensor]
    dy: Tensor
    limits: Mapping[str, Limit]  # direction -> physical limit; its directions are those that are timed
    rivals: Mapping[str, Callable[[], Operator]] = field(default_factory=dict)  # a function that makes it, or Missing
    forward_only: tuple[str, ...] = ()  # rivals without a gradient
    overwriting: tuple[str, ...] = ()  # contestants that write over the first input; new before each of their runs
    floors: Mapping[str, Mapping[str, Callable[[], object]]] = field(default_factory=dict)  # direction -> name -> run
    extra_of: int | None = None
    verify: Callable[[], None] | None = None  # instead of the comparison with fp64


def outcome(f: Operator, inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """[y, gradient of each input that wants one], for the upstream gradient dy."""
    y = f(*inputs)
    return [y, *torch.autograd.grad(y, [x for x in inputs if x.requires_grad], dy.to(y.dtype))]


def copies(inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Tensors of their own storage; those that want a gradient in `dtype`."""
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() if x.requires_grad else x for x in inputs]


class Judge:
    """Compares output and every gradient with fp64, in memory that was spoiled before."""

    def __init__(self, name: str, inputs: Sequence[Tensor], dy: Tensor, torchs: list[Tensor], exact: list[Tensor]):
        """`torchs` and `exact`: output and gradients of plain torch in the dtype of the inputs, and in fp64."""
        self.name, self.inputs, self.dy, self.torchs, self.exact = name, inputs, dy, torchs, exact

    @classmethod
    def of(cls, name: str, torchs: Operator, inputs: Sequence[Tensor], dy: Tensor) -> Judge:
        found = (outcome(torchs, copies(inputs, dtype), dy) for dtype in (None, torch.float64))
        return cls(name, inputs, dy, *found)

    def check(
        self,
        who: str,
        f: Operator,
        factor: float = 2.0,
        forward_only: bool = False,
        poisons: Sequence[bool] = (True, False),
    ) -> None:
        """AssertionError for a wrong answer. Once with everything that torch allocates poisoned, and once as it will be
        timed: the poison asks torch for deterministic forms, which may be other kernels."""
        for poison in poisons:
            inputs = copies(self.inputs)
            spoil(self.torchs)
            got = self._run(f, inputs, poison, forward_only)
            for i, (ours, theirs, true) in enumerate(zip(got, self.torchs, self.exact, strict=not forward_only)):
                part = f"gradient {i}" if i else "output"
                harness.check_as_good_as(f"{self.name} of {who}: {part}", ours, theirs, true, factor)

    def _run(self, f: Operator, inputs: Sequence[Tensor], poison: bool, forward_only: bool) -> list[Tensor]:
        def run() -> list[Tensor]:
            return [forward(f, inputs)] if forward_only else outcome(f, inputs, self.dy)

        if not poison:
            return run()
        with poisoned():
            return run()


def forward(f: Operator, inputs: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return f(*inputs)


def verify(name: str, ours: Operator, torchs: Operator, inputs: Sequence[Tensor], dy: Tensor) -> None:
    """Output and every gradient: error against fp64 at most twice that of plain torch in the same dtype."""
    Judge.of(name, torchs, inputs, dy).check("ours", ours)


def compiled(f: Operator) -> Operator:
    """torch.compile at its best: for this shape alone, and with no earlier case in its count of recompilations."""
    torch.compiler.reset()
    return torch.compile(f, dynamic=False)


def torch_rivals(torchs: Operator) -> dict[str, Callable[[], Operator]]:
    return {"torch-eager": lambda: torchs, "torch-compile": lambda: compiled(torchs)}


def of_package(package: str, module: str, name: str) -> Callable:
    """A function of a package that need not be installed."""
    try:
        version(package)
        return getattr(import_module(module), name)
    except PackageNotFoundError:
        raise Missing(f"{package} is not installed") from None
    except (ImportError, AttributeError) as error:
        raise Missing(f"{package} has no {module}.{name} that can be imported: {error}") from error


def ours_named(name: str) -> Operator:
    """megacore.ops.NAME; one sentence if this build does not have it yet."""
    import megacore.ops

    if not hasattr(megacore.ops, name):
        raise Missing(f"megacore.ops has no {name} in this build")
    return getattr(megacore.ops, name)


@cache
def say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def contestants(problem: Problem, options: Options) -> tuple[dict[str, Operator], dict[str, str]]:
    """(those that gave the right answer, rivals that cannot run -> why). A wrong answer of ours is an error."""
    named = " ".join((problem.bench, *map(str, problem.case.values())))
    judge = None
    if problem.verify:
        problem.verify()
    else:
        judge = Judge.of(named, problem.torchs, problem.inputs, problem.dy)
        judge.check("ours", problem.ours)
    kept, missing = {"ours": problem.ours}, {}
    for name, make in problem.rivals.items():
        if name not in options.rivals:
            continue
        try:
            kept[name] = make()
            if judge and kept[name] is not problem.torchs:  # which is the yardstick itself
                # deterministic forms are other code: to poison compiled code would be to compile it twice
                poisons = (False,) if name == "torch-compile" else (True, False)
                judge.check(name, kept[name], RIVAL_FACTOR, name in problem.forward_only, poisons)
        except Exception as error:  # a rival that breaks is a finding about it, not about us
            kept.pop(name, None)
            missing[name] = str(error).strip().partition("\n")[0] or type(error).__name__
            say_once(f"- {problem.bench}: {name}: {missing[name]}")
    return kept, missing


def measure(problem: Problem, options: Options) -> Iterator[Row]:
    """One row for each direction. Each contestant has its own inputs: an operator may overwrite them."""
    kept, missing = contestants(problem, options)
    own = {name: copies(problem.inputs) for name in kept}
    flush = harness.cache_flush(options.device)

    def between(name: str) -> None:
        if name in problem.overwriting and name in own:
            own[name][0].data.copy_(problem.inputs[0].data)
        flush()

    for direction, limit in problem.limits.items():
        case = {**problem.case, "dir": direction}
        if not options.wants(problem.bench, case):
            continue

        def run(name: str, direction: str = direction) -> list[Tensor]:
            if direction == "fwd":
                return [forward(kept[name], own[name])]
            return outcome(kept[name], own[name], problem.dy)

        names = [name for name in kept if direction == "fwd" or name not in problem.forward_only]
        once = _slow(names, run, options)
        names = [name for name in names if name not in once]
        floors = problem.floors.get(direction, {})
        started = {name: lambda name=name, run=run: run(name) for name in names} | floors
        started |= {"limit": limit.probe.run} if limit.probe else {}
        seconds = harness.clock(options.device)
        taken = harness.interleave(started, options.rounds, between, seconds_of=seconds, budget=options.budget)
        taken |= {"limit": limit.seconds(taken["limit"])} if limit.probe else {}
        extra = memory.peak_extra(lambda run=run: run("ours"), own["ours"], options.device)
        timed = harness.Timed(taken, missing)
        yield row(
            problem.bench, case, timed, limit.ms, tuple(floors), once, extra_bytes=extra, extra_of=problem.extra_of
        )


def _slow(names: Sequence[str], run: Callable[[str], object], options: Options) -> dict[str, float]:
    """Seconds of the rivals that the budget has no room for: timed once, as information, and left out of the rounds."""
    clock, most = harness.clock(options.device), options.budget / harness.FEWEST
    seconds = {name: clock(lambda name=name: run(name)) for name in names if name != "ours"}
    return {name: took for name, took in seconds.items() if took > most}


def sweep(
    bench: str,
    options: Options,
    cases: Iterable[Mapping[str, object]],
    make: Callable[[Mapping[str, object], Limits], Problem],
) -> Iterator[Row]:
    """The rows of all cases that are wanted, for each number of threads (on a GPU: once). An operator that this build
    lacks is one line on the screen."""
    cases = list(cases)
    if options.impl:
        able = implementations(bench, options.device) if bench in SERVED else []
        if options.impl not in able:
            say_once(f"- {bench}: no {options.impl} on {options.device}; there is {', '.join(able) or 'nothing else'}")
            return
        cases = [{**case, "impl": options.impl} for case in cases]
    for threads in options.threads if options.device == "cpu" else (None,):
        if threads:
            torch.set_num_threads(threads)
        found: dict[tuple[torch.dtype, ...], Limits] = {}
        for case in cases:
            case = {**case, **({"threads": threads} if threads else {"device": options.device})}
            if not options.wants(bench, case):
                continue
            torch.manual_seed(0)
            dtypes = ceiling_dtypes(DTYPES[str(case["dtype"])], options.device)
            if dtypes not in found:
                found[dtypes] = limits.measure(options.device, dtypes, options.quick)
            try:
                with use(options.impl, bench, options.device) if options.impl else nullcontext():
                    yield from measure(make(case, found[dtypes]), options)
            except Missing as reason:
                say_once(f"- {bench}: {reason}")


def ceiling_dtypes(dtype: torch.dtype, device: str) -> tuple[torch.dtype, ...]:
    """Products whose best rate bounds an operator of `dtype`. A CPU may be faster in fp32 than in 16 bits, and an
    operator free to widen."""
    return (dtype, torch.float32) if device == "cpu" and dtype.itemsize == 2 else (dtype,)


def dims(case: Mapping[str, object]) -> list[int]:
    return [int(n) for n in str(case["shape"]).split("x")]
