"""python -m bench OP... | all  [--json FILE] [--rivals NAME...] [--rounds N] [--threads N...] [--quick]"""

import argparse
from importlib import import_module
from pathlib import Path

from bench import harness

BENCHES = ("linear_gelu", "cross_entropy", "dropout", "step")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description=harness.__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="+", choices=(*BENCHES, "all"), metavar="OP", help=", ".join((*BENCHES, "all")))
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write machine, versions, commit and all rows there"
    )
    parser.add_argument("--rivals", nargs="*", choices=harness.RIVALS, default=harness.RIVALS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20, help="how often each contestant runs (default 20)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N", help="threads of the operators")
    parser.add_argument("--quick", action="store_true", help="small shapes: does it run at all?")
    args = parser.parse_args(argv)
    args.ops = BENCHES if "all" in args.ops else tuple(dict.fromkeys(args.ops))
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    options = harness.Options(tuple(args.rivals), args.rounds, tuple(args.threads), args.quick)
    rows = []
    for op in args.ops:
        for row in import_module(f"bench.{op}").rows(options):
            print(row.line(), flush=True)
            rows.append(row)
    if args.json:
        harness.write(args.json, rows)


if __name__ == "__main__":
    main()
