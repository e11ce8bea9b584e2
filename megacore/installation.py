"""What is installed here: the extension and the torch it was built with, optional packages, the example configuration.

Imports nothing of megacore's, so that it can speak when the rest cannot be imported.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).parent
# What needs more than torch and numpy, by the extra of pyproject.toml that brings it. A test compares the two.
EXTRAS = {
    "train": ("safetensors", "tokenizers", "tyro", "rich", "tensorboard"),
    "plot": ("matplotlib",),
    "triton": ("triton",),
}


def built_with(package: Path = PACKAGE) -> dict[str, str | None]:
    """{"torch", "python", "cuda"} as setup.py wrote them beside this Python's extension; empty where it has not."""
    library = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    try:
        found = json.loads(library.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remedy(package: Path = PACKAGE) -> str:
    """The command that builds the extension for this Python and its torch."""
    root, python = package.parent, sys.executable or "python"
    if not (root / "setup.py").is_file():
        # not from the cache, and over what is installed already
        return (
            "reinstall from the sources, in their folder: "
            f"{python} -m pip install --force-reinstall --no-deps --no-cache-dir ."
        )
    if Path(sys.prefix).resolve() == (root / ".venv").resolve():
        return f"build it with `make build` in {root}"
    return f"build it with `make build VENV= PYTHON={python}` in {root}"


def why_it_cannot_load(error: ImportError, torch: str, package: Path = PACKAGE) -> str:
    """One line for an extension that is missing or does not load: what it was built with, what is here, what to do."""
    reason = " ".join(str(error).split())
    said, libraries = built_with(package), sorted(package.glob("_C*.so"))
    tag = sys.implementation.cache_tag  # cpython-311
    here = f"here are torch {torch} and Python {platform.python_version()}"
    if not libraries:
        reason = f"it is not built; {here}"
    elif not any(tag in library.name or library.name == "_C.abi3.so" for library in libraries):
        reason = f"it is built for another Python ({', '.join(library.name for library in libraries)}); {here}"
    elif said.get("torch") and said["torch"] != torch:
        reason = f"it was built with torch {said['torch']} and Python {said.get('python')}; {here}; {reason}"
    else:
        reason = f"{reason}; {here}"
    return f"megacore._C cannot be loaded: {reason}. To mend it, {remedy(package)}"


def summary(version: str, torch: str, built_with_cuda: bool) -> str:
    """What a bug report needs, in one line: megacore --version."""
    said = built_with()
    kind = "C++ and CUDA" if built_with_cuda else "C++, without CUDA kernels"
    if built_with_cuda and said.get("cuda"):
        kind += f" {said['cuda']}"
    beside = f", built with torch {said['torch']}" if said.get("torch") else ""
    return (
        f"megacore {version} (torch {torch}, Python {platform.python_version()}, {platform.machine()}; "
        f"extension: {kind}{beside})"
    )


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def lacks(what: str, extra: str, names: Iterable[str]) -> str:
    """One line: `what` needs packages that are not there, and how they come."""
    names = list(names)
    return (
        f"{what} needs {', '.join(names)}, not installed here; pip install 'megacore[{extra}]' "
        f"(or, in a checkout, pip install {' '.join(names)})"
    )


def example_config() -> Path:
    """The configuration that messages name: in the package, or beside it in a checkout."""
    folder = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
    path = folder / "stdlib.toml"
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
