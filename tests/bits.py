"""Which tests compare bits, and the instruction sets of ours that they run on.

A test compares bits if it, or a function of the tests that it calls, hands to workers or takes as a fixture, uses
torch.equal or a tolerance of 0. Such a test may hold on one CPU and fail on the next, where a library orders its sums
otherwise: they are marked `bits`, and tools/bits.py runs them with the libraries held to other instruction sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, ModuleType

import pytest

from megacore import _C

NAMES = {"equal", "same_bits"}  # torch.equal and what tests call their own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-path", default="", help="C++ kernels on this instruction set: avx512, avx2, portable")
    parser.addoption("--own-product", action="store_true", help="large fp32 products by ours, as on AMD with AVX-512")


def chosen(config: pytest.Config) -> tuple[str, bool]:
    return config.getoption("--cpu-path"), config.getoption("--own-product")


def choose(path: str, own: bool) -> None:
    """In this process. UsageError where the machine cannot."""
    if not _C.set_cpu_path(path):
        raise pytest.UsageError(f"--cpu-path={path}: this machine has no such instructions")
    if own:
        _C.set_own_product(True)


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if compares_bits(getattr(item, "function", None)):
            item.add_marker("bits")


def compares_bits(function: Callable | None) -> bool:
    return any(NAMES & set(code.co_names) or _zero_tolerance(code) for code in _codes(function, set()))


def _zero_tolerance(code: CodeType) -> bool:
    words = {word for constant in code.co_consts if isinstance(constant, tuple) for word in constant}
    some = any(isinstance(constant, float) and 0 < constant < 1 for constant in code.co_consts)
    return "assert_close" in code.co_names and {"rtol", "atol"} <= words and 0 in code.co_consts and not some


def _codes(found: object, seen: set[CodeType]) -> Iterator[CodeType]:
    """The code of a function (or of a class's), of those defined in it, and of what it names of the tests."""
    if isinstance(found, type):
        for method in vars(found).values():
            yield from _codes(getattr(method, "fget", method), seen)
        return
    function = getattr(found, "__wrapped__", getattr(found, "__func__", found))
    code, spaces = getattr(function, "__code__", None), [getattr(function, "__globals__", {})]
    waiting = [code] if isinstance(code, CodeType) and code not in seen else []
    while waiting:
        code = waiting.pop()
        seen.add(code)
        yield code
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
        named = [space[name] for name in code.co_names for space in spaces if name in space]
        spaces += [vars(m) for m in named if isinstance(m, ModuleType) and m.__name__.startswith("tests.")]
        for other in (space[name] for name in code.co_names for space in spaces if name in space):
            where = getattr(other, "__module__", None) or ""
            if where.startswith("tests.") and where != "tests.oracle":  # that one looks where infinities are
                yield from _codes(other, seen)
