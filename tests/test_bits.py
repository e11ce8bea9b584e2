"""MB-60: tests that compare bits are found by what they do, and run with the libraries held to other CPUs' branches."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import bits, oracle
from tests.pipeline import runs
from tools import bits as matrix

ROOT = Path(__file__).parents[1]


def helper(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Checker:
    def check(self, a):
        assert helper(a, a)


def by_class():
    Checker().check([])


def handed_to_workers(pool):
    pool.run(helper, [], [])


def exactly():
    torch.testing.assert_close(1, 1, rtol=0, atol=0)


def by_module():
    return runs.differences


def nearly(a):
    torch.testing.assert_close(a, a, rtol=1e-6, atol=0)
    oracle.assert_as_good_as_torch(a, a, a)


@pytest.mark.parametrize("test", [helper, by_class, handed_to_workers, exactly, by_module], ids=lambda f: f.__name__)
def test_what_compares_bits_is_found(test):
    assert bits.compares_bits(test)


@pytest.mark.parametrize("test", [nearly, None], ids=str)
def test_what_does_not_is_not(test):
    assert not bits.compares_bits(test)


def test_this_is_marked(request):
    assert torch.equal(torch.ones(1), torch.ones(1)) and request.node.get_closest_marker("bits")


def test_the_matrix_runs_and_says_what_it_ran(tmp_path):
    """Its variables reach the libraries; a red row is an exit status."""
    trial = tmp_path / "test_trial.py"
    text = """import torch
from megacore import _C
def test_branch():
    assert torch.equal(torch.ones(1), torch.ones(1))
    assert (torch.backends.cpu.get_cpu_capability(), _C.cpu_path()) == ("DEFAULT", "portable")
"""
    trial.write_text(text)
    found = []
    for row in ("portable", "portable-cbwr", "nothing"):
        command = [
            sys.executable,
            "tools/bits.py",
            row,
            "--",
            "-p",
            "tests.conftest",
            "-c",
            "pyproject.toml",
            str(trial),
        ]
        found.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200))
    assert found[0].returncode == 0 and "portable      : 1 passed" in found[0].stdout, found[0]
    assert found[1].returncode == 1 and "RED, 1 failed" in found[1].stdout, found[1]
    assert found[2].returncode == 2 and "choose from avx2" in found[2].stderr


def test_rows_differ():
    assert len({str(row) for row in matrix.ROWS.values()}) == len(matrix.ROWS) >= 4
