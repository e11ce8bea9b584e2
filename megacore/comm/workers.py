"""A pool of worker processes that serves one distributed task after another: for `megacore verify`, tests and
benchmarks.

A job of its own is started by torchrun; a pool saves the seconds that starting eight Pythons costs when hundreds of
small tasks follow one another. Each task gets a default gloo group of its own, so that no state is left over.
"""

from __future__ import annotations

import multiprocessing as mp
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megacore.comm.store import loopback_store

GRACE = 3.0  # seconds in which other ranks may still report, once one has failed: the cause is often the second message


class WorkerError(RuntimeError):
    """A task failed on some rank; the message carries that rank's traceback."""


def _serve(conn: Connection, rank: int, threads: int, port: int) -> None:
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to answer; it ends us then
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            task, world, timeout, fn, args = pickle.loads(conn.recv_bytes())
        except EOFError:  # the parent has gone
            return
        try:
            if world > 1:
                _join(dist.PrefixStore(task, store), rank, world, timedelta(seconds=timeout))
            answer = (True, fn(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            payload = pickle.dumps(answer)
        except Exception:
            payload = pickle.dumps((False, f"the task's result cannot be pickled\n{traceback.format_exc()}"))
        conn.send_bytes(payload)  # before the group goes: tearing it down may block on a rank that failed
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(store: dist.Store, rank: int, world: int, timeout: timedelta) -> None:
    """A default gloo group of this task's own. Nobody goes on before all are in: a rank whose task ends at once would
    close its connections while others still make theirs."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    if store.add("joined", 1) == world:
        store.set("all joined", "")
    store.wait(["all joined"], timeout)


class WorkerPool:
    """`size` processes on this host, one thread each by default.

    `run(fn, *args, world=n)` calls `fn(*args)` on ranks 0..n-1 with torch.distributed initialised (gloo) and returns
    the results by rank. With n = 1 torch.distributed is not initialised. `fn` is a module-level function of an
    importable module; arguments and results are pickled. Raises WorkerError with the traceback of the first rank that
    failed, and TimeoutError; either leaves the pool restarted and usable.
    """

    def __init__(self, size: int, threads: int = 1):
        self.size, self.threads, self.tasks = size, threads, 0
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "megacore"])
        self._start()

    def _start(self) -> None:
        self._store = loopback_store()
        self._workers, self._conns = [], []
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            args = (theirs, rank, self.threads, self._store.port)
            worker = self._context.Process(target=_serve, args=args, daemon=True, name=f"megacore-worker-{rank}")
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._conns.append(ours)

    def run(self, fn: Callable, *args: Any, world: int | None = None, timeout: float = 120) -> list[Any]:
        world = self.size if world is None else world
        if not 1 <= world <= self.size:
            raise ValueError(f"world={world} does not fit a pool of {self.size}; ask for 1..{self.size}")
        self.tasks += 1
        payload = pickle.dumps((f"task{self.tasks}", world, timeout, fn, args))
        conns = self._conns[:world]
        for conn in conns:
            conn.send_bytes(payload)
        results, failures, deadline = {}, [], time.monotonic() + timeout
        while len(results) + len(failures) < world:
            waiting = [
                c for c in conns if conns.index(c) not in results and conns.index(c) not in [r for r, _ in failures]
            ]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                rank = conns.index(conn)
                ok, value = self._receive(conn, rank)
                if ok:
                    results[rank] = value
                else:
                    failures.append((rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not failures and len(results) == world:
            return [results[r] for r in range(world)]
        self.restart()
        if failures:
            rank, text = min(failures, key=lambda f: "Connection closed by peer" in f[1])  # consequences after causes
            raise WorkerError(f"rank {rank} of {world} failed in {fn.__name__}:\n{text}")
        late = [r for r in range(world) if r not in results]
        raise TimeoutError(
            f"{fn.__name__} on {world} ranks did not end within {timeout} s; still running: ranks {late}"
        )

    def _receive(self, conn: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(conn.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers[rank].join(1)
            hint = "" if self.tasks > 1 else "; a script that starts workers needs `if __name__ == '__main__':`"
            return False, f"the process of rank {rank} died with exit code {self._workers[rank].exitcode}{hint}"

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker, conn in zip(self._workers, self._conns, strict=True):
            worker.join()
            conn.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
