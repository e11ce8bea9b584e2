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


@pytest.mark.parametrize("what", ["linear", "linear_gradients", "linear_layouts", "weight_grads"])
def test_the_linear_family_served_by_triton(what):
    run_in_the_interpreter(ROOT / "tests" / "ops" / f"test_{what}.py", select="triton")
