"""3D-parallel (data x tensor x pipeline) training of Transformers in PyTorch."""

from megacore import program

program.begin()  # before torch: Ctrl-C in its seconds of import, and ranks whose torchrun goes meanwhile

import torch  # noqa: E402, F401  (megacore._C links against the libraries that torch loads)

__version__ = "0.1.0"

try:
    from megacore import _C
except ImportError as error:
    raise ImportError(f"megacore._C cannot be loaded ({error}); build it with `make build`") from error

__all__ = ["_C", "__version__", "verify"]


def __getattr__(name: str) -> object:
    if name == "verify":  # on demand: it stands on everything else
        from importlib import import_module

        return import_module("megacore.verify")
    raise AttributeError(f"module 'megacore' has no attribute {name!r}")
