"""What must hold on a CPU, as data: each bound names the rows it reads, the figure it takes from them and the number
that the figure must reach. `python -m bench bounds` prints all of them with figure and verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from bench.report import Row

PASS, FAIL, UNKNOWN = "PASS", "FAIL", "not measured"


@dataclass(frozen=True)
class Bound:
    about: str  # operator and shape, as a reader knows them
    bench: str
    case: Mapping[str, object]  # the rows that have all of these
    figure: str  # what is compared: a key of FIGURES, and after a colon whom with
    bound: float
    aim: float | None = None  # hoped for, not required
    threads: tuple[int, ...] | None = None  # None: all that are asked for

    @property
    def at_most(self) -> bool:
        return FIGURES[self.figure.split(":")[0]][1]

    def wanted(self) -> str:
        kind, _, name = self.figure.partition(":")
        text = FIGURES[kind][2].format(name=name, bound=f"{self.bound:.3g}", share=f"{100 * self.bound:.3g}")
        return text + (f" (aim {100 * self.aim:.3g} %)" if self.aim else "")


def _share(row: Row, _: str) -> float | None:
    return row.extra_bytes / row.extra_of if row.extra_bytes is not None and row.extra_of else None


# figure -> (from a row; whether smaller is better; what must hold)
FIGURES = {
    "share": (lambda row, _: row.reached, False, ">= {share} % of the limit"),
    "extra": (_share, True, "extra memory <= {share} % of the logits"),
    "collectives": (lambda row, _: row.collectives, True, "exactly {bound} collective"),
}

TANH = {"act": "tanh", "dtype": "fp32", "shape": "2048x768x3072"}
BF16 = {"act": "tanh", "dtype": "bf16", "shape": "2048x768x3072", "isa": "avx2", "dir": "fwd+bwd"}
LOSS = {"dtype": "fp32", "shape": "1024x50304", "dir": "fwd+bwd"}
GIVEN, KEPT = LOSS | {"inplace": True}, LOSS | {"inplace": False}
HEAD = {"dtype": "fp32", "shape": "1024x768x50304", "dir": "fwd+bwd"}

_GELU = "linear_gelu tanh fp32 [2048,768]x[3072,768]"
_CE = "cross_entropy fp32 [1024,50304] fwd+bwd"
_VP = "vocabulary-parallel cross_entropy, 2 ranks"
_LCE = "linear_cross_entropy fp32 [1024,768]x[50304,768] fwd+bwd"

# Shares of the limit that the same rounds measured (limits.py), the same for every CPU, with the reason of each:
# - a product with a pass: the pass reads and writes 3 elements for 2 K FLOP, some 6 % (AVX2) to 20 % (AVX-512) of the
#   product at K = 768; the library's product itself is at 90 % or more of the fastest one tried.
# - 16 bits without their arithmetic: operands are widened once for each panel, beside products in fp32.
# - the loss: two readings and one writing, with two exp an element. Those take as long as memory does where memory is
#   fast for the vectors (AVX2, or a cache that holds the logits): half. A new tensor pays for its pages besides, which
#   a virtual machine may take as long for as for all else.
# - head and loss: three products of an eighth of the tokens at a time, so that no more than 15 % of the logits exist.
#   Each chunk reads the weight twice and reads and writes its gradient: 16 + 16 passes over 154 MB, some 5 GB beside
#   237 GFLOP. Where two threads share one memory that is a third of the time (65 % measured on an Intel CPU, where
#   plain torch with all logits reaches 64 %).
BOUNDS = (
    Bound(f"{_GELU} fwd", "linear_gelu", TANH | {"dir": "fwd"}, "share", 0.70),
    Bound(f"{_GELU} fwd+bwd", "linear_gelu", TANH | {"dir": "fwd+bwd"}, "share", 0.70),
    Bound("linear_gelu bf16 without bf16 arithmetic fwd+bwd", "linear_gelu", BF16, "share", 0.55),
    Bound(f"{_CE}, logits given up", "cross_entropy", GIVEN, "share", 0.40),
    Bound(f"{_CE}, logits given up", "cross_entropy", GIVEN, "extra", 0.03),
    Bound(f"{_CE}, logits kept", "cross_entropy", KEPT, "share", 0.25),
    Bound(_VP, "vocab_parallel", GIVEN | {"tp": 2}, "share", 0.30, threads=(1,)),
    Bound(_VP, "vocab_parallel", GIVEN | {"tp": 2}, "collectives", 1, threads=(1,)),
    Bound(_LCE, "linear_cross_entropy", HEAD, "extra", 0.15),
    Bound(_LCE, "linear_cross_entropy", HEAD, "share", 0.60, aim=0.85),
)
RIVALS = ("torch-eager",)  # timed beside, as information; compiling takes longer than all else
BUDGET = 8.0  # seconds a row: all of it ends within six minutes on two cores


@dataclass(frozen=True)
class Verdict:
    bound: Bound
    threads: int
    figure: float | None
    why: str = field(default="", compare=False)  # there is no figure

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return UNKNOWN
        if self.bound.figure == "collectives":
            holds = self.figure == self.bound.bound
        elif self.bound.at_most:
            holds = self.figure <= self.bound.bound
        else:
            holds = self.figure >= self.bound.bound
        return PASS if holds else FAIL

    def shown(self) -> str:
        if self.figure is None:
            return self.why or "-"
        kind = self.bound.figure.split(":")[0]
        return f"{self.figure:g}" if kind == "collectives" else f"{100 * self.figure:.1f} %"

    def words(self) -> str:
        aim = self.bound.aim
        if aim is None or self.figure is None:
            return self.verdict
        reached = self.figure <= aim if self.bound.at_most else self.figure >= aim
        return f"{self.verdict}, aim {'reached' if reached else 'missed'}"

    def as_json(self) -> dict:
        bound = asdict(self.bound) | {"wanted": self.bound.wanted()}
        return bound | {"threads": self.threads, "figure": self.figure, "why": self.why, "verdict": self.verdict}


def benches() -> tuple[str, ...]:
    return tuple(dict.fromkeys(bound.bench for bound in BOUNDS))


def cases() -> tuple[dict[str, object], ...]:
    """What must be run, as filters of harness.Options.only. Cases that say no `isa` have none."""
    return tuple({"bench": bound.bench, **bound.case} for bound in BOUNDS)


def judge(rows: Sequence[Row], threads: Sequence[int], bounds: Sequence[Bound] = BOUNDS) -> list[Verdict]:
    """A verdict for each bound and number of threads; of several rows of one case the last counts."""
    return [_verdict(bound, rows, n) for bound in bounds for n in bound.threads or threads]


def _verdict(bound: Bound, rows: Sequence[Row], threads: int) -> Verdict:
    wanted = {**bound.case, "threads": threads}
    fits = [
        r
        for r in rows
        if r.bench == bound.bench
        and all(r.case.get(k) == v for k, v in wanted.items())
        and ("isa" in r.case) == ("isa" in wanted)
    ]
    if not fits:
        return Verdict(bound, threads, None, "no such row")
    kind, _, name = bound.figure.partition(":")
    figure = FIGURES[kind][0](fits[-1], name)
    return Verdict(bound, threads, figure, "" if figure is not None else fits[-1].missing.get(name, "not in the row"))


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: reads as well on a screen."""
    lines = ["| operator, shape | threads | bound | figure | verdict |", "|---|---|---|---|---|"]
    for v in verdicts:
        cells = (v.bound.about, v.threads, v.bound.wanted(), v.shown(), v.words())
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
