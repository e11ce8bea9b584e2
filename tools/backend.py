"""The hooks pip calls to build megacore: setuptools' own, beside the torch that will run what they build.

An extension of torch loads beside the release it was built with and no other. Build isolation hides that release: pip
gives a build an environment of its own, and a torch asked for there would be the newest, a download of some GB. So
`pyproject.toml` asks for none, and a wheel is built against the torch of the Python that pip installs into, which is
`sys.executable` without pip's additions to its path. Where there is none (uv and `python -m build` isolate in another
Python, or torch is not installed yet), the build stops before it begins. An sdist needs no torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

OLDEST = (2, 11)
NEEDS = "megacore's extension must be built against the torch that runs it"
# The path of an interpreter, and where torch is on it.
LOOK = """
import importlib.util, json, sys
torch = importlib.util.find_spec("torch")
print(json.dumps([torch.submodule_search_locations[0] if torch else None, sys.path]))
"""

try:
    from setuptools import build_meta
except ImportError:  # without isolation, in an environment that lacks it
    raise SystemExit(
        f"megacore: no setuptools for {sys.executable}; pip install 'setuptools>=77' ninja, then try again"
    ) from None
if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:  # `license` of pyproject.toml, as of PEP 639
    raise SystemExit(
        f"megacore: setuptools {importlib.metadata.version('setuptools')} of {sys.executable} is older than 77; "
        "pip install -U setuptools, then try again"
    )

get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
build_sdist = build_meta.build_sdist


def outside(python: str) -> list[str]:
    """The folders that `python` finds modules in outside this build, torch's first; none where it finds no torch."""
    added = ("PYTHONPATH", "PYTHONNOUSERSITE")  # by pip, for the isolated build
    clean = {name: value for name, value in os.environ.items() if name not in added}
    # from this folder, where no module has the name of one of torch's
    found = subprocess.run([python, "-c", LOOK], env=clean, cwd=Path(__file__).parent, capture_output=True, text=True)
    torch, path = json.loads(found.stdout) if found.returncode == 0 else (None, [])
    return [str(Path(torch).parent), *filter(None, path)] if torch else []


def reach_torch() -> None:
    """Makes torch importable, from outside an isolated build if need be; one line and the end where there is none."""
    if importlib.util.find_spec("torch") is None:
        sys.path += [folder for folder in outside(sys.executable) if folder not in sys.path]
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(
            f"{NEEDS}, and {sys.executable} has none; install torch>=2.11 there, then `pip install .` again. uv and "
            "python -m build hide an installed torch: in an environment with torch, setuptools>=77 and ninja run "
            "`uv pip install --no-build-isolation .` or `python -m build --no-isolation`"
        )
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # on the path without pip's knowledge: as it says itself
        import torch

        version = str(torch.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise SystemExit(f"megacore: torch {version} is older than 2.11; pip install -U 'torch>=2.11', then try again")
    print(f"megacore: building against torch {version}")


def _beside_torch(hook):
    def run(*args, **options):
        reach_torch()
        return hook(*args, **options)

    run.__name__ = hook.__name__
    return run


get_requires_for_build_wheel = _beside_torch(build_meta.get_requires_for_build_wheel)
prepare_metadata_for_build_wheel = _beside_torch(build_meta.prepare_metadata_for_build_wheel)
build_wheel = _beside_torch(build_meta.build_wheel)
get_requires_for_build_editable = _beside_torch(build_meta.get_requires_for_build_editable)
prepare_metadata_for_build_editable = _beside_torch(build_meta.prepare_metadata_for_build_editable)
build_editable = _beside_torch(build_meta.build_editable)
