"""What the README shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_drop_in_example_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert len([line for line in code.splitlines() if line and not line.startswith("#")]) <= 12
    script = tmp_path / "drop_in.py"
    # one write a rank: print without a buffer makes several, and those of two ranks mix
    script.write_text(code + "import os\nos.write(1, f'shape {tuple(logits.shape)}\\n'.encode())\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(re.findall(r"shape \(.*\)", done.stdout)) == ["shape (1, 16, 25128)", "shape (1, 16, 25129)"]
