"""The arithmetic of the benchmarks: fair turns, honest statistics, refusal of wrong answers, the form of the report."""

import json
import time

import pytest
import torch

from bench import harness, limits, operators, report
from bench.__main__ import BENCHES, main, options_of, parse
from bench.poison import poisoned


def test_every_contestant_runs_in_every_round_in_rotating_order():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) for name in ("ours", "a", "b")}
    taken = harness.interleave(contestants, rounds=4, between=lambda name: calls.append("|" + name[0]), warmup=1)
    turns = ["oab", "oab", "abo", "boa", "oab"]
    assert "".join(c if c[0] == "|" else c[0] for c in calls) == "".join(f"|{c}{c}" for c in "".join(turns))
    assert {name: len(seconds) for name, seconds in taken.items()} == {"ours": 4, "a": 4, "b": 4}


@pytest.mark.parametrize(("each", "rounds"), [(0.01, 20), (0.5, 10), (100.0, harness.FEWEST)])
def test_long_rows_get_fewer_rounds(each, rounds):
    taken = harness.interleave({"ours": lambda: None}, 20, seconds_of=lambda run: each, budget=5.0)
    assert len(taken["ours"]) == rounds


def test_median_and_spread():
    seconds = [0.010, 0.011, 0.012, 0.013, 0.050, 0.012, 0.012, 0.011, 0.013, 0.010, 0.012]
    assert harness.median_ms(seconds) == pytest.approx(12.0)  # one outlier moves nothing
    assert harness.spread(seconds) == pytest.approx((0.013 - 0.010) / 0.012)


def test_a_ratio_is_the_median_of_the_ratios_of_rounds():
    timed = harness.Timed({"ours": [1.0, 2.0, 9.0], "a": [2.0, 4.0, 5.0]})  # the medians alone would say 4 / 2, too
    assert timed.ratio("a") == 2.0
    slow_machine = harness.Timed({"ours": [1.0, 10.0, 1.0, 10.0, 1.0], "a": [2.0, 20.0, 2.0, 20.0, 20.0]})
    assert slow_machine.ratio("a") == 2.0 and slow_machine.ms("a") / slow_machine.ms("ours") == 20.0


def problem(ours, rivals=()):
    torch.manual_seed(0)
    inputs = [torch.randn(8, 16).requires_grad_(), torch.randn(16, 4).requires_grad_()]
    least = {"fwd+bwd": limits.Limit(1.0)}
    return operators.Problem(
        "linear",
        {"shape": "8x16x4"},
        ours,
        torch.matmul,
        inputs,
        torch.randn(8, 4),
        least,
        dict(rivals),
    )


class Unwritten(torch.autograd.Function):
    """Right, but for one thing: the last row of the first gradient (or of the output) is left as it was allocated."""

    @staticmethod
    def forward(ctx, x, w, output):
        ctx.save_for_backward(x, w)
        ctx.output = output
        return Unwritten.part(x @ w, output)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return Unwritten.part(dy @ w.t(), not ctx.output), x.t() @ dy, None

    @staticmethod
    def part(right, leave):
        y = torch.empty_like(right)
        y[: -1 if leave else None] = right[: -1 if leave else None]
        return y


def wrong_gradient(x, w):
    return x @ w + 1e-3 * (w - w.detach()).sum()


def stale(x, w):
    """Written by nobody, and yet right where malloc hands out the block that was just freed."""

    def rows():  # the first of a block are malloc's own once it is freed
        return torch.empty(64, 4)[-8:]

    right = rows()
    right.copy_((x @ w).detach())
    del right
    return rows() + 0 * (x @ w)


WRONG = [
    (wrong_gradient, "gradient 2"),
    (lambda x, w: (x @ w) * 1.001, "output"),
    (lambda x, w: (x @ w) * float("nan"), "output"),
    (lambda x, w: (x @ w)[:, :1].expand(8, 4) * torch.tensor([1.0, 0, 0, 0]), "output"),
    (lambda x, w: Unwritten.apply(x, w, True), "output"),
    (stale, "output"),
    (lambda x, w: Unwritten.apply(x, w, False), "gradient 1"),
]


@pytest.mark.parametrize(("wrong", "part"), WRONG)
def test_a_wrong_or_unwritten_answer_is_not_timed(wrong, part):
    options = harness.Options(rounds=1)
    assert list(operators.measure(problem(torch.matmul), options))
    with pytest.raises(AssertionError, match=rf"ours: {part}: error .* not timed"):
        list(operators.measure(problem(wrong), options))


@pytest.mark.parametrize(("wrong", "part"), WRONG)
def test_a_wrong_rival_is_left_out_with_the_reason(wrong, part):
    rivals = {"liger": lambda: lambda x, w: wrong(x, w), "onednn": lambda: torch.matmul}
    (row,) = operators.measure(problem(torch.matmul, rivals), harness.Options(rounds=1))
    assert row.rivals["liger"] is None and row.rivals["onednn"] > 0 and part in row.missing["liger"]
    assert "liger -" in row.line()


def test_a_rival_that_is_not_installed_is_no_error(capsys):
    def make():
        return operators.of_package("no-such-package", "no_such_package", "f")

    rows = []
    for _ in range(2):
        rows += operators.measure(problem(torch.matmul, {"liger": make}), harness.Options(rounds=1))
    assert [r.missing for r in rows] == [{"liger": "no-such-package is not installed"}] * 2
    assert capsys.readouterr().err.count("no-such-package") == 1


def test_poison_ends_with_its_block():
    with poisoned():
        assert torch.empty(1000).isnan().all() and (torch.empty(10, dtype=torch.int64) > 2**62).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_inputs_that_are_overwritten_are_new_before_each_run():
    seen = []

    def ours(x, w):
        seen.append(float(x.detach().sum()))
        y = x @ w
        x.data.zero_()  # the gradient of w is wrong for it, but no one looks here
        return y

    given = problem(ours)
    given = operators.Problem(**(vars(given) | {"verify": lambda: None, "overwriting": ("ours",)}))
    list(operators.measure(given, harness.Options(rounds=3)))
    timed = seen[:5]  # two to warm up, three timed
    assert timed == [timed[0]] * 5 and timed[0] != 0


def test_floors_are_timed_beside_and_are_no_rivals():
    given = problem(torch.matmul)
    given = operators.Problem(**(vars(given) | {"floors": {"fwd+bwd": {"linear-alone": lambda: None}}}))
    (row,) = operators.measure(given, harness.Options(rounds=3))
    assert row.floors["linear-alone"] < row.ours_ms and row.ratio("linear-alone") < 1 and not row.rivals


FORM = {"bench", "case", "ours_ms", "rivals", "limit_ms", "extra_bytes", "extra_of", "floors", "ratios", "spread"}
FORM |= {"rounds", "collectives", "missing"}


def test_report_has_the_agreed_form(tmp_path):
    timed = harness.Timed({"ours": [0.1, 0.2, 0.3], "gloo": [0.4, 0.4, 0.4]}, {"liger": "is not here"})
    row = report.row("step", {"tp": 2, "dir": "fwd+bwd"}, timed)
    report.write(tmp_path / "new" / "step.json", [row], bounds=[])
    written = json.loads((tmp_path / "new" / "step.json").read_text())
    assert set(written) == {"machine", "versions", "commit", "rows", "bounds"}
    assert written["versions"]["torch"] == torch.__version__
    (kept,) = written["rows"]
    assert set(kept) == FORM
    assert kept["rivals"] == {"gloo": 400.0, "liger": None} and kept["ratios"] == {"gloo": 2.0}
    assert "gloo 400 ms (2.00x)" in row.line() and "liger -" in row.line()
    assert report.read(tmp_path / "new" / "step.json")[1] == [row]


def test_a_rival_without_room_in_the_budget_runs_once():
    ran = []

    def slow(x, w):
        ran.append(1)
        time.sleep(0.05)
        return x @ w

    given = problem(torch.matmul, {"liger": lambda: slow, "torch-eager": lambda: torch.matmul})
    (row,) = operators.measure(given, harness.Options(rounds=3, budget=0.2))
    assert row.rivals["liger"] > 40 and row.ratio("liger") > 10 and "liger" not in row.spread
    assert len(ran) == 3  # two to verify it


@pytest.mark.parametrize(("case", "rivals"), [({"size": 3}, {}), ({"tp": 2}, {"pytorch": 1.0})])
def test_unknown_keys_are_refused(case, rivals):
    with pytest.raises(ValueError, match="choose from"):
        report.Row("step", case, 1.0, rivals)


def test_command_line():
    assert parse(["all", "--rivals"]).ops == BENCHES
    args = parse(["dropout", "dropout", "--rivals", "torch-eager", "--threads", "1", "2", "--only", "dir=fwd"])
    options = options_of(args)
    assert (args.ops, options.rivals, options.threads) == (("dropout",), ("torch-eager",), (1, 2))
    assert options.only == ({"dir": "fwd"},)
    for refused in (["matmul"], ["bounds", "step"], ["dropout", "--only", "fwd"]):
        with pytest.raises(SystemExit):
            parse(refused)


def test_only_the_wanted_cases_run():
    options = harness.Options(
        only=({"bench": "linear", "dtype": "bf16", "isa": "avx2"}, {"dir": "fwd", "threads": "2"})
    )
    assert options.wants("linear", {"dtype": "bf16", "isa": "avx2", "threads": 1})
    assert not options.wants("linear", {"dtype": "bf16", "threads": 1})
    assert options.wants("linear", {"threads": 2})  # one of its directions is
    assert options.wants("linear", {"threads": 2, "dir": "fwd"})
    assert not options.wants("linear", {"threads": 2, "dir": "fwd+bwd"})


def test_rows_are_kept_as_they_come(tmp_path, monkeypatch):
    def rows(options):
        yield report.Row("dropout", {"dir": "fwd"}, 1.0, {"torch-eager": 2.0})
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.dropout.rows", rows)
    with pytest.raises(KeyboardInterrupt):
        main(["dropout", "--json", str(tmp_path / "rows.json"), "--device", "cpu"])
    assert len(report.read(tmp_path / "rows.json")[1]) == 1
