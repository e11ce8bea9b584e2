"""Training jobs for tests: real processes, real signals and exit codes, without the seconds that importing torch costs.

`python -m tests.train.jobs` imports megacore once and forks the ranks of one job after another; `JobServer` drives it.
The ranks see the environment that torchrun would give them, and a store that outlives each of them, as torchrun's does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megacore.comm.store import loopback_store
from megacore.train.peers import process_state

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit codes (negative: signal) and all output, by rank, when each rank ended and the last."""

    codes: list[int]
    at: list[float]
    said: list[str]
    seconds: float

    @property
    def output(self) -> str:
        return "\n".join(f"--- rank {rank}, exit {self.codes[rank]}\n{text}" for rank, text in enumerate(self.said))


class JobServer:
    def __init__(self, folder: Path):
        self.folder, self.jobs = folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_ADDR2LINE": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.train.jobs"], cwd=ROOT, env=env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, world: int, *arguments: str, fault: str = "", limit: float = 60) -> Ended:
        """`megacore ARGUMENTS` on `world` ranks. Ranks that are not done within `limit` seconds, and a stopped one
        that is the last, are killed (code -9)."""
        self.jobs += 1
        folder = self.folder / f"job{self.jobs}"
        folder.mkdir()
        store = loopback_store() if world > 1 else None
        order = {"world": world, "arguments": arguments, "fault": fault, "limit": limit, "folder": str(folder)}
        self.server.stdin.write(json.dumps({**order, "port": store.port if store else 0}) + "\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        assert answer, "the job server ended"
        said = [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(world)]
        return Ended(**json.loads(answer), said=said)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait(timeout=30)


def _rank_main(order: dict, rank: int) -> int:
    from megacore import cli
    from tests.train.faults import install

    log = os.open(f"{order['folder']}/rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order["world"] > 1:
        place = {"RANK": rank, "WORLD_SIZE": order["world"], "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": order["world"]}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": order["port"], "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update({name: str(value) for name, value in {**place, **address}.items()})
    install(order["fault"], rank)
    return cli.main(order["arguments"])


def _fork(order: dict, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = _rank_main(order, rank)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], limit: float) -> tuple[list[int], list[float]]:
    codes: dict[int, int] = {}
    at: dict[int, float] = {}
    began = time.monotonic()
    until = began + limit
    while len(codes) < len(pids):
        for pid in (p for p in pids if p not in codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid], at[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - began
            elif time.monotonic() > until or (len(codes) == len(pids) - 1 and process_state(pid) == "T"):
                os.kill(pid, 9)
        time.sleep(0.02)
    return [codes[pid] for pid in pids], [at[pid] for pid in pids]


def serve() -> None:
    from megacore import cli  # noqa: F401
    from megacore.train import job  # noqa: F401  what every rank would import

    for line in sys.stdin:
        order, began = json.loads(line), time.monotonic()
        codes, at = _wait([_fork(order, rank) for rank in range(order["world"])], order["limit"])
        print(json.dumps({"codes": codes, "at": at, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    serve()
