"""The page shows the results in the tree, and the same rows give the same bytes."""

import pytest

from bench import harness, plot, render, report

HOW_TO = "run `python -m bench render` and commit what it writes"


def rows():
    timed = harness.Timed(
        {"ours": [0.1, 0.1], "torch-eager": [0.2, 0.3], "linear-alone": [0.05, 0.05]}, {"onednn": "is not here"}
    )
    case = {"act": "tanh", "dtype": "fp32", "shape": "2048x768x3072", "dir": "fwd", "threads": 1}
    return [report.row("linear_gelu", case, timed, 80.0, ("linear-alone",), extra_bytes=1 << 20)]


def test_the_page_is_what_the_results_say():
    page = render.PAGE.read_text()
    assert render.rendered(page) == page, HOW_TO
    drawn = {path.name for path in render.FIGURES.glob("*.svg")}
    assert drawn == {f"{path.stem}.svg" for path in render.kept()}, HOW_TO
    assert all(f"(figures/{name})" in page for name in drawn), HOW_TO


def test_rendering_is_deterministic_and_keeps_the_rest_of_the_page(tmp_path):
    (tmp_path / "results").mkdir()
    report.write(tmp_path / "results" / "ops.json", rows(), bounds=[{"threads": 1}])
    page = tmp_path / "page.md"
    page.write_text(f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n")
    written = [render.render(tmp_path / "results", page, tmp_path / name) for name in ("a", "b")]
    assert [path.name for path in written[0]] == ["page.md", "ops.svg"]
    assert (tmp_path / "a" / "ops.svg").read_bytes() == (tmp_path / "b" / "ops.svg").read_bytes()
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "torch-eager 250 (2.50x), onednn -, linear-alone 50 (0.50x)" in text and "80 (80 %)" in text
    assert "| 80.0 % | PASS |" in text  # of a limit of 80 ms
    assert render.rendered(text, tmp_path / "results") == text


def test_a_page_without_its_marks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="wanted one line"):
        render.rendered("no marks", tmp_path)


def test_plot_refuses_rows_without_rivals(tmp_path):
    plot.draw(rows(), tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no row has a rival"):
        plot.draw([report.Row("step", {"tp": 2}, 1.0, {})], tmp_path / "none.svg")
