"""What `verify` compares with: the plain model in one process, torch's autograd, torch.optim.AdamW; no layer of ours.

The only thing of ours is the mask of a keyed dropout, drawn by its reference in plain torch operations: no generator of
torch's gives a mask that is the same at every layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.comm.mesh import Mesh
from megacore.ops import use
from megacore.parallel.batch import IGNORE
from megacore.parallel.materialize import materialize
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.random import Streams
from megacore.parallel.stage import logits_of
from megacore.parallel.styles import KeyedDropout
from megacore.probe import made, probe
from megacore.subject import Subject, Trial


@dataclass(frozen=True)
class Reference:
    """Full tensors by the plain model's names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping
    weights: dict[str, Tensor]  # after the last step
    hint: str = ""  # why layouts may fail, see megacore.probe


class Serial:
    """The plain model and torch's optimizer, a step at a time: each global batch in one forward."""

    def __init__(self, subject: Subject, trial: Trial):
        build, self.plan, init = subject.resolve(trial.seed)
        self.trial = trial
        with torch.device("meta" if init is not None else "cpu"):
            self.model = made(build, subject.name)
        if init is not None:
            materialize(self.model, Mesh(), init, seed=trial.seed, dtype=trial.dtype)
        self.streams = _key_dropouts(self.model, self.plan, trial.seed)
        self.model.to(trial.dtype).train()
        self.optimizer = _adamw(self.model, trial)

    def backward(self, step: int) -> tuple[float, dict[str, Tensor]]:
        """(loss, gradients before clipping) of a step at the present weights."""
        batch = self.trial.batch(step, self.plan.vocab_size)
        self.optimizer.zero_grad()
        with use("reference", "*"), self.streams.at(batch):
            logits = logits_of(self.model(batch.ids)).flatten(0, 1)
            total = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
            loss = total / batch.valid
            loss.backward()
        _fill_gradients(self.model)
        return loss.item(), {n: p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad}

    def update(self, gradients: Mapping[str, Tensor] | None = None) -> float:
        """Clip and step on the gradients of `backward`, or on those given. Returns their norm."""
        for name, gradient in (gradients or {}).items():
            self.model.get_parameter(name).grad = gradient.clone()
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.trial.clip))
        self.optimizer.step()
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from these weights; the moments stay."""
        for name, param in self.model.named_parameters():
            param.copy_(weights[name])


def run_serial(subject: Subject, trial: Trial) -> Reference:
    """The trial's steps in one process. Raises ValueError, one line, for a model that cannot be compared."""
    serial = Serial(subject, trial)
    hint = probe(serial.model, serial.plan.vocab_size, trial, serial.streams)
    serial.model.train()
    losses, norms, first = [], [], {}
    for step in range(trial.steps):
        loss, gradients = serial.backward(step)
        first = first or gradients
        norms.append(serial.update())
        losses.append(loss)
    return Reference(losses, norms, first, serial.weights(), hint)


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


def _adamw(model: nn.Module, trial: Trial) -> torch.optim.AdamW:
    trainable: Sequence[Tensor] = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": trial.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=trial.lr, betas=trial.betas, eps=trial.eps)
