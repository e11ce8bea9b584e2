"""What the README and docs/operators.md show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megacore.ops

ROOT = Path(__file__).parents[1]


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)


def on_several(code: str) -> bool:
    return code.startswith("# torchrun ")


def torchrun(code: str, folder: Path) -> subprocess.CompletedProcess:
    script = folder / "example.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_the_drop_in_example_runs(tmp_path):
    (code,) = filter(on_several, blocks("README.md"))
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) <= 12
    done = torchrun(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.findall(r"rank (\d): ([\d,]+) parameters,\s+(\S+) apart", done.stdout)
    assert sorted(rank for rank, _, _ in said) == ["0", "1"]
    whole = 124_439_808
    assert all(0.5 <= int(held.replace(",", "")) / whole < 0.51 for _, held, _ in said)
    assert all(float(apart) < 2e-5 for _, _, apart in said)


EXAMPLES = [(name, i, code) for name in ("README.md", "docs/operators.md") for i, code in enumerate(blocks(name))]


@pytest.mark.parametrize(
    "code", [pytest.param(code, id=f"{name}-{i}") for name, i, code in EXAMPLES if not on_several(code)]
)
def test_an_example_runs(code):
    """Each one alone, so that it can be copied alone."""
    torch.manual_seed(0)
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


def test_the_example_of_a_split_vocabulary_runs(tmp_path):
    (code,) = filter(on_several, blocks("docs/operators.md"))
    done = torchrun(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_of_operators_names_each_one():
    text = (ROOT / "docs" / "operators.md").read_text()
    assert not [name for name in megacore.ops.__all__ if not re.search(rf"\b{name}\b", text)]


def test_the_page_says_who_serves_what():
    text, served = (ROOT / "docs" / "operators.md").read_text(), megacore.ops.dispatch.SERVED
    rows = re.findall(r"^\| (`[^|]*`) \| (`cpp`[^|]*) \| ([^|]*) \|$", text, re.M)
    said = {op: row[1:] for row in rows for op in re.findall(r"`(\w+)`", row[0])}
    assert said.keys() == served.keys()
    for op, devices in said.items():
        assert [tuple(re.findall(r"`(\w+)`", cell)) for cell in devices] == [served[op]["cpu"], served[op]["cuda"]]
