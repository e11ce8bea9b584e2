"""One pool of eight gloo workers for the whole test session."""

import pytest

from megacore.comm.workers import WorkerPool
from tests import bits


@pytest.fixture(scope="session")
def pool(request):
    with WorkerPool(8) as workers:
        workers.run(bits.choose, *bits.chosen(request.config))
        yield workers
