"""Rows as bars: how many times as long as ours each rival takes, and the share of the physical limit that ours reaches.

The same rows give the same bytes (with one version of matplotlib): fixed ids, no date, text kept as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.report import Row

COLOURS = {
    "torch-eager": "#d55e00",
    "torch-compile": "#0072b2",
    "torch-dtensor": "#0072b2",
    "megatron-core": "#009e73",
    "onednn": "#cc79a7",
    "cublaslt": "#56b4e9",
    "liger": "#e69f00",
}
STYLE = {"svg.hashsalt": "megacore", "svg.fonttype": "none", "font.size": 8, "font.family": "sans-serif"}
HIDDEN = ("dtype", "device", "reduction", "model")  # said elsewhere, or by the shape


def label(row: Row) -> str:
    case = {k: v for k, v in row.case.items() if k not in HIDDEN}
    words = [row.bench, row.case.get("model", ""), row.case.get("dtype", "")]
    for key, value in case.items():
        if key == "inplace":
            words.append("given up" if value else "kept")
        elif key in ("threads", "tp", "pp"):
            words.append(f"{key} {value}")
        else:
            words.append(str(value))
    return " ".join(str(w) for w in words if w != "")


def draw(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Writes `path`; the format is that of its suffix."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [r for r in rows if r.ours_ms and any(r.ratio(name) for name in r.rivals)]
    if not drawn:
        raise ValueError(f"plot: {path}: no row has a rival; nothing to draw")
    with matplotlib.rc_context(STYLE):
        bars = [(i, name, r.ratio(name)) for i, r in enumerate(drawn) for name in r.rivals if r.ratio(name)]
        figure = Figure(figsize=(9, 0.9 + 0.16 * (len(bars) + 1.2 * len(drawn))), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        _bars(left, drawn, bars)
        _limits(right, drawn, bars)
        if title:
            figure.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def _places(drawn: Sequence[Row], bars: Sequence[tuple]) -> tuple[list[float], list[float]]:
    """(height of each bar, middle of each row), downwards, with a gap between rows."""
    heights = [-(n + 1.2 * i) for n, (i, *_) in enumerate(bars)]
    middles = []
    for i in range(len(drawn)):
        own = [h for h, bar in zip(heights, bars, strict=True) if bar[0] == i]
        middles.append(sum(own) / len(own))
    return heights, middles


def _bars(axis, drawn: Sequence[Row], bars: Sequence[tuple]) -> None:
    heights, middles = _places(drawn, bars)
    seen: set[str] = set()
    for height, (_, name, ratio) in zip(heights, bars, strict=True):
        axis.barh(height, ratio, 0.85, color=COLOURS.get(name, "#999999"), label=None if name in seen else name)
        axis.annotate(f"{ratio:.2f}", (ratio, height), (2, 0), textcoords="offset points", va="center", fontsize=6)
        seen.add(name)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_ylim(heights[-1] - 1, heights[0] + 1)
    axis.set_yticks(middles, [label(row) for row in drawn])
    axis.set_xlabel("time of the rival / time of ours (1 = equal, more = ours is faster)")
    axis.legend(loc="lower right", fontsize=6)


def _limits(axis, drawn: Sequence[Row], bars: Sequence[tuple]) -> None:
    _, middles = _places(drawn, bars)
    for middle, row in zip(middles, drawn, strict=True):
        if row.reached:
            axis.barh(middle, 100 * row.reached, 0.85, color="#444444")
            where = (100 * row.reached, middle)
            axis.annotate(
                f"{100 * row.reached:.0f}", where, (2, 0), textcoords="offset points", va="center", fontsize=6
            )
    axis.axvline(100, color="black", linewidth=0.8)
    axis.set_xlim(0, 115)
    axis.set_xlabel("% of the physical limit")
