import signal

from tests import bits
from tests.interpreter import mended  # noqa: F401  where Triton's interpreter runs, its bf16 as hardware has it
from tests.spawn import pool  # noqa: F401  the session's workers

pytest_addoption = bits.pytest_addoption


def pytest_runtest_setup(item):  # before each: tests that choose a path themselves leave the best one behind
    bits.choose(*bits.chosen(item.config))


def pytest_collection_modifyitems(items):
    bits.mark(items)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what runs in its background so, and the processes that tests send a Ctrl-C to
    # would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
