"""What a module has that is no parameter: rotary tables, masks, counters, running statistics.

| question | answer |
|---|---|
| dtype | never narrower than the module made it (angles in bf16 are off by radians); wider where the run is (fp64) |
| checkpoints | persistent buffers are stored whole, as the module's own state_dict has them |
| replicas | the first replica's values, after a step in which a forward changed some (as DDP's broadcast_buffers) |
| stages | a copy on each stage that lists the module |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megacore.comm.collectives import broadcast_
from megacore.comm.mesh import Group


@torch.no_grad()
def cast(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Parameters to `dtype`, buffers to no narrower dtype than their own, all to `device`. Parameters and buffers that
    are one object stay one; whole numbers stay whole numbers."""
    made: dict[int, Tensor] = {}
    for child in module.modules():
        for param in child._parameters.values():
            if param is not None:
                param.data = param.data.to(device=device, dtype=dtype if param.is_floating_point() else None)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                kept = torch.promote_types(buffer.dtype, dtype) if buffer.is_floating_point() else buffer.dtype
                child._buffers[name] = made.setdefault(id(buffer), buffer.to(device=device, dtype=kept))


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that state_dict has, by full name, each object once."""
    found: dict[str, Tensor] = {}
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


class Replicas:
    """Keeps the buffers of data-parallel replicas equal. `group`: the replicas (dp x cp)."""

    def __init__(self, module: nn.Module, group: Group):
        self._module, self._group = module, group
        self._marks = self._seen()

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for _, buffer in self._module.named_buffers())

    def _seen(self) -> list[tuple[int, int]]:
        """Address and version of each: a value that is written in place has a new version, one that is assigned a new
        address."""
        return [(buffer.data_ptr(), buffer._version) for buffer in self._buffers()]

    def changed(self) -> bool:
        """Whether a forward on this rank has written to a buffer since the last `agree`."""
        return self._seen() != self._marks

    @torch.no_grad()
    def agree(self) -> None:
        """Collective over the replicas: all take the first one's values."""
        for buffer in self._buffers():
            broadcast_(buffer, self._group)
        self._marks = self._seen()
