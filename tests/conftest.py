from tests import bits
from tests.interpreter import mended  # noqa: F401  where Triton's interpreter runs, its bf16 as hardware has it
from tests.spawn import pool  # noqa: F401  the session's workers

pytest_addoption = bits.pytest_addoption


def pytest_runtest_setup(item):  # before each: tests that choose a path themselves leave the best one behind
    bits.choose(*bits.chosen(item.config))


def pytest_collection_modifyitems(items):
    bits.mark(items)
