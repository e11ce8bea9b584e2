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
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from megacore.comm.mesh import Group, Mesh
from megacore.parallel.batch import MicroBatch
from megacore.parallel.embedding import VocabParallelEmbedding, vocab_pieces, vocab_range
from megacore.parallel.layers import ColumnParallelLinear, Pieces, RowParallelLinear, even_pieces
from megacore.parallel.random import Dropout, Streams
from megacore.parallel.record import head_pieces


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


@dataclass(frozen=True)
class Column:
    """nn.Linear -> ColumnParallelLinear; `units` indivisible units (heads); `activation` fuses the GeLU that
    follows."""

    gather_output: bool = False
    activation: str | None = None
    units: int | None = None
    transposed: bool = False

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        options = {}
        if self.units is not None:
            size = module.weight.shape[int(self.transposed)]
            options["pieces"] = even_pieces(size, site.group, self.units)
        return ColumnParallelLinear.from_linear(
            module,
            site.group,
            gather_output=self.gather_output,
            activation=self.activation,
            transposed=self.transposed,
            **options,
        )


@dataclass(frozen=True)
class Qkv:
    """One nn.Linear with rows [q | k | v] -> column-parallel by heads; KV heads are replicated where ranks outnumber
    them."""

    heads: int
    kv_heads: int
    transposed: bool = False

    def pieces(self, size: int, group: Group) -> tuple[Pieces, ...]:
        width = size // (self.heads + 2 * self.kv_heads)
        found = []
        for i in range(group.size):
            q, kv, first = head_pieces(self.heads, self.kv_heads, group.size, i)
            blocks = ((q, 0, True), (kv, self.heads, first), (kv, self.heads + self.kv_heads, first))
            found.append(tuple((((at + a) * width, (at + b) * width), own) for (a, b), at, own in blocks))
        return tuple(found)

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        size = module.weight.shape[int(self.transposed)]
        return ColumnParallelLinear.from_linear(
            module, site.group, pieces=self.pieces(size, site.group), transposed=self.transposed
        )


@dataclass(frozen=True)
class KvHeads:
    """A separate k or v nn.Linear -> column-parallel by KV heads, replicated where ranks outnumber them."""

    heads: int
    kv_heads: int

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        width = module.weight.shape[0] // self.kv_heads
        found = []
        for i in range(site.group.size):
            _, (a, b), first = head_pieces(self.heads, self.kv_heads, site.group.size, i)
            found.append((((a * width, b * width), first),))
        return ColumnParallelLinear.from_linear(module, site.group, pieces=tuple(found))


@dataclass(frozen=True)
class QueryHeads:
    """A separate q nn.Linear -> column-parallel by query heads; with row=True the output projection, row-parallel."""

    heads: int
    kv_heads: int
    row: bool = False
    transposed: bool = False

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        size = module.weight.shape[int(self.row) ^ int(self.transposed)]
        width, found = size // self.heads, []
        for i in range(site.group.size):
            (a, b), _, _ = head_pieces(self.heads, self.kv_heads, site.group.size, i)
            found.append((((a * width, b * width), True),))
        layer = RowParallelLinear if self.row else ColumnParallelLinear
        return layer.from_linear(module, site.group, pieces=tuple(found), transposed=self.transposed)


@dataclass(frozen=True)
class Row:
    """nn.Linear -> RowParallelLinear."""

    units: int | None = None
    input_is_parallel: bool = True
    transposed: bool = False

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        size = module.weight.shape[1 - int(self.transposed)]
        return RowParallelLinear.from_linear(
            module,
            site.group,
            input_is_parallel=self.input_is_parallel,
            pieces=even_pieces(size, site.group, self.units),
            transposed=self.transposed,
        )


@dataclass(frozen=True)
class Vocab:
    """nn.Embedding -> VocabParallelEmbedding."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        return VocabParallelEmbedding.from_embedding(module, site.group, site.plan.vocab_multiple)


@dataclass(frozen=True)
class Head:
    """The output nn.Linear -> column-parallel by vocabulary, as the embedding is; logits are never gathered."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        vocab, multiple, group = module.weight.shape[0], site.plan.vocab_multiple, site.group
        _, _, rows = vocab_range(vocab, group.size, group.index, multiple)
        return ColumnParallelLinear.from_linear(module, group, pieces=vocab_pieces(vocab, group, multiple), padded=rows)


@dataclass(frozen=True)
class Shares:
    """Set integer attributes of a module to this rank's share of heads: Shares(heads, kv_heads,
    attributes={"num_heads": ("q", 1), "split_size": ("q", 64)}) sets num_heads to the local query heads and split_size
    to 64 times as many."""

    heads: int
    kv_heads: int
    attributes: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        q, kv, _ = head_pieces(self.heads, self.kv_heads, site.group.size, site.group.index)
        for attribute, (which, width) in self.attributes.items():
            getattr(module, attribute)  # a misspelt attribute is an error, not a new attribute
            start, stop = {"q": q, "kv": kv}[which]
            setattr(module, attribute, (stop - start) * width)
        return module


@dataclass(frozen=True)
class HeadDropout:
    """A Dropout on attention probabilities [B, heads, S, S]: its masks are keyed by the global head."""

    heads: int
    kv_heads: int

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        (start, _), _, _ = head_pieces(self.heads, self.kv_heads, site.group.size, site.group.index)
        return Dropout(module.p, module.streams, module.name, group_start=start)


@dataclass(frozen=True)
class KeyedDropout:
    """nn.Dropout of a foreign model -> Dropout with masks that no layout changes."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        if module.p == 0:
            return module
        return Dropout(module.p, site.streams, site.name)


@dataclass(frozen=True)
class Fused:
    """An activation that the Column before it computes already."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        return nn.Identity()


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
    gives_up_logits: bool = False  # they come straight from the head, so the loss's gradient may be written over them


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
            try:
                new = style.apply(old, Site(name, mesh.tp, plan, streams))
            except ValueError as err:
                raise ValueError(f"{name}: {err}") from None
            if new is not old:
                new.train(old.training)
                model.set_submodule(name, new)
    for first, *others in tied:
        for other in others:
            _tie(model, first, other)
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
