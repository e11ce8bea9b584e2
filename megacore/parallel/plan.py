"""A plan: how a plain single-device model is split, as a table from module names to styles.

    PLAN = Plan(
        vocab_size=50257,
        table={
            "embed.tok":        Vocab(),
            "blocks.*.attn":    Shares(12, 12, {"heads": ("q", 1)}),
            "blocks.*.attn.qkv": Qkv(heads=12, kv_heads=12),
            "blocks.*.attn.out": QueryHeads(12, 12, row=True),
            "head":             Head(),
        },
        chain=links,      # the pieces that pipeline stages are cut from
    )

`*` stands for one name between dots. Modules that no row names are whole on every rank. `parallelize` replaces the
named modules in place; a model on the meta device stays there until `materialize`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megacore.comm.mesh import Group, Mesh
from megacore.parallel.batch import MicroBatch
from megacore.parallel.layers import Sharded
from megacore.parallel.random import Streams
from megacore.parallel.whole import guard_whole


@dataclass(frozen=True)
class Site:
    """Where a style is applied."""

    name: str
    group: Group
    plan: Plan
    streams: Streams


class Style(Protocol):
    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        """The module that takes the place of `module` (or `module` itself, changed)."""


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Link:
    """One piece of the model's forward that a pipeline stage can hold: the modules (and parameters) that it owns,
    by name, and how it runs them."""

    modules: tuple[str, ...]
    run: Callable[[nn.Module, Tensors, MicroBatch], Tensors]
    cost: float = 1.0  # relative, for the partition


@dataclass(frozen=True)
class Plan:
    """The table, the chain of links (None: no pipeline), and the vocabulary. The last link returns {"logits": [B, S,
    V/t]}."""

    table: Mapping[str, Style]
    vocab_size: int
    chain: Callable[[nn.Module], list[Link]] | None = None
    vocab_multiple: int = 1  # rows of every vocabulary shard are padded to a multiple of this
    gives_up_logits: bool = False  # they go from the one Head to the loss alone: it may compute them itself


def _matches(pattern: str, names: list[str]) -> list[str]:
    wanted = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [n for n in names if wanted.fullmatch(n)]


def parallelize(model: nn.Module, mesh: Mesh, plan: Plan, streams: Streams | None = None) -> nn.Module:
    """Replace the modules that the plan's table names by their parallel forms, in place; returns the model.

    Weights are cut from the model's own; tied parameters stay tied. `streams` (default: the model's own, or new ones of
    seed 0) are what keyed dropouts draw from: to train with them, run the model inside `with streams.at(batch):`.
    Raises ValueError for a row that matches nothing (a misspelt name would leave a layer whole and right, but slow) and
    for sizes that cannot be split. No communication.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is a {type(plan).__name__}, wanted a Plan; give Plan(table, vocab_size=...)")
    streams = streams or getattr(model, "streams", None) or Streams()
    names = [name for name, _ in model.named_modules()]
    tied = tied_names(model)
    for pattern, style in plan.table.items():
        found = _matches(pattern, names)
        if not found:
            raise ValueError(
                f"plan row {pattern!r} matches no module of {type(model).__name__}; see model.named_modules()"
            )
        for name in found:
            old = model.get_submodule(name)
            if isinstance(old, Sharded):
                raise ValueError(f"{name} is parallel already; call parallelize once, on the plain model")
            try:
                new = style.apply(old, Site(name, mesh.tp, plan, streams))
            except ValueError as err:
                raise ValueError(f"{name}: {err}") from None
            except AttributeError as err:
                raise ValueError(
                    f"{name}: {type(style).__name__}() does not fit a {type(old).__name__}: {err}"
                ) from None
            if new is not old:
                new.train(old.training)
                model.set_submodule(name, new)
    for first, *others in tied:
        for other in others:
            _tie(model, first, other)
    guard_whole(model, mesh)
    return model


def tied_names(model: nn.Module) -> list[list[str]]:
    """Full names that are one and the same parameter, first name first."""
    by_id: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def _tie(model: nn.Module, first: str, other: str) -> None:
    param = model.get_parameter(first)
    owner, _, name = other.rpartition(".")
    if model.get_parameter(other).shape != param.shape:
        raise ValueError(f"{other} is tied to {first}, but the plan splits them differently; give both the same style")
    setattr(model.get_submodule(owner), name, param)
