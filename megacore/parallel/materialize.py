"""Give a model that was built on the meta device its weights, one full parameter at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megacore.comm.mesh import Mesh
from megacore.parallel.plain import reborn
from megacore.parallel.random import parameter_generator
from megacore.parallel.record import ParamRecord, records

Init = Callable[[str, Tensor, torch.Generator], None]  # fill the full fp32 tensor of a parameter, in place


def draw(rec: ParamRecord, init: Init, seed: int) -> Tensor:
    """This rank's share of a parameter, fp32, on the CPU. The full tensor lives only inside this call. Drawn in fp32
    for every precision, so that an fp64 and a bf16 run start from the same numbers."""
    full = torch.empty(rec.shape, dtype=torch.float32)
    init(rec.canonical, full, parameter_generator(seed, rec.canonical))
    return rec.slice_full(full)


@torch.no_grad()
def materialize(
    module: nn.Module,
    mesh: Mesh,
    init: Init,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Replace every parameter (on meta or not) by this rank's share of `init`'s full tensor. Parameters that are one
    object stay one object. Bit for bit the same model at every layout; memory: one's own shards and one full parameter.
    Raises ValueError for a buffer on the meta device, which no initialiser describes."""
    stray = [name for name, b in module.named_buffers() if b.is_meta]
    if stray:
        raise ValueError(
            f"buffer {stray[0]!r} is on the meta device and has no initialiser; create it with device='cpu'"
        )
    made = {}
    recs = records(module, mesh)
    for name, param in module.named_parameters():
        local = draw(recs[name], init, seed).to(device=device, dtype=dtype)
        made[id(param)] = reborn(param, local)
    for child in module.modules():
        for name, param in list(child.named_parameters(recurse=False)):
            setattr(child, name, made[id(param)])
    return module
