"""SIGKILL of one process of a job at one moment: who is left, for how long, and what was said.

    python -m tests.train.kill_trial FOLDER [TRIALS]      a table of TRIALS kills, from start-up to the last report

A job is `megacore train --nproc 2`; its processes are the launcher, torchrun and two ranks, told by their command
lines, which carry the run's folder."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megacore.train.data.prepare import prepare

ROOT = Path(__file__).parents[2]
VICTIMS = ("launcher", "torchrun", "rank 0", "rank 1")
TOML = """
[model]
layers = 2
hidden = 16
heads = 2
seq_length = 8
[parallel]
tp = 2
[data]
dir = "{data}"
global_batch = 4
micro_batch = 2
[optim]
warmup_steps = 2
[run]
steps = {steps}
save_every = 25
log_every = 10
peak_tflops = 1.0
sample_tokens = 64
tensorboard = false
"""


@dataclass(frozen=True)
class Row:
    """What one kill did. `gone_s`: until no process of the job was left."""

    victim: str
    at_s: float  # after the victim appeared
    gone_s: float
    code: int
    said: str
    left: tuple[str, ...]
    whole: bool  # the job had ended by itself before its moment came

    @property
    def named(self) -> int:
        """How often the launcher named the victim."""
        return len(re.findall(rf"megacore train: {self.victim} was ended by signal 9 \(SIGKILL\)", self.said))

    @property
    def faults(self) -> list[str]:
        """What must not be, of a job that was killed."""
        wrong = []
        if self.gone_s > 5:
            wrong.append(f"a process lived for {self.gone_s:.1f} s")
        if self.code == 0:
            wrong.append("exit code 0")
        if self.left:
            wrong.append(f"left behind: {self.left}")
        if self.victim != "launcher" and self.named != 1:
            wrong.append(f"the launcher named the victim {self.named} times")
        named = set(re.findall(r"rank (\d) \(pid \d+ on [^)]*\) (?:has gone|is |runs)", self.said))
        if named - {self.victim[-1]}:
            wrong.append(f"ranks named {named}")
        if "Traceback" in self.said:
            wrong.append("a traceback")
        return wrong


def corpus(folder: Path) -> Path:
    draw = random.Random(0)
    (folder / "text").mkdir(parents=True)
    for number in range(12):
        (folder / f"text/{number}.txt").write_text(" ".join(draw.choice(["red", "green", "blue"]) for _ in range(80)))
    prepare([folder / "text"], folder / "data", vocab_size=270, valid_fraction=0.2)
    return folder / "data"


def started(folder: Path, data: Path, steps: int = 200) -> subprocess.Popen:
    config = folder / "run.toml"
    config.write_text(TOML.format(data=data, steps=steps))
    (folder / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "megacore", "train", str(config), "--nproc", "2", f"--run.out={folder / 'run'}"],
            cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, env=env,
        )  # fmt: skip


def processes(folder: Path) -> dict[str, int]:
    """The living processes of the job by name; between fork and exec a process still has its parent's command line."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if f"--run.out={folder / 'run'}".encode() not in words:
                continue
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (entry / "environ").read_bytes())
        except OSError:
            continue
        name = "torchrun" if b"megacore.train.torchrun" in words else f"rank {int(rank[1])}" if rank else "launcher"
        while name in found:
            name += " (forked)"
        found[name] = int(entry.name)
    return found


def trial(
    folder: Path, data: Path, victim: str, at_s: float, steps: int = 200, number: int = signal.SIGKILL, whom: str = ""
) -> Row:
    """Start a job, send `number` to the victim (or to `whom`) `at_s` seconds after the victim appeared, and watch what
    becomes of the rest."""
    folder.mkdir(parents=True)
    pids: set[int] = set()
    job = started(folder, data, steps)
    try:
        while victim not in (here := processes(folder)) and job.poll() is None:
            time.sleep(0.01)
        pid = here.get(victim, 0)
        until = time.monotonic() + at_s
        pids.update(here.values())
        while time.monotonic() < until and job.poll() is None:
            time.sleep(0.005)
        here = processes(folder)
        pids.update(here.values())
        whole = job.poll() is not None or victim not in here
        if not whole:
            os.kill(processes(folder)[whom] if whom else pid, number)
        began = time.monotonic()
        while (processes(folder) or job.poll() is None) and time.monotonic() < began + 60:
            time.sleep(0.02)
        gone = time.monotonic() - began
    finally:
        for pid in processes(folder).values():
            os.kill(pid, signal.SIGKILL)
    code, said = job.wait(), (folder / "said").read_text(errors="replace")
    return Row(victim, at_s, gone, code, said, _leftovers(folder, pids), whole)


def _leftovers(folder: Path, pids: set[int]) -> tuple[str, ...]:
    """What lies in the job's temporary folder, and shared memory named after one of its processes."""
    shared = Path("/dev/shm")
    names = [*shared.iterdir()] if shared.is_dir() else []
    mine = [path for path in names if pids & {int(number) for number in re.findall(r"\d+", path.name)}]
    return tuple(sorted(str(path) for path in [*mine, *(folder / "tmp").iterdir()]))


def main(folder: Path, trials: int) -> int:
    data, draw, bad = corpus(folder), random.Random(7), 0
    began = time.monotonic()
    started_at = folder / "undisturbed"
    started_at.mkdir()
    job = started(started_at, data)
    job.wait()
    length = time.monotonic() - began
    print(f"undisturbed: {length:.1f} s, exit {job.returncode}")
    print("| victim | after (s) | all gone (s) | code | faults | said |")
    for number in range(trials):
        victim = VICTIMS[number % len(VICTIMS)]
        at = length * (number + draw.random()) / trials * (0.95 if victim == "launcher" else 0.65)
        row = trial(folder / f"trial{number}", data, victim, at)
        faults = [] if row.whole else row.faults
        bad += bool(faults)
        tail = " / ".join(row.said.splitlines()[-2:])[-150:]
        what = "ended before" if row.whole else "; ".join(faults) or "-"
        print(f"| {victim} | {row.at_s:.2f} | {row.gone_s:.2f} | {row.code} | {what} | {tail} |", flush=True)
    print(f"{bad} of {trials} with a fault")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 30))
