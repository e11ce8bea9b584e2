"""bench/results/*.json -> the results part of docs/benchmarks.md, and one figure for each file in docs/figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bench import bounds, plot, report
from bench.report import Row

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, FIGURES = ROOT / "bench" / "results", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures"
BEGIN = "<!-- results: written by `python -m bench render`; edit nothing between these two lines -->"
END = "<!-- end of results -->"


def render(results: Path = RESULTS, page: Path = PAGE, figures: Path = FIGURES) -> list[Path]:
    """Writes the page and the figures; returns what it wrote."""
    page.write_text(rendered(page.read_text(), results))
    drawn = []
    for path in kept(results):
        _, rows = report.read(path)
        if _has_rivals(rows):
            drawn.append(figures / f"{path.stem}.svg")
            plot.draw(rows, drawn[-1])
    return [page, *drawn]


def kept(results: Path = RESULTS) -> list[Path]:
    return sorted(results.glob("*.json"))


def rendered(page: str, results: Path = RESULTS) -> str:
    """The page with its results part made anew."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"docs/benchmarks.md: wanted one line {BEGIN!r} and one line {END!r}")
    parts = [_file(path) for path in kept(results)]
    before, rest = page.split(BEGIN)
    return before + "\n\n".join([BEGIN, *parts, END]) + rest.split(END)[1]


def _has_rivals(rows: Sequence[Row]) -> bool:
    return any(row.ratio(name) for row in rows for name in row.rivals)


def _file(path: Path) -> str:
    found, rows = report.read(path)
    parts = [f"### {path.stem}", _source(path, found)]
    if "bounds" in found:
        threads = sorted({v["threads"] for v in found["bounds"]})
        parts.append(bounds.table(bounds.judge(rows, threads)))
    parts.append(_table(rows))
    if _has_rivals(rows):
        parts.append(f"![{path.stem}: rivals against ours, and the share of the limit](figures/{path.stem}.svg)")
    return "\n\n".join(parts)


def _source(path: Path, found: dict) -> str:
    machine, versions = found["machine"], found["versions"]
    where = f"{machine['gpu']} (CUDA {machine['cuda']}), beside " if machine.get("gpu") else ""
    where += f"{machine['cores']} cores of {machine['cpu']} ({machine['isa']})"
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"From `bench/results/{path.name}`, commit `{found['commit']}`. {where}; {named}."


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| bench | case | ours ms | others ms (how many times ours) | limit ms | extra MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        others = [f"{n} {_ms(v)}{_times(row, n)}" for n, v in {**row.rivals, **row.floors}.items()]
        limit = f"{_ms(row.limit_ms)} ({100 * row.reached:.0f} %)" if row.reached else "-"
        spread = f" ±{50 * row.spread['ours']:.0f} %" if "ours" in row.spread else ""
        case = re.sub(rf"^{row.bench} ", "", plot.label(row))
        cells = (row.bench, case, _ms(row.ours_ms) + spread, ", ".join(others) or "-", limit, _extra(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _times(row: Row, name: str) -> str:
    ratio = row.ratio(name)
    return f" ({ratio:.2f}x)" if ratio else ""


def _extra(row: Row) -> str:
    return "-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.1f}"
