"""python bench/gpu_report.py FOLDER FILE: what the parts of gpu_check.sh left in FOLDER, as one JSON.

{machine, versions, commit, parts: [{name, exit_status, seconds, tail}], tests: {name: outcome}, rows}: the form that
`bench.report.read` reads. It imports neither torch nor megacore: it must also report that they do not work.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

TAIL = 4000  # characters of a part's output that are kept; all of it would be megabytes of compiler commands
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.M)


def collect(folder: Path) -> dict:
    parts, rows = [], []
    for ended in sorted(folder.glob("*.rc"), key=lambda path: path.stat().st_mtime_ns):
        status, seconds = map(int, ended.read_text().split())
        log = _text(ended.with_suffix(".log"))
        parts.append({"name": ended.stem, "exit_status": status, "seconds": seconds, "tail": log[-TAIL:]})
        rows += _json(ended.with_suffix(".json")).get("rows", [])
    about = _about(_text(folder / "machine.log"))
    tests = dict(OUTCOME.findall(_text(folder / "tests.log")))
    return {**about, "parts": parts, "tests": tests, "rows": rows}


def _about(log: str) -> dict:
    """machine, versions and commit: the last line that is JSON."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {"machine": {}, "versions": {}, "commit": None}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def main(folder: str, file: str) -> None:
    written = Path(file)
    written.parent.mkdir(parents=True, exist_ok=True)
    beside = written.with_name(written.name + ".new")
    beside.write_text(json.dumps(collect(Path(folder)), indent=1) + "\n")
    beside.replace(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
