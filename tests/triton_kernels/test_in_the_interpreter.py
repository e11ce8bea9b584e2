"""Every kernel test again, in Triton's interpreter: the tests beside this file, and the operators' own for Triton."""

import importlib.util
from pathlib import Path

import pytest

from tests.interpreter import INTERPRETING, ROOT, run_in_the_interpreter

pytestmark = [
    pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]


def test_the_kernels():
    run_in_the_interpreter(Path(__file__).parent, select="triton")


def test_dropout_served_by_triton():
    run_in_the_interpreter(ROOT / "tests" / "ops" / "test_dropout.py", select="triton")


def test_the_linear_family_served_by_triton():
    files = [*(ROOT / "tests" / "ops").glob("test_linear*.py"), ROOT / "tests" / "ops" / "test_weight_grads.py"]
    run_in_the_interpreter(*files, select="triton")
