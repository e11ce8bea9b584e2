"""bench/gpu_check.sh: its flow on the CPU, and a report that outlives parts that fail or hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench import gpu_report, report

ROOT = Path(__file__).parents[2]
LOG = """tests/ops/test_x.py::test_a[cuda-1 2] PASSED [ 33%]
tests/ops/test_x.py::test_b FAILED [ 66%]
tests/ops/test_x.py::test_c SKIPPED (needs a GPU) [ 99%]
FAILED tests/ops/test_x.py::test_b - AssertionError
"""


def test_dry_run(tmp_path):
    env = os.environ | {"PYTHON": sys.executable, "PARTS": "machine tests bench-dropout", "OMP_NUM_THREADS": "1"}
    command = ["bench/gpu_check.sh", "--cpu", str(tmp_path / "new" / "check.json")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found, rows = report.read(tmp_path / "new" / "check.json")
    assert [(p["name"], p["exit_status"]) for p in found["parts"]] == [
        ("machine", 0),
        ("tests", 0),
        ("bench-dropout", 0),
    ], done.stdout
    assert found["machine"]["cpu"] and found["versions"]["torch"] and "PASSED" in set(found["tests"].values())
    assert {row.bench for row in rows} == {"dropout"}


def test_what_failed_loses_only_itself(tmp_path):
    (tmp_path / "build.rc").write_text("2 30\n")
    (tmp_path / "build.log").write_text("nvcc: no such file\n" + "x" * 10 * gpu_report.TAIL)
    (tmp_path / "tests.rc").write_text("124 90\n")  # killed: its last lines are all there is
    (tmp_path / "tests.log").write_text(LOG)
    (tmp_path / "bench-linear.rc").write_text("124 60\n")
    report.write(tmp_path / "bench-linear.json", [report.Row("linear", {"dir": "fwd"}, 1.0, {})])
    gpu_report.main(str(tmp_path), str(tmp_path / "out" / "check.json"))
    found = json.loads((tmp_path / "out" / "check.json").read_text())
    assert {p["name"]: p["exit_status"] for p in found["parts"]} == {"build": 2, "tests": 124, "bench-linear": 124}
    assert max(len(p["tail"]) for p in found["parts"]) == gpu_report.TAIL
    assert found["tests"] == {
        "tests/ops/test_x.py::test_a[cuda-1 2]": "PASSED",
        "tests/ops/test_x.py::test_b": "FAILED",
        "tests/ops/test_x.py::test_c": "SKIPPED",
    }
    assert len(found["rows"]) == 1 and found["commit"] is None


def test_the_report_needs_neither_torch_nor_the_extension(tmp_path):
    code = "import sys; sys.modules['torch'] = sys.modules['megacore'] = None; import runpy;"
    code += "runpy.run_path('bench/gpu_report.py', run_name='__main__')"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "f.json")], cwd=ROOT, check=True, timeout=60
    )
    assert json.loads((tmp_path / "f.json").read_text())["parts"] == []
