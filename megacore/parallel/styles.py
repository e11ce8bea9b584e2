"""Styles: what a row of a plan's table makes of the module it names. A new one is a frozen dataclass with `apply`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from megacore.comm.mesh import Group
from megacore.parallel.embedding import VocabParallelEmbedding, vocab_pieces, vocab_range
from megacore.parallel.head import VocabHead
from megacore.parallel.layers import ColumnParallelLinear, Pieces, RowParallelLinear, even_pieces
from megacore.parallel.plan import Site
from megacore.parallel.random import Dropout
from megacore.parallel.record import head_pieces


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
    """The output nn.Linear -> VocabHead, column-parallel by vocabulary, as the embedding is. gather=True: the model
    gives logits of the whole vocabulary on every rank, for `generate`, `labels=` and losses that know no split (memory:
    all logits, and one all-gather of them; training by TrainStep keeps them split all the same)."""

    gather: bool = False

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        vocab, multiple, group = module.weight.shape[0], site.plan.vocab_multiple, site.group
        _, _, rows = vocab_range(vocab, group.size, group.index, multiple)
        pieces = vocab_pieces(vocab, group, multiple)
        return VocabHead.from_linear(module, group, pieces=pieces, padded=rows, gather_output=self.gather)


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
