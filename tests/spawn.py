"""One pool of eight gloo workers for the whole test session."""

import pytest

from megacore.comm.workers import WorkerPool
from tests import bits


@pytest.fixture(scope="session")
def pool(request):
    with WorkerPool(8) as workers:
        if any(bits.chosen(request.config)):  # not else: it is a task of all ranks, which takes its time
            workers.run(bits.choose, *bits.chosen(request.config))
        yield workers
