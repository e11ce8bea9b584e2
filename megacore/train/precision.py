"""What the name of a precision means.

| name | parameters and activations | main gradients, masters, moments |
|------|----------------------------|----------------------------------|
| fp64 | fp64                       | fp64                             |
| fp32 | fp32                       | fp32                             |
| bf16 | bf16                       | fp32                             |
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

from megacore.parallel.buckets import main_dtype


@dataclass(frozen=True)
class Precision:
    name: str
    parameters: torch.dtype

    @property
    def main(self) -> torch.dtype:
        """Main gradients, masters and AdamW's moments."""
        return main_dtype(self.parameters)

    @property
    def masters(self) -> bool:
        """Whether the optimizer keeps wider copies of the parameters (else the parameters are the masters)."""
        return self.main != self.parameters


_DTYPES = (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16))
PRECISIONS = MappingProxyType({name: Precision(name, dtype) for name, dtype in _DTYPES})


def precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision={name!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
