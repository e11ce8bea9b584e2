"""From settings to a model family: the plain model, its plan and its initialiser. A new family is one more entry
here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from megacore.models import gpt
from megacore.parallel.plan import Plan
from megacore.train.config import ModelSettings


@dataclass(frozen=True)
class Family:
    """What the runtime needs of a model: `build()` makes the plain one, on whatever device is current."""

    build: Callable[[], nn.Module]
    plan: Plan
    init: Callable[..., None]
    flops_per_token: float  # forward and backward, at the full sequence length


def family(model: ModelSettings, seed: int) -> Family:
    """The family that `model.kind` names."""
    sizes = gpt.GPTConfig(
        layers=model.layers, hidden=model.hidden, heads=model.heads, vocab_size=model.vocab_size,
        seq_length=model.seq_length, ffn=model.ffn or None, kv_heads=model.kv_heads or None, dropout=model.dropout,
        activation=model.activation,
        tied=model.tied,
    )  # fmt: skip
    return Family(lambda: gpt.GPT(sizes, seed), gpt.plan(sizes), gpt.initialise(sizes), gpt.flops_per_token(sizes))
