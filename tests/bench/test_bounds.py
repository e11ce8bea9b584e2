"""The table of bounds: each row of it can pass, fail and be missing."""

import json

import pytest

from bench import bounds, report
from bench.__main__ import BENCHES, main
from bench.bounds import BOUNDS, FAIL, PASS, UNKNOWN

GOOD = {"share": 1.01, "extra": 0.99, "collectives": 1.0}  # times the bound


def row_for(bound, by):
    """A row whose figure is `by` times the bound."""
    kind, figure = bound.figure, bound.bound * by
    more = {"share": {"rivals": {}, "ratios": {"limit": figure}}}
    more |= {"extra": {"rivals": {}, "extra_bytes": round(1e6 * figure), "extra_of": 10**6}}
    more |= {"collectives": {"rivals": {}, "collectives": round(figure)}}
    return report.Row(bound.bench, {**bound.case, "threads": 1}, 1.0, **more[kind])


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: f"{bound.bench}-{bound.figure}")
def test_each_bound_passes_fails_and_is_missing(bound):
    good = GOOD[bound.figure]

    def verdict(*rows):
        (found,) = bounds.judge(rows, (1,), (bound,))
        return found.verdict

    assert verdict(row_for(bound, good)) == PASS
    assert verdict(row_for(bound, 2 if bound.figure == "collectives" else 1 / good)) == FAIL
    assert verdict() == UNKNOWN
    if bound.figure == "collectives":
        assert verdict(row_for(bound, 0)) == FAIL  # none counted is no proof of one


def test_bounds_are_shares_of_what_the_same_run_measured():
    """A multiple of another library's time says as much about that library on that CPU."""
    assert set(bounds.FIGURES) == {"share", "extra", "collectives"}
    assert all(0 < bound.bound < 1 for bound in BOUNDS if bound.figure == "share")


def test_native_rows_do_not_answer_for_a_cpu_without_16_bit_arithmetic():
    bound = next(b for b in BOUNDS if "isa" in b.case)
    native = {k: v for k, v in bound.case.items() if k != "isa"} | {"threads": 1}

    def figure(case, bound):
        return bounds.judge([report.Row("linear_gelu", case, 1.0, {}, ratios={"limit": 0.9})], (1,), (bound,))[0].figure

    assert figure(native, bound) is None and figure(native | {"isa": "avx2"}, bound) == 0.9
    fp32 = next(b for b in BOUNDS if b.bench == "linear_gelu" and "isa" not in b.case)
    assert figure({**fp32.case, "threads": 1, "isa": "avx2"}, fp32) is None


def test_an_aim_is_no_bound():
    bound = next(b for b in BOUNDS if b.aim)
    factors = (0.9, 1.05, 1.01 * bound.aim / bound.bound)
    words = [bounds.judge([row_for(bound, by)], (1,), (bound,))[0].words() for by in factors]
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
    forward = [bound for bound in BOUNDS if bound.case["dir"] == "fwd"]
    rows = [row_for(bound, GOOD[bound.figure]) for bound in forward]
    report.write(tmp_path / "good.json", rows)
    arguments = ["--threads", "1", "--json", str(tmp_path / "judged.json")]
    assert main(["bounds", "--of", str(tmp_path / "good.json"), *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count(PASS) == 1 and printed.count(UNKNOWN) == len(BOUNDS) - 1
    judged = json.loads((tmp_path / "judged.json").read_text())["bounds"]
    assert [v["verdict"] for v in judged].count(PASS) == 1 and len(judged) == len(BOUNDS)
    report.write(tmp_path / "bad.json", [row_for(BOUNDS[0], 0.5)])
    assert main(["bounds", "--of", str(tmp_path / "bad.json"), "--threads", "1"]) == 1
