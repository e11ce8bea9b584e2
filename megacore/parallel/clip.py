"""Clipping of plain `.grad`s in a loop of the user's own: what torch.nn.utils.clip_grad_norm_ does to the whole model.

norm = (sum over all elements of the model, each once, of |grad|^p)^(1/p)        p = inf: the largest |grad|
grad = grad * min(1, max_norm / (norm + 1e-6))
"""

from __future__ import annotations

from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.comm.mesh import Mesh
from megacore.parallel.record import ParamRecord, records
from megacore.parallel.replicas import SharedBoxes, sum_tied

SUMMED = "_megacore_summed"  # attribute of a parameter: (its gradient, the gradient's version) as left by us


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    mesh: Mesh,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of a parallel model in place; returns the norm before clipping, an fp64 scalar.

    Norm and factor are the same on every rank, and are those that torch's function gives the plain model. First makes
    gradients whole that are still partial over tensor ranks or stages (KV heads held by several ranks, tied copies), so
    it belongs after the last backward and any data-parallel sum, and before optimizer.step(); a second call adds
    nothing. max_norm=inf only does that. Replicas over dp must agree already, as DDP(model,
    process_group=mesh.dp.pg) leaves them. A gradient that is not finite gives a norm that is not finite: RuntimeError
    with error_if_nonfinite, on every rank. ValueError for a model that is no Module (records need its tree).
    Cost: one read of the gradients and one all-reduce of one number over `mesh.model`. Collective over it.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, wanted the parallel model itself, not its parameters")
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}, wanted the Mesh of parallelize; clip_grad_norm_(model, mesh, max)"
        )
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0 or not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}, norm_type={norm_type}: give max_norm >= 0 and norm_type > 0")
    params = dict(model.named_parameters())
    recs = records(model, mesh)
    _complete(params, recs, mesh)
    norm = _norm({n: p.grad for n, p in params.items() if p.grad is not None}, recs, mesh, norm_type)
    if error_if_nonfinite and not isfinite(norm.item()):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}; look at the loss and its inputs"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in params.values():
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.device, p.grad.dtype))
            setattr(p, SUMMED, (p.grad, p.grad._version))
    return norm


def _complete(params: dict[str, nn.Parameter], recs: dict[str, ParamRecord], mesh: Mesh) -> None:
    """Sum what several tensor ranks or stages hold partial gradients of, unless this module did so since backward."""
    names = [n for n, p in params.items() if p.requires_grad and (recs[n].shared or recs[n].tie is not None)]
    todo = []
    for name in names:
        p = params[name]
        grad, version = getattr(p, SUMMED, (None, None))
        if p.grad is None:  # the ranks that have one wait for the others
            p.grad = torch.zeros_like(p)
        if grad is not p.grad or version != p.grad._version:
            todo.append(name)
    shared = [n for n in todo if recs[n].shared]
    if shared and mesh.tp.size > 1:
        grads = {n: params[n].grad for n in shared}
        SharedBoxes({n: recs[n] for n in shared}, shared, mesh.tp, grads[shared[0]].device).sum_(grads)
    sum_tied({n: params[n].grad for n in todo if recs[n].tie is not None}, recs, mesh.embed)


def _norm(grads: dict[str, Tensor], recs: dict[str, ParamRecord], mesh: Mesh, p: float) -> Tensor:
    device = next((g.device for g in grads.values()), torch.device("cpu"))
    pieces = [grad[tuple(slice(*s) for s in box.local)] for name, grad in grads.items() for box in recs[name].counted()]
    pieces = [piece for piece in pieces if piece.numel()]
    norms = torch.stack(torch._foreach_norm(pieces, p, dtype=torch.float64)) if pieces else torch.zeros(1)
    local = norms.double().max() if p == inf else norms.double().pow(p).sum()
    # NaN is no number to a maximum of every backend: it travels beside it
    packed = torch.stack([torch.nan_to_num(local, nan=0.0, posinf=inf), local.isnan().double()]).to(device)
    if mesh.model.size > 1:
        dist.all_reduce(packed, dist.ReduceOp.MAX if p == inf else dist.ReduceOp.SUM, group=mesh.model.pg)
    norm = packed[0] if p == inf else packed[0].pow(1 / p)
    return torch.where(packed[1] > 0, torch.full_like(norm, torch.nan), norm)
