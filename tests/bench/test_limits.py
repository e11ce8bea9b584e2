"""The limit is the fastest of several ways, and is measured in the rounds of the contestants."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import harness, limits, operators, report

BF16 = torch.bfloat16


def test_the_limit_is_the_slower_of_arithmetic_and_traffic():
    product, sweep = (limits.Probe(name, lambda: None, 1.0) for name in ("product", "sweep"))
    found = limits.Limits(100e9, 20e9, product, sweep)
    assert found.least(flops=1e9).ms == pytest.approx(10.0) and found.least(flops=1e9).probe is product
    assert found.least(flops=1e9, nbytes=1e9).ms == pytest.approx(50.0)
    assert found.least(flops=1e9, nbytes=1e9).probe is sweep


def test_the_fastest_way_counts():
    def way(name, seconds):
        return limits.Probe(name, lambda: torch.cpu.synchronize() or __import__("time").sleep(seconds), 100.0)

    top = limits.best([way("slow", 0.04), way("fast", 0.01), way("middle", 0.02)], "cpu")
    assert top.name == "fast" and 2500 < top.rate <= 10000


def test_limits_are_measured_on_this_machine():
    found = limits.measure(quick=True, dtypes=(torch.float32, BF16))
    assert found.flops > 1e6 and found.bandwidth > 1e6
    assert found.product.rate == found.flops and found.sweep.rate == found.bandwidth


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_every_way_multiplies(dtype):
    """A probe that computes something else, or nothing, would be a limit of nothing."""
    a, w = torch.randn(33, 40).to(dtype), torch.randn(65, 40).to(dtype)
    ways = list(limits.libraries(dtype, "cpu"))
    for way in ways:
        out = torch.full((33, 65), torch.nan, dtype=dtype)
        got = way(a, w, out)
        got = (out if got is None else got).double()
        torch.testing.assert_close(got, a.double() @ w.double().t(), rtol=0.02, atol=0.1)
    assert len({way.__name__ for way in ways}) == len(ways)


def test_sweeps_go_through_memory_that_was_written():
    names = [probe.name for probe in limits.sweeps(1 << 20, "cpu")]
    assert "copy" in names and "in place" in names and len(set(names)) == len(names)


def test_the_share_is_the_median_over_rounds():
    """In a round that the machine slowed, it slowed the limit too."""
    limit = limits.Limit(1.0, work=50.0, probe=limits.Probe("p", lambda: None, 100.0))
    seconds = {"ours": [0.1, 1.0, 0.1], "limit": limit.seconds([0.16, 1.6, 0.9])}
    row = report.row("linear", {"dir": "fwd"}, harness.Timed(seconds), limit.ms)
    assert row.reached == pytest.approx(0.8) and row.limit_ms == pytest.approx(450.0) and not row.rivals
    assert "(80 % reached)" in row.line()


def test_the_probe_runs_once_a_round_beside_the_others():
    ran = []
    probe = limits.Probe("p", lambda: ran.append(1) or torch.ones(1000, 1000).sum(), 1.0)
    inputs = [torch.randn(8, 16).requires_grad_(), torch.randn(16, 4).requires_grad_()]
    given = operators.Problem(
        "linear", {"shape": "8x16x4"}, torch.matmul, torch.matmul, inputs, torch.randn(8, 4),
        {"fwd+bwd": limits.Limit(1.0, 1.0, probe)},
    )  # fmt: skip
    (row,) = operators.measure(given, harness.Options(rounds=4))
    assert len(ran) == 4 + 2 and row.ratios["limit"] > 0 and set(row.ratios) == {"limit"}


def test_nothing_but_rows_is_printed():
    """Torch's profiler, which measures memory, told of its start and stop."""
    command = [sys.executable, "-m", "bench", "dropout", "--quick", "--rounds", "2", "--device", "cpu"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr == ""
    assert all(line.startswith("dropout ") for line in done.stdout.splitlines()) and done.stdout.count("\n") == 2
