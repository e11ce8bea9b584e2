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
named modules in place, all or none; a model on the meta device stays there until `materialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from megacore.comm.mesh import Group, Mesh
from megacore.parallel.batch import MicroBatch
from megacore.parallel.pairs import check_gelus, check_pairs
from megacore.parallel.random import Streams
from megacore.parallel.regions import guard
from megacore.parallel.rows import Place, check_apart, check_table, places
from megacore.parallel.ties import check_memory, check_ties, tie, tied_names


@dataclass(frozen=True)
class Site:
    """Where a style is applied."""

    name: str
    group: Group
    plan: Plan
    streams: Streams


class Style(Protocol):
    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        """The module that takes the place of `module` (or `module` itself, changed). ValueError, with nothing changed,
        for a module that it does not fit."""


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

    def __post_init__(self) -> None:
        check_table(self.table)
        for name in ("vocab_size", "vocab_multiple"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Plan({name}={value!r}) is not a positive whole number; give {name} >= 1")


def parallelize(model: nn.Module, mesh: Mesh, plan: Plan, streams: Streams | None = None) -> nn.Module:
    """Replace the modules that the plan's table names by their parallel forms, in place; returns the model.

    Weights are cut from the model's own; tied parameters stay tied, and a module of several names is replaced under all
    of them. `streams` (default: the model's own, or new ones of seed 0) are what keyed dropouts draw from: to train
    with them, run the model inside `with streams.at(batch):`. No communication.

    Raises ValueError, and leaves the model as it was, for a row that matches nothing, a module that is more than its
    style reproduces (see plain.py), rows that lack their partner (pairs.py), and sizes that cannot be split. Raises
    ValueError, with the model split already, for a whole parameter among split columns (regions.py).
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is a {type(plan).__name__}, wanted a Plan; give Plan(table, vocab_size=...)")
    check_table(plan.table)  # a dict may have changed since
    streams = streams or getattr(model, "streams", None) or Streams()
    found = places(model, plan.table)
    sites = [Site(p.name, mesh.tp, plan, streams) for p in found]
    shells = [_shell(p, site) for p, site in zip(found, sites, strict=True)]
    _check_together(model, mesh.tp, found, shells)
    tied = tied_names(model)
    check_ties(tied, {n: s for p, s in zip(found, shells, strict=True) if s is not None for n in p.names}, model)
    # styles of a user's own have no shell, so they come first: nothing has been changed yet, should they raise
    made = {i: _own(p, s) for i, (p, s) in enumerate(zip(found, sites, strict=True)) if shells[i] is None}
    check_apart(found, [p for i, p in enumerate(found) if made.get(i, shells[i]) is not p.module])
    for i, (p, site) in enumerate(zip(found, sites, strict=True)):
        new = made.get(i, shells[i])
        if shells[i] is not None:
            p.style.fill(new, p.module, site)
        if new is not p.module:
            new.train(p.module.training)
            for name in p.names:
                model.set_submodule(name, new)
    for first, *others in tied:
        for other in others:
            tie(model, first, other)
    guard(model, mesh.tp, {name: [p.style] for p in found for name in p.names})
    return model


def _shell(place: Place, site: Site) -> nn.Module | None:
    """What will take the place, without weights; None for a style of a user's own, which cannot tell."""
    if not hasattr(place.style, "shell"):
        return None
    try:
        shell = place.style.shell(place.module, site)
    except ValueError as err:
        raise place.error(err) from None
    if shell is not place.module and "" in place.names:
        raise place.error("it is the model itself, which cannot be replaced in place; put it inside another module")
    return shell


def _own(place: Place, site: Site) -> nn.Module:
    try:
        return place.style.apply(place.module, site)
    except (ValueError, AttributeError) as err:
        raise place.error(err) from err


def _check_together(model: nn.Module, group: Group, found: list[Place], shells: list[nn.Module | None]) -> None:
    """What only several rows, or the rest of the model, can tell."""
    forms = {id(p.module): p.style.gelu(p.module) for p in found if hasattr(p.style, "gelu")}
    check_gelus(found, {key: form for key, form in forms.items() if form is not None})
    replaced = [(p, s) for p, s in zip(found, shells, strict=True) if s is not p.module]
    check_memory(model, [name for p, _ in replaced for name in p.names])
    if group.size > 1:
        check_pairs(found, model, group)
