"""Peak memory of one call beyond its inputs, its outputs and its gradients.

On the CPU two measures, of which the larger counts. What torch's allocator gave and took back, event by event, is exact
but blind to memory that an operator takes from elsewhere. The process's high-water mark of resident pages sees that
memory too, but only pages that were touched, and not those that malloc had kept from before (so they are given back
first). What malloc may have kept of blocks that torch freed during the call is not held against the operator: it is
taken off. On a GPU: the allocator's own peak.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
NOISE = 1 << 20  # resident pages are counted in batches per thread: below this the second measure says nothing
LARGE = 32 << 20  # malloc maps larger blocks (glibc's largest threshold) and gives them back at once
KEPT = 64 << 20  # and trims its heap beyond twice that


def peak_extra(run: Callable[[], Sequence[Tensor]], inputs: Iterable[Tensor], device: str = "cpu") -> int:
    """Bytes. `run` returns outputs and gradients; one that lies in the memory of an input costs nothing."""
    inputs = list(inputs)
    run()  # what is set up once is no cost of a call
    if device == "cuda":
        return _cuda(run, inputs)
    allocated, freed = _allocated(run, inputs)
    resident = min(_resident(run, inputs) for _ in range(2)) - min(freed, KEPT)
    return max(allocated, resident if resident > NOISE else 0)


def _results(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> int:
    """Bytes of the storages of `results` that are no storage of an input."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results}
    known = {x.untyped_storage().data_ptr() for x in inputs}
    return sum(size for at, size in storages.items() if at not in known)


def _allocated(run: Callable[[], Sequence[Tensor]], inputs: list[Tensor]) -> tuple[int, int]:
    """(peak beyond results, bytes of blocks freed that malloc may have kept)"""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        results = run()
    events = [(e.start_ns(), e.nbytes()) for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for _, size in sorted(events, key=lambda event: event[0]):  # stable: an event of the same nanosecond keeps its turn
        now += size
        top = max(top, now)
    return max(0, top - _results(results, inputs)), sum(-size for _, size in events if -LARGE < size < 0)


def _resident(run: Callable[[], Sequence[Tensor]], inputs: list[Tensor]) -> int:
    """0 where the system keeps no high-water mark that can be reset (Linux does)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
    except (OSError, AttributeError):
        return 0
    before = _status("VmRSS")
    results = run()
    return max(0, _status("VmHWM") - before - _results(results, inputs))


def _status(key: str) -> int:
    return 1024 * int(re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.M)[1])


def _cuda(run: Callable[[], Sequence[Tensor]], inputs: list[Tensor]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - _results(results, inputs))
