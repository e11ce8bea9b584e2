"""The table of bounds: each row of it can pass, fail and be missing."""

import json

import pytest

from bench import bounds, report
from bench.__main__ import BENCHES, main
from bench.bounds import BOUNDS, FAIL, PASS, UNKNOWN

GOOD = {"faster": 1.01, "times": 0.99, "extra": 0.99, "collectives": 1.0}  # times the bound


def row_for(bound, by):
    """A row whose figure is `by` times the bound."""
    kind, _, name = bound.figure.partition(":")
    figure = bound.bound * by
    more = {"faster": {"rivals": {name: figure}}, "times": {"rivals": {}, "floors": {name: 1 / max(figure, 1e-9)}}}
    more |= {"extra": {"rivals": {}, "extra_bytes": round(1e6 * figure), "extra_of": 10**6}}
    more |= {"collectives": {"rivals": {}, "collectives": round(figure)}}
    return report.Row(bound.bench, {**bound.case, "threads": 1}, 1.0, **more[kind])


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.bench}-{bound.figure}")
def test_each_bound_passes_fails_and_is_missing(bound):
    good = GOOD[bound.figure.split(":")[0]]

    def verdict(*rows):
        (found,) = bounds.judge(rows, (1,), (bound,))
        return found.verdict

    assert verdict(row_for(bound, good)) == PASS
    assert verdict(row_for(bound, 2 if bound.figure == "collectives" else 1 / good)) == FAIL
    assert verdict() == UNKNOWN
    if bound.figure == "collectives":
        assert verdict(row_for(bound, 0)) == FAIL  # none counted is no proof of one


def test_a_missing_rival_says_why():
    bound = next(b for b in BOUNDS if b.figure == "faster:megatron-core")
    row = report.Row(bound.bench, {**bound.case, "threads": 1}, 1.0, {"megatron-core": None})
    row = report.Row(**(vars(row) | {"missing": {"megatron-core": "megatron-core is not installed"}}))
    (verdict,) = bounds.judge([row], (1,), (bound,))
    assert verdict.verdict == UNKNOWN and "megatron-core is not installed" in bounds.table([verdict])


def test_native_rows_do_not_answer_for_a_cpu_without_16_bit_arithmetic():
    bound = next(b for b in BOUNDS if "isa" in b.case)
    native = {k: v for k, v in bound.case.items() if k != "isa"} | {"threads": 1}

    def figure(case, bound):
        return bounds.judge([report.Row("linear_gelu", case, 1.0, {"torch-eager": 9.0})], (1,), (bound,))[0].figure

    assert figure(native, bound) is None and figure(native | {"isa": "avx2"}, bound) == 9.0
    fp32 = next(b for b in BOUNDS if b.bench == "linear_gelu" and "isa" not in b.case and b.figure.startswith("faster"))
    assert figure({**fp32.case, "threads": 1, "isa": "avx2"}, fp32) is None


def test_an_aim_is_no_bound():
    bound = next(b for b in BOUNDS if b.aim)
    words = [bounds.judge([row_for(bound, by)], (1,), (bound,))[0].words() for by in (0.9, 1.05, 1.2)]
    assert words == ["FAIL, aim missed", "PASS, aim missed", "PASS, aim reached"]


def test_every_bound_names_a_case_that_its_bench_has():
    from importlib import import_module

    from bench.harness import Options

    assert set(bounds.benches()) <= set(BENCHES)
    for bound in BOUNDS:
        module = import_module(f"bench.{bound.bench}")
        if hasattr(module, "cases"):
            wanted = {k: v for k, v in bound.case.items() if k != "dir"}
            fits = [
                c for c in module.cases(Options()) if ("isa" in c) == ("isa" in wanted) and wanted.items() <= c.items()
            ]
            assert len(fits) == 1, bound


def test_the_command_judges_kept_rows_and_its_status_says_fail(tmp_path, capsys):
    rows = [
        row_for(bound, GOOD[bound.figure.split(":")[0]]) for bound in BOUNDS if bound.figure == "times:linear-alone"
    ]
    report.write(tmp_path / "good.json", rows)
    arguments = ["--threads", "1", "--json", str(tmp_path / "judged.json")]
    assert main(["bounds", "--of", str(tmp_path / "good.json"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count(PASS) == 1 and printed.count(UNKNOWN) == len(BOUNDS) - 1
    judged = json.loads((tmp_path / "judged.json").read_text())["bounds"]
    assert [v["verdict"] for v in judged].count(PASS) == 1 and len(judged) == len(BOUNDS)
    report.write(tmp_path / "bad.json", [row_for(BOUNDS[0], 1.5)])
    assert main(["bounds", "--of", str(tmp_path / "bad.json"), "--threads", "1"]) == 1
