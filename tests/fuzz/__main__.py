"""`make fuzz`, or  python -m tests.fuzz --inputs 10500 --seed 0 [--only index,toml] [--jobs 2].

Input number n of a target is a function of (seed, target, n): a failure names all three, and `--only TARGET --first N
--inputs 1` makes it again. Each job is a process of its own with a limit on its memory, so that a huge allocation is an
error and not the end of the machine, and each input has a limit in time.
"""

import argparse
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

SHARES = {
    "index": 26, "sidecar": 14, "tokenizer": 8, "toml": 20, "overrides": 5, "jsonl": 10, "metrics": 7, "shards": 5,
    "manifest": 2, "sealed": 3,
}  # fmt: skip
SECONDS = 20  # an input: a loaded machine stops a process for seconds
FAILED = 10  # exit code of a job that found something: 1 is a traceback of its own
MEMORY = 2 << 30  # bytes beyond what the process has when it begins


def made(name: str, folder: Path):
    from . import stored, targets

    kinds = {
        "index": targets.Index, "sidecar": targets.Sidecar, "tokenizer": targets.TokenizerFile, "toml": targets.Toml,
        "overrides": targets.CommandLine, "jsonl": targets.JsonLines, "metrics": targets.Metrics,
        "shards": stored.Shards, "manifest": stored.Manifest,
        "sealed": stored.Sealed,
    }  # fmt: skip
    folder.mkdir()
    return kinds[name](folder)


def too_long(*_: object) -> None:
    raise AssertionError(f"more than {SECONDS} s")


def job(names: list[str], inputs: int, seed: int, first: int, step: int, root: Path) -> int:
    """Every step-th input of each target from `first` on; prints one line a target. Returns the number of failures."""
    signal.signal(signal.SIGALRM, too_long)
    ready = {name: made(name, root / name) for name in names}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    total, failures = sum(SHARES[n] for n in names), 0
    for name, target in ready.items():
        counts: Counter[str] = Counter()
        for number in range(first, first + max(1, inputs * SHARES[name] // total), step):
            (root / "current").write_text(f"{name} {number}")
            signal.alarm(SECONDS)
            try:
                counts[target.try_one(random.Random(f"{seed} {name} {number}"))] += 1
            except Exception as error:
                counts["failed"] += 1
                failures += 1
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = " ".join(str(error).split())[:300]
                place = f"{type(error).__name__} at {where.name}:{where.lineno}"
                print(f"FAILED seed {seed} {name} {number}: {place}: {what!a}", flush=True)
            finally:
                signal.alarm(0)
        print(f"counts {name} " + " ".join(f"{k}={v}" for k, v in sorted(counts.items())), flush=True)
    return failures


def run(inputs: int, seed: int = 0, jobs: int = 2, names: list[str] | None = None, first: int = 0) -> tuple[dict, str]:
    """({target: counts}, what went wrong) of all jobs together."""
    names = names or list(SHARES)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for j in range(jobs):
            root = Path(folder) / str(j)
            root.mkdir()
            words = [
                "--inputs",
                inputs,
                "--seed",
                seed,
                "--only",
                ",".join(names),
                "--first",
                first + j,
                "--step",
                jobs,
            ]
            command = [sys.executable, "-m", "tests.fuzz", "--job", root, *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            started.append((root, subprocess.Popen(list(map(str, command)), cwd=Path(__file__).parents[2], **pipes)))
        counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        wrong = []
        for root, process in started:
            said, _ = process.communicate()
            for line in said.splitlines():
                if line.startswith("counts "):
                    _, name, *pairs = line.split()
                    counts[name].update({k: int(v) for k, v in (p.split("=") for p in pairs)})
                elif line.startswith("FAILED "):
                    wrong.append(line)
            if process.returncode not in (0, FAILED):
                at = (root / "current").read_text() if (root / "current").exists() else "the start"
                wrong.append(f"FAILED seed {seed} {at}: the process ended with {process.returncode}: {said[-1500:]}")
    return counts, "\n".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=10_500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default=",".join(SHARES))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--job", type=Path)
    given = parser.parse_args()
    names = given.only.split(",")
    if given.job:
        return FAILED * bool(job(names, given.inputs, given.seed, given.first, given.step, given.job))
    began = time.monotonic()
    counts, wrong = run(given.inputs, given.seed, given.jobs, names, given.first)
    for name, found in counts.items():
        print(f"{name:10} {sum(found.values()):6}  " + "  ".join(f"{k} {v}" for k, v in sorted(found.items())))
    total = sum(sum(found.values()) for found in counts.values())
    print(f"{total} inputs in {time.monotonic() - began:.0f} s, seed {given.seed}: {wrong.count('FAILED ')} failed")
    if wrong:
        print(wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
