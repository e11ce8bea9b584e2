"""The arithmetic of the benchmarks: fair turns, honest statistics, refusal of wrong answers, the form of the report."""

import json

import pytest
import torch

from bench import harness, operators
from bench.__main__ import BENCHES, parse


def test_every_contestant_runs_in_every_round_in_rotating_order():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) for name in ("ours", "a", "b")}
    taken = harness.interleave(contestants, rounds=4, between=lambda: calls.append("|"), warmup=1)
    assert "".join(c[0] for c in calls) == "oab" + "|o|a|b" + "|a|b|o" + "|b|o|a" + "|o|a|b"
    assert {name: len(seconds) for name, seconds in taken.items()} == {"ours": 4, "a": 4, "b": 4}


def test_median_and_spread():
    seconds = [0.010, 0.011, 0.012, 0.013, 0.050, 0.012, 0.012, 0.011, 0.013, 0.010, 0.012]
    assert harness.median_ms(seconds) == pytest.approx(12.0)  # one outlier moves nothing
    assert harness.spread(seconds) == pytest.approx((0.013 - 0.010) / 0.012)


def test_limit_is_the_slower_of_arithmetic_and_traffic():
    limits = harness.Limits(flops=100e9, bandwidth=20e9)
    assert limits.ms(flops=1e9) == pytest.approx(10.0)
    assert limits.ms(flops=1e9, nbytes=1e9) == pytest.approx(50.0)


def test_a_wrong_answer_is_not_timed():
    def torchs(x, w):
        return x @ w

    def wrong_gradient(x, w):
        return torchs(x, w) + 1e-3 * (w - w.detach()).sum()

    torch.manual_seed(0)
    inputs = [torch.randn(8, 16).requires_grad_(), torch.randn(16, 4).requires_grad_()]
    dy = torch.randn(8, 4)
    operators.verify("matmul", torchs, torchs, inputs, dy)
    with pytest.raises(AssertionError, match="matmul gradient 2"):
        operators.verify("matmul", wrong_gradient, torchs, inputs, dy)
    with pytest.raises(AssertionError, match="matmul output"):
        operators.verify("matmul", lambda x, w: torchs(x, w) * 1.001, torchs, inputs, dy)
    with pytest.raises(AssertionError, match="matmul output"):
        operators.verify("matmul", lambda x, w: torchs(x, w) * float("nan"), torchs, inputs, dy)


def test_saved_bytes_counts_what_is_neither_input_nor_output():
    x = torch.randn(10, 100, requires_grad=True)
    assert harness.saved_bytes(lambda: x * x, [x]) == 0
    assert harness.saved_bytes(lambda: x.exp(), [x]) == 0  # saves its output
    assert harness.saved_bytes(lambda: (x * 2).sin(), [x]) == 4000


def test_report_has_the_agreed_form(tmp_path):
    row = harness.row("step", {"tp": 2, "dir": "fwd+bwd"}, {"ours": [0.1, 0.2, 0.3], "gloo": [0.4]}, None, None)
    harness.write(tmp_path / "new" / "step.json", [row])
    written = json.loads((tmp_path / "new" / "step.json").read_text())
    assert set(written) == {"machine", "versions", "commit", "rows"}
    assert written["versions"]["torch"] == torch.__version__
    assert written["rows"] == [
        {
            "bench": "step",
            "case": {"tp": 2, "dir": "fwd+bwd"},
            "ours_ms": 200.0,
            "rivals": {"gloo": 400.0},
            "limit_ms": None,
            "extra_bytes": None,
        }
    ]
    assert "gloo 400 ms (2.00x)" in row.line()


@pytest.mark.parametrize(("case", "rivals"), [({"size": 3}, {}), ({"tp": 2}, {"pytorch": 1.0})])
def test_unknown_keys_are_refused(case, rivals):
    with pytest.raises(ValueError, match="choose from"):
        harness.Row("step", case, 1.0, rivals)


def test_command_line():
    assert parse(["all", "--rivals"]).ops == BENCHES
    args = parse(["dropout", "dropout", "--rivals", "torch-eager", "--threads", "1", "2"])
    assert (args.ops, args.rivals, args.threads) == (("dropout",), ["torch-eager"], [1, 2])
    with pytest.raises(SystemExit):
        parse(["matmul"])
