"""One pool of eight gloo workers for the whole test session."""

import pytest

from megacore.comm.workers import WorkerPool


@pytest.fixture(scope="session")
def pool():
    with WorkerPool(8) as workers:
        yield workers
