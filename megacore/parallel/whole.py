"""What takes a parallel model for the whole one: it works rightly, or stops with one line that says what to do.

| taken for whole                                  | here                                                              |
|--------------------------------------------------|-------------------------------------------------------------------|
| `generate`, a forward with `labels=`             | right with Head(gather=True); refused where logits stay split     |
| `save_pretrained`, `push_to_hub`, resizing, ...  | refused: megacore.full_state_dict gives the whole tensors         |
| DistributedDataParallel, FSDP over too many ranks| refused: the ranks that share out one model are no replicas       |
| replicated parameters changed rank by rank       | refused at the next training forward: torch's clip_grad_norm_, say|

The guards are attributes and hooks of one model, never of a class: other models in the process are untouched, and a
deepcopy is guarded as its original is. They act on calls of the model itself, not on a Stage's, whose loss knows the
split.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megacore.comm.mesh import Group, Mesh
from megacore.parallel.head import heads_of
from megacore.parallel.record import ParamRecord, records

SAVES = ("save_pretrained", "push_to_hub", "save_adapter")
RESHAPES = ("resize_token_embeddings", "resize_position_embeddings", "prune_heads", "set_input_embeddings")


def guard_whole(model: nn.Module, mesh: Mesh) -> None:
    """Guard `model`, of which each rank of mesh.model (tensor x pipeline) holds a part. No communication here; a
    training forward of the guarded model compares replicated parameters: one all-gather of 8 bytes a parameter."""
    if mesh.model.size == 1 or any(isinstance(hook, _Replicas) for hook in model._forward_pre_hooks.values()):
        return
    model._ddp_params_and_buffers_to_ignore = _Wrapping(mesh)
    model.register_forward_pre_hook(_Replicas(mesh))
    for module in model.modules():
        _guard_methods(module, mesh)
        if "labels" in _arguments(module):
            module.register_forward_pre_hook(_refuse_labels, with_kwargs=True)


def _guard_methods(module: nn.Module, mesh: Mesh) -> None:
    for name in SAVES:
        if hasattr(type(module), name):
            remedy = "call megacore.full_state_dict(model, mesh) on every rank and save that on rank 0"
            setattr(module, name, _Refusal(f"{name}: this rank holds a part of the model; {remedy}"))
    for name in RESHAPES:
        if hasattr(type(module), name):
            text = "this rank holds a part of the model; do it on the plain model, before parallelize"
            setattr(module, name, _Refusal(f"{name}: {text}"))
    if hasattr(type(module), "generate"):
        module.generate = partial(_generate, module, mesh)


def _arguments(module: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(type(module).forward).parameters)
    except (TypeError, ValueError):  # a forward that is no Python function
        return ()


@dataclass(frozen=True)
class _Refusal:
    text: str

    def __call__(self, *_: object, **__: object) -> None:
        raise RuntimeError(self.text)


def _split_logits(module: nn.Module) -> bool:
    return any(not head.gather_output for head in heads_of(module))


def _refuse_labels(module: nn.Module, args: tuple, kwargs: dict) -> None:
    at = _arguments(module).index("labels") - 1  # without self
    labels = kwargs.get("labels", args[at] if at < len(args) else None)
    if labels is not None and _split_logits(module):
        raise ValueError(
            "labels: the model's own loss needs the whole vocabulary, and logits are split over tp ranks; use "
            "Head(gather=True) in the plan, or megacore.parallel.loss.vocab_parallel_cross_entropy on the logits"
        )


def _generate(module: nn.Module, mesh: Mesh, *args: object, **kwargs: object) -> object:
    """The model's own generate. Every rank of tp must run it alike: inputs, and for sampling the generator's state,
    are compared first (8 bytes a rank)."""
    if mesh.pp.size > 1:
        raise ValueError(f"generate: pp={mesh.pp.size} keeps layers on other ranks; use a layout with pp=1")
    if _split_logits(module):
        raise ValueError(
            "generate: logits are split over tp ranks, and each would choose among its own tokens; "
            "use Head(gather=True) in the plan"
        )
    tensors = [x for x in (*args, *(kwargs[k] for k in sorted(kwargs))) if isinstance(x, Tensor)]
    _agree(tensors, mesh.tp, "generate: ranks of one tp group were given different inputs; give each the same")
    settings = kwargs.get("generation_config") or getattr(module, "generation_config", None)
    if kwargs.get("do_sample", getattr(settings, "do_sample", False)):
        device = next((x.device for x in tensors), torch.device("cpu"))
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        _agree([state], mesh.tp, "generate: ranks would draw different tokens; call torch.manual_seed(n) alike on each")
    return type(module).generate(module, *args, **kwargs)


def _agree(tensors: list[Tensor], group: Group, complaint: str) -> None:
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(repr((tuple(x.shape), x.dtype)).encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.tensor([int.from_bytes(digest.digest()[:7])])
    if len(_gathered(mine, group).unique(dim=0)) > 1:
        raise ValueError(complaint)


def _gathered(row: Tensor, group: Group) -> Tensor:
    """[ranks, n] from [n] of each."""
    if group.pg is None:
        return row[None]
    device = "cuda" if dist.get_backend(group.pg) == "nccl" else "cpu"
    parts = [torch.empty_like(row, device=device) for _ in range(group.size)]
    dist.all_gather(parts, row.to(device), group=group.pg)
    return torch.stack(parts).cpu()


def _check_replicas(pg: dist.ProcessGroup, mesh: Mesh, wrapper: str) -> None:
    """ValueError where `pg` holds other ranks of the same copy of the model. Every rank of such a group sees it."""
    mixed = set(dist.get_process_group_ranks(pg)) & set(mesh.model.ranks)
    if len(mixed) > 1:
        remedy = "process_group=mesh.dp.pg" if wrapper != "FSDP" else "mesh=DeviceMesh.from_group(mesh.dp.pg, ...)"
        raise ValueError(
            f"{wrapper}: its group holds ranks {sorted(mixed)}, which hold different parts of one model, and would mix "
            f"them; give it {remedy}" + ("" if mesh.dp.size > 1 else ", or, with dp=1, do not wrap")
        )


def _is_whole(rec: ParamRecord) -> bool:
    """Every tp rank holds all of it."""
    ranges = tuple((0, n) for n in rec.shape)
    return rec.shape == rec.local_shape and [b.full for b in rec.boxes] == [ranges]


def _fsdp_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups over which FSDP2 shards or replicates any part of the model."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for held in groups:
                mesh = getattr(getattr(held, "mesh_info", None), "mesh", None)
                found += mesh.get_all_groups() if mesh is not None else []
    return found


class _Wrapping:
    """The names of a module that DDP is to leave alone: none. DDP asks for them when it is built, after it knows its
    group and before its first message, which is the one moment to stop it in."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __iter__(self) -> Iterator[str]:
        frame = inspect.currentframe()
        caller = frame.f_back.f_locals.get("self") if frame and frame.f_back else None
        if isinstance(caller, DistributedDataParallel):
            _check_replicas(caller.process_group, self.mesh, "DistributedDataParallel")
        return iter(())

    def __contains__(self, name: object) -> bool:
        return False


class _Replicas:
    """Before a forward: wrappers keep to replicas, and parameters that tp ranks hold alike are still alike.

    Alike means bits, where sums have one order: on CPUs, and on GPUs with deterministic algorithms. The first forward
    is looked at (ranks may have built different weights), then training ones, and none that is being compiled.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._seen: dict[str, tuple[int, int, int]] = {}  # name -> (address, version, digest)

    def __call__(self, model: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            return
        ddp = DistributedDataParallel._active_ddp_module  # also one around a module that holds this one
        if ddp is not None:
            _check_replicas(ddp.process_group, self.mesh, "DistributedDataParallel")
        if isinstance(model, FSDPModule):
            for pg in _fsdp_groups(model):
                _check_replicas(pg, self.mesh, "FSDP")
        elif self.mesh.tp.pg is not None and (not self._seen or (model.training and torch.is_grad_enabled())):
            self._compare(model)

    @torch.no_grad()
    def _compare(self, model: nn.Module) -> None:
        params = dict(model.named_parameters())
        alike = [n for n, rec in records(model, self.mesh).items() if _is_whole(rec)]
        if not alike or any(p.is_meta for p in params.values()):
            return
        if params[alike[0]].is_cuda and not torch.are_deterministic_algorithms_enabled():
            return
        rows = _gathered(torch.tensor([self._digest(n, params[n]) for n in alike]), self.mesh.tp)
        differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        if differing:
            raise ValueError(
                f"{alike[differing[0]]} ({len(differing)} of {len(alike)} replicated parameters) differs between tp "
                f"ranks {self.mesh.tp.ranks}: something changed it rank by rank. Clip with "
                "megacore.clip_grad_norm_(model, mesh, max_norm) instead of torch's; give every rank of tp the same "
                "seed and data; and where its gradient is that of a rank's own columns, give its module a Partial() row"
            )

    def _digest(self, name: str, param: Tensor) -> int:
        key = (param.data_ptr(), param._version)
        if self._seen.get(name, (None, None))[:2] != key:
            words = param.detach().contiguous().reshape(-1).view(torch.uint8).long()
            weights = torch.arange(1, words.numel() + 1, device=words.device)
            self._seen[name] = (*key, int((words * weights).sum()))
        return self._seen[name][2]
