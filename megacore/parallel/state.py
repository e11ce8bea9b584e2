"""The plain model's state_dict, put together from the parts that the ranks hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megacore.comm.mesh import Mesh
from megacore.parallel.record import Box, records


@dataclass(frozen=True)
class _Entry:
    """One name of the plain model's state_dict: what the rank that has it tells the others."""

    name: str
    same_as: str  # the name under which the tensor travels: another one's where two are one parameter
    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def full_state_dict(model: nn.Module, mesh: Mesh, *, everywhere: bool = False) -> dict[str, Tensor]:
    """{name: full tensor} by the plain model's names, on the CPU, in the order of its stages: parameters (padding cut
    off, fused projections in their own order) and persistent buffers (those of the first tensor rank), bits and dtypes
    kept. Names that are one parameter in the plain model are one tensor.

    Filled on the first rank of each copy of the model (the first of mesh.model), or with `everywhere` on all ranks; {}
    on the others. Collective over mesh.model: call it on every rank. Memory: the whole model where it is filled, one
    full tensor elsewhere. Raises ValueError for a buffer or parameter on the meta device, on the rank that has it.

        whole = megacore.full_state_dict(model, mesh)
        if mesh.rank == 0:
            GPT2LMHeadModel.from_pretrained(None, config=config, state_dict=whole).save_pretrained("folder")
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}, wanted the Mesh of parallelize; full_state_dict(model, mesh)"
        )
    model = model.module if isinstance(model, DistributedDataParallel) else model
    local, entries = _mine(model, mesh)
    keep = everywhere or mesh.model.index == 0
    whole: dict[str, Tensor] = {}
    for entry in _all(entries, mesh):
        if entry.name in whole:
            continue
        if entry.same_as != entry.name:
            if keep:
                whole[entry.name] = whole[entry.same_as]
            continue
        full = _joined(entry, *local.get(entry.name, (None, ())), mesh)
        if keep:
            whole[entry.name] = full.cpu()
    return whole


def _mine(model: nn.Module, mesh: Mesh) -> tuple[dict[str, tuple[Tensor, tuple[Box, ...]]], list[_Entry]]:
    """This rank's tensors with the boxes that it contributes, and the entries of its names."""
    recs = records(model, mesh)
    params = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): n for n, p in model.named_parameters()}
    local: dict[str, tuple[Tensor, tuple[Box, ...]]] = {}
    entries = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):  # extra state, which no rank can join
            continue
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; call materialize first")
        if name in params:
            rec = recs[first[id(tensor)]]
            travels, shape, boxes = rec.canonical if name == rec.name else rec.name, rec.shape, rec.counted()
        else:
            travels, shape = name, tuple(tensor.shape)
            ranges = tuple((0, n) for n in shape)
            boxes = (Box(ranges, ranges),) if mesh.tp.index == 0 else ()
        local[name] = (tensor.detach(), boxes)
        entries.append(_Entry(name, travels, shape, tensor.dtype))
    return local, entries


def _all(entries: list[_Entry], mesh: Mesh) -> list[_Entry]:
    """The entries of every stage, in their order; those that travel under another's name last."""
    told = [entries]
    if mesh.pp.size > 1:
        told = [None] * mesh.pp.size
        dist.all_gather_object(told, entries, group=mesh.pp.pg)
    return sorted((entry for stage in told for entry in stage), key=lambda entry: entry.same_as != entry.name)


def _joined(entry: _Entry, tensor: Tensor | None, boxes: tuple[Box, ...], mesh: Mesh) -> Tensor:
    """Each element comes from one rank; the bytes are summed, so that no arithmetic of floats touches them."""
    device = tensor.device if tensor is not None else _device(mesh)
    full = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
    for box in boxes:
        full[tuple(slice(*r) for r in box.full)] = tensor[tuple(slice(*r) for r in box.local)]
    if mesh.model.size > 1 and full.numel():
        dist.all_reduce(full.view(-1).view(torch.uint8), group=mesh.model.pg)
    return full


def _device(mesh: Mesh) -> torch.device:
    cuda = mesh.model.pg is not None and dist.get_backend(mesh.model.pg) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
