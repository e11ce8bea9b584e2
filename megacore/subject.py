"""What is verified (a model, its plan) and how (batches, precision, steps): values that cross to worker processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacore.comm.collectives import split_range, split_sizes
from megacore.models import gpt, hf_gpt2
from megacore.parallel.batch import IGNORE, MicroBatch
from megacore.parallel.materialize import Init
from megacore.parallel.plan import Plan
from megacore.train.precision import precision

TOY = gpt.GPTConfig(layers=8, hidden=32, heads=8, vocab_size=56, seq_length=16, ffn=64, dropout=0.1)
UNEVEN = gpt.GPTConfig(layers=7, hidden=30, heads=6, vocab_size=50, seq_length=16, ffn=62, dropout=0.1)
TOYS = {"gpt": TOY, "gpt-uneven": UNEVEN}


def _imported(path: str, what: str) -> object:
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{what}={path!r} is not of the form package.module:name; known models: {', '.join(TOYS)}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what}={path!r} cannot be imported ({error}); check the name and the folder") from None


@dataclass(frozen=True)
class Subject:
    """A model: "gpt", "gpt-uneven", a GPTConfig, "package.module:factory" or a module-level function that returns a
    plain model. Its plan: None (known for GPT and Hugging Face's GPT-2), a Plan, a path to one, or a function of the
    model."""

    model: str | gpt.GPTConfig | Callable[[], nn.Module] = "gpt"
    plan: str | Plan | Callable[..., Plan] | None = None

    @property
    def name(self) -> str:
        return self.model if isinstance(self.model, str) else getattr(self.model, "__name__", repr(self.model))

    def resolve(self, seed: int) -> tuple[Callable[[], nn.Module], Plan, Init | None]:
        """(build, plan, init); init None means that `build` gives the weights, the same ones in every process."""
        model = TOYS.get(self.model, self.model) if isinstance(self.model, str) else self.model
        if isinstance(model, gpt.GPTConfig):
            return lambda: gpt.GPT(model, seed), self._plan(lambda: gpt.plan(model)), gpt.initialise(model)
        factory = _imported(model, "model") if isinstance(model, str) else model

        def build() -> nn.Module:
            torch.manual_seed(seed)  # the factory draws from torch's own generator
            made = factory()
            if not isinstance(made, nn.Module):
                raise ValueError(f"model={self.name} gives a {type(made).__name__}, wanted a plain nn.Module")
            return made

        return build, self._plan(lambda: _default_plan(build()), build), None

    def _plan(self, default: Callable[[], Plan], build: Callable[[], nn.Module] | None = None) -> Plan:
        plan = _imported(self.plan, "plan") if isinstance(self.plan, str) else self.plan
        if plan is None:
            return default()
        if callable(plan):
            plan = plan(build()) if build is not None else plan()
        if not isinstance(plan, Plan):
            raise ValueError(
                f"plan={self.plan!r} gives a {type(plan).__name__}, wanted a Plan: Plan(table, vocab_size=...)"
            )
        return plan


def _default_plan(model: nn.Module) -> Plan:
    if isinstance(model, gpt.GPT):
        return gpt.plan(model.config)
    if type(model).__name__ == "GPT2LMHeadModel":
        return hf_gpt2.plan(model)
    vocab = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if vocab is None:
        raise ValueError(
            f"model {type(model).__name__} has no plan and no nn.Embedding to read the vocabulary from; give a plan"
        )
    return Plan({}, vocab)  # data parallelism needs no table


@dataclass(frozen=True)
class Trial:
    """Steps of AdamW on random tokens, with valid tokens spread unevenly over samples (one sample has none)."""

    precision: str = "fp64"
    seed: int = 0
    steps: int = 3
    global_batch: int = 16
    micro_batches: int = 4  # of a rank, where it has samples enough; they differ in size
    seq_length: int = 16
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    timeout: float = 120.0  # seconds after which a layout has failed

    def __post_init__(self) -> None:
        for field in ("steps", "global_batch", "micro_batches", "seq_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is not a positive whole number; give {field} >= 1")

    @property
    def dtype(self) -> torch.dtype:
        return precision(self.precision).parameters

    def batch(self, step: int, vocab_size: int) -> MicroBatch:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + step)
        shape = (self.global_batch, self.seq_length + 1)
        tokens = torch.randint(vocab_size, shape, generator=generator)
        targets = tokens[:, 1:].clone()
        for sample in range(self.global_batch):
            targets[sample, : (sample * 5) % (self.seq_length + 1)] = IGNORE
        targets[step % self.global_batch] = IGNORE
        return MicroBatch.of(tokens[:, :-1], targets, first_sample=step * self.global_batch, step=step)

    def share(self, batch: MicroBatch, index: int, size: int) -> list[MicroBatch]:
        """The micro-batches of data-parallel rank `index` of `size`: its samples, cut as evenly as they go."""
        start, stop = split_range(self.global_batch, size, index)
        count = min(self.micro_batches, stop - start)
        cut, at = [], start
        for number, rows in enumerate(split_sizes(stop - start, count)):
            cut.append(_rows(batch, slice(at, at + rows), number))
            at += rows
        return cut


def _rows(batch: MicroBatch, rows: slice, index: int) -> MicroBatch:
    def take(x: Tensor) -> Tensor:
        return x[rows]

    return MicroBatch(take(batch.ids), take(batch.targets), take(batch.samples), batch.positions, batch.step, index)
