"""Print the sources of Python's standard library, one path a line: real text that every machine has.

Installed packages and tests are left out: the first differ from machine to machine, the second are mostly data.
"""

import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

root = Path(sysconfig.get_path("stdlib"))
for path in sorted(root.rglob("*.py")):
    if not LEFT_OUT & set(path.relative_to(root).parts) and path.stat().st_size:
        print(path)
