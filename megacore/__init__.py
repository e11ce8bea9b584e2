"""3D-parallel (data x tensor x pipeline) training of Transformers in PyTorch."""

from megacore import program

program.begin()  # before torch: Ctrl-C in its seconds of import, and ranks whose torchrun goes meanwhile

import torch  # noqa: E402  (megacore._C links against the libraries that torch loads)

__version__ = "0.1.0"

try:
    from megacore import _C
except ImportError as error:
    from megacore.installation import why_it_cannot_load

    raise ImportError(why_it_cannot_load(error, torch.__version__)) from error

__all__ = ["_C", "__version__", "clip_grad_norm_", "full_state_dict", "verify"]
_LAZY = {"clip_grad_norm_": "megacore.parallel.clip", "full_state_dict": "megacore.parallel.state"}


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
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'megacore' has no attribute {name!r}")
