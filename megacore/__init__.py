"""3D-parallel (data x tensor x pipeline) training of Transformers in PyTorch."""

import torch  # megacore._C links against the libraries that torch loads

__version__ = "0.1.0"

try:
    from megacore import _C
except ImportError as error:
    from megacore.installation import why_it_cannot_load

    raise ImportError(why_it_cannot_load(error, torch.__version__)) from error

__all__ = ["_C", "__version__", "verify"]


def __getattr__(name: str) -> object:
    if name == "verify":  # on demand: it stands on everything else
        from importlib import import_module

        from megacore.installation import lacks, missing

        try:
            return import_module("megacore.verify")
        except ModuleNotFoundError as error:
            if not (names := missing("train")):
                raise
            raise ImportError(lacks("megacore.verify", "train", names)) from error
    raise AttributeError(f"module 'megacore' has no attribute {name!r}")
