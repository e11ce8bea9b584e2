"""What `verify` compares with: the plain model in one process, torch's autograd, torch.optim.AdamW; no layer of ours.

The only thing of ours is the mask of a keyed dropout, drawn by its reference in plain torch operations: no generator of
torch's gives a mask that is the same at every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.comm.mesh import Mesh
from megacore.ops import use
from megacore.parallel.batch import IGNORE, MicroBatch
from megacore.parallel.materialize import materialize
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.random import Streams
from megacore.parallel.stage import logits_of
from megacore.parallel.styles import KeyedDropout
from megacore.subject import Subject, Trial


@dataclass(frozen=True)
class Reference:
    """Full tensors by the plain model's names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping
    weights: dict[str, Tensor]  # after the last step


def run_serial(subject: Subject, trial: Trial) -> Reference:
    """The trial's steps on one process, each global batch in one forward."""
    build, plan, init = subject.resolve(trial.seed)
    with torch.device("meta" if init is not None else "cpu"):
        model = build()
    if init is not None:
        materialize(model, Mesh(), init, seed=trial.seed, dtype=trial.dtype)
    streams = _key_dropouts(model, plan, trial.seed)
    _check_forward(model.to(trial.dtype).eval(), plan, trial)
    model.train()
    optimizer = _adamw(model, trial)
    losses, norms, gradients = [], [], {}
    with use("reference", "*"):
        for step in range(trial.steps):
            batch = trial.batch(step, plan.vocab_size)
            optimizer.zero_grad()
            loss = _loss(model, streams, batch)
            loss.backward()
            _fill_gradients(model)
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), trial.clip)))
            optimizer.step()
            losses.append(loss.item())
    return Reference(losses, norms, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


@torch.no_grad()
def _check_forward(model: nn.Module, plan: Plan, trial: Trial) -> None:
    """ValueError unless the model maps token ids [B, S] to logits [B, S, V], V the plan's vocabulary."""
    logits = logits_of(model(torch.zeros(1, trial.seq_length, dtype=torch.int64)))
    want = (1, trial.seq_length, plan.vocab_size)
    if not isinstance(logits, Tensor) or tuple(logits.shape) != want:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(
            f"model gives {got} for ids of shape {want[:2]}, wanted logits {want}; check forward and vocab_size"
        )


def _fill_gradients(model: nn.Module) -> None:
    """A parameter that this batch did not use has gradient zero, not none: it decays and its moments go on, as in a
    distributed run, where a rank cannot know whether another one used it."""
    for param in model.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)


def _key_dropouts(model: nn.Module, plan: Plan, seed: int) -> Streams:
    streams = getattr(model, "streams", None) or Streams(seed)
    rows = {name: style for name, style in plan.table.items() if isinstance(style, KeyedDropout)}
    parallelize(model, Mesh(), Plan(rows, plan.vocab_size), streams)
    return streams


def _loss(model: nn.Module, streams: Streams, batch: MicroBatch) -> Tensor:
    with streams.at(batch):
        logits = logits_of(model(batch.ids))
    total = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / batch.valid


def _adamw(model: nn.Module, trial: Trial) -> torch.optim.AdamW:
    trainable: Sequence[Tensor] = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": trial.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=trial.lr, betas=trial.betas, eps=trial.eps)
