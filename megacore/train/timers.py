"""Where the time of a run goes: seconds by part, and the sums that the closing report shows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Parts in the order of the report. `compute` holds forward, backward and optimizer arithmetic; `pipeline` the wait for
# another stage's tensors; `tensor` and `data_parallel` the collectives of those groups, waiting for peers included.
PARTS = ("compute", "tensor", "pipeline", "data_parallel", "data", "checkpoint", "evaluation", "other")


class Timers:
    """Seconds by part. Parts must not nest: a second is counted once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.started = time.perf_counter()

    def begin(self) -> None:
        """The clock starts here: what was measured before (a checkpoint that was loaded) counts, the rest does not."""
        self.started = time.perf_counter() - sum(self.seconds.values())

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began

    def add(self, seconds: Mapping[str, float]) -> None:
        for part, spent in seconds.items():
            self.seconds[part] += spent

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def split(self) -> dict[str, float]:
        """Seconds of every part since the start; `other` is what no part measured."""
        known = {part: self.seconds.get(part, 0.0) for part in PARTS if part != "other"}
        unlisted = sum(v for k, v in self.seconds.items() if k not in known)
        known["other"] = max(0.0, self.elapsed - sum(known.values()) - unlisted) + unlisted
        return known
