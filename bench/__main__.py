"""python -m bench OP... | all    [--json FILE] [--plot FILE] [--rivals NAME...] [--rounds N] [--threads N...] [--quick]
python -m bench bounds        [--json FILE] [--threads N...]    what must hold, each with figure and verdict
python -m bench bounds --of FILE...                             the same, from rows that were kept
python -m bench render                                          the results in the tree -> docs/benchmarks.md, figures
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from bench import bounds, harness, report

BENCHES = (
    "linear",
    "linear_gelu",
    "linear_swiglu",
    "cross_entropy",
    "linear_cross_entropy",
    "vocab_parallel",
    "dropout",
    "step",
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    words = (*BENCHES, "all", "bounds", "render")
    parser = argparse.ArgumentParser(
        "python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="+", choices=words, metavar="OP", help=", ".join(words))
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep machine, versions, commit and all rows there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows of this run (.svg, .png, .pdf)")
    parser.add_argument(
        "--rivals", nargs="*", choices=harness.RIVALS, metavar="NAME", help="default: all; for bounds torch-eager"
    )
    parser.add_argument("--rounds", type=int, default=20, help="how often each contestant runs (default 20)")
    parser.add_argument(
        "--budget", type=float, metavar="S", help="seconds a row may take (default 60; for bounds 8): fewer rounds then"
    )
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="default 1; for bounds 1 2")
    parser.add_argument("--quick", action="store_true", help="small shapes: does it run at all?")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--impl", choices=("cpp", "triton", "reference"), help="of ours; default: what dispatch chooses"
    )
    parser.add_argument("--only", nargs="+", metavar="KEY=VALUE", help="only the cases that have all of these")
    parser.add_argument("--of", type=Path, nargs="+", metavar="FILE", help="bounds: judge the rows of these files")
    args = parser.parse_args(argv)
    alone = {"bounds", "render"} & set(args.ops)
    if alone and len(args.ops) > 1:
        parser.error(f"{alone.pop()} stands alone")
    if any("=" not in word for word in args.only or ()):
        parser.error("--only takes KEY=VALUE, such as dtype=fp32 dir=fwd+bwd")
    args.ops = BENCHES if "all" in args.ops else tuple(dict.fromkeys(args.ops))
    return args


def options_of(args: argparse.Namespace) -> harness.Options:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() and args.ops != ("bounds",) else "cpu")
    only = (dict(word.split("=", 1) for word in args.only),) if args.only else ()
    judging = args.ops == ("bounds",)
    rivals = args.rivals if args.rivals is not None else bounds.RIVALS if judging else harness.RIVALS
    budget = args.budget or (bounds.BUDGET if judging else 60.0)
    return harness.Options(
        tuple(rivals), args.rounds, tuple(args.threads or (1,)), args.quick, device, budget, only, args.impl
    )


def run(ops: Sequence[str], options: harness.Options, kept: Path | None = None) -> list[report.Row]:
    """All rows. The file is written after each: a run that is stopped has given what it measured."""
    rows = []
    for op in ops:
        for row in import_module(f"bench.{op}").rows(options):
            print(row.line(), flush=True)
            rows.append(row)
            if kept:
                report.write(kept, rows)
    return rows


def judge(args: argparse.Namespace) -> int:
    """The exit status: 1 if a bound does not hold."""
    threads, start = tuple(args.threads or (1, 2)), time.monotonic()
    if args.of:
        rows = [row for path in args.of for row in report.read(path)[1]]
    else:
        args.threads = threads
        options = replace(options_of(args), only=bounds.cases())
        rows = run(bounds.benches(), options, args.json)
    verdicts = bounds.judge(rows, threads)
    print(bounds.table(verdicts))
    print(f"{time.monotonic() - start:.0f} s")
    if args.json:
        report.write(args.json, rows, bounds=[v.as_json() for v in verdicts])
    return int(any(v.verdict == "FAIL" for v in verdicts))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.ops == ("render",):
        from bench import render

        print("\n".join(map(str, render.render())))
        return 0
    if args.ops == ("bounds",):
        return judge(args)
    rows = run(args.ops, options_of(args), args.json)
    if args.json:
        report.write(args.json, rows)
    if args.plot:
        from bench import plot

        plot.draw(rows, args.plot, " ".join(args.ops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
