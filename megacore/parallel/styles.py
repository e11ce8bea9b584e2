"""Styles: what a row of a plan's table makes of the module it names.

A new one is a frozen dataclass with `apply(module, site)`, which gives the module that takes the place. Those here also
say beforehand, changing nothing, what would come of it: `shell`, the replacement without weights, which raises for all
that cannot be split or would be lost (see plain.py), and `flow`, what leaves or enters it split (see pairs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from megacore.comm.mesh import Group
from megacore.parallel.embedding import VocabParallelEmbedding, vocab_pieces, vocab_range
from megacore.parallel.gelu import FORMS, gelu_form
from megacore.parallel.head import VocabHead
from megacore.parallel.heads import check_counts, kv_pieces, qkv_pieces, query_pieces
from megacore.parallel.layers import ColumnParallelLinear, Pieces, RowParallelLinear, Sharded, even_pieces
from megacore.parallel.pairs import Flow
from megacore.parallel.plain import check_dropout, check_heir, check_linear, inherit
from megacore.parallel.plan import Site
from megacore.parallel.random import Dropout
from megacore.parallel.record import head_pieces


class Swap:
    """What the styles share. `shell` says what would come, `fill` makes it so, `apply` is both."""

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        """The module that will take the place, its parameters on meta. ValueError for what would not be the same."""
        raise NotImplementedError

    def fill(self, shell: nn.Module, module: nn.Module, site: Site) -> None:
        """Give the shell this rank's share of the module's weights, and what was set on the module."""
        if isinstance(shell, Sharded):
            shell._adopt(module)
        elif shell is not module:
            inherit(shell, module)

    def flow(self, module: nn.Module, group: Group) -> Flow | None:
        """What leaves or enters the module split over ranks; None: nothing does."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        shell = self.shell(module, site)
        self.fill(shell, module, site)
        return shell


@dataclass(frozen=True)
class Column(Swap):
    """nn.Linear -> ColumnParallelLinear; `units` indivisible units (heads); `activation` fuses the GeLU that
    follows. `blocks`: the rows are that many blocks, one after another ([gate | up]: 2), of which each rank has its
    share of each; `units` are then those of one block."""

    gather_output: bool = False
    activation: str | None = None
    units: int | None = None
    transposed: bool = False
    blocks: int | None = None

    def __post_init__(self) -> None:
        check_counts("Column", units=self.units, blocks=self.blocks)
        if self.activation is not None and self.activation not in FORMS:
            raise ValueError(
                f"Column(activation={self.activation!r}) is not a form of GeLU; choose 'tanh', 'none' (erf) or None"
            )

    def pieces(self, size: int, group: Group) -> tuple[Pieces, ...]:
        blocks = self.blocks or 1
        if size % blocks:
            raise ValueError(f"blocks={blocks} does not divide its {size} rows; give the number of equal blocks")
        width = size // blocks
        one = even_pieces(width, group, self.units)
        starts = range(0, size, width)
        return tuple(tuple(((at + a, at + b), own) for at in starts for (a, b), own in rank) for rank in one)

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_linear(module, self.transposed)
        return ColumnParallelLinear.like(
            module,
            site.group,
            gather_output=self.gather_output,
            activation=self.activation,
            transposed=self.transposed,
            pieces=self.pieces(module.weight.shape[int(self.transposed)], site.group),
        )

    def flow(self, module: nn.Module, group: Group) -> Flow | None:
        if self.gather_output:
            return None
        size, blocks = module.weight.shape[int(self.transposed)], self.blocks or 1
        told = self.blocks is not None or self.units is not None
        one = even_pieces(size // blocks, group, self.units)
        return Flow(True, size // blocks, one, None if told else size)

    def gelu(self, module: nn.Module) -> tuple[str, str] | None:
        return None if self.activation is None else ("column", self.activation)


@dataclass(frozen=True)
class Qkv(Swap):
    """One nn.Linear with rows [q | k | v] -> column-parallel by heads; KV heads are replicated where ranks outnumber
    them. interleaved=True: the rows are [q ... q k v] for one KV head after another, as Megatron, GPT-NeoX, BLOOM and
    Falcon have them (with as many KV heads as heads: [q k v] a head)."""

    heads: int
    kv_heads: int
    transposed: bool = False
    interleaved: bool | None = None

    def __post_init__(self) -> None:
        check_counts("Qkv", heads=self.heads, kv_heads=self.kv_heads)

    def pieces(self, size: int, group: Group) -> tuple[Pieces, ...]:
        return qkv_pieces(self.heads, self.kv_heads, size, group, bool(self.interleaved))

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_linear(module, self.transposed)
        if self.interleaved is None and site.name.rpartition(".")[2] in ("query_key_value", "linear_qkv"):
            raise ValueError(
                "weights of this name lie [q k v] head after head in Megatron, GPT-NeoX, BLOOM and Falcon, [q | k | v] "
                "elsewhere; say interleaved=True or interleaved=False"
            )
        pieces = self.pieces(module.weight.shape[int(self.transposed)], site.group)
        return ColumnParallelLinear.like(module, site.group, pieces=pieces, transposed=self.transposed)

    def flow(self, module: nn.Module, group: Group) -> Flow:
        width = module.weight.shape[int(self.transposed)] // (self.heads + 2 * self.kv_heads)
        return Flow(True, self.heads * width, query_pieces(self.heads, self.kv_heads, self.heads * width, group))


@dataclass(frozen=True)
class KvHeads(Swap):
    """A separate k or v nn.Linear -> column-parallel by KV heads, replicated where ranks outnumber them."""

    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        check_counts("KvHeads", heads=self.heads, kv_heads=self.kv_heads)

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_linear(module)
        pieces = kv_pieces(self.heads, self.kv_heads, module.weight.shape[0], site.group)
        return ColumnParallelLinear.like(module, site.group, pieces=pieces)

    def flow(self, module: nn.Module, group: Group) -> Flow:
        return Flow(True)


@dataclass(frozen=True)
class QueryHeads(Swap):
    """A separate q nn.Linear -> column-parallel by query heads; with row=True the output projection, row-parallel."""

    heads: int
    kv_heads: int
    row: bool = False
    transposed: bool = False

    def __post_init__(self) -> None:
        check_counts("QueryHeads", heads=self.heads, kv_heads=self.kv_heads)

    def _pieces(self, module: nn.Module, group: Group) -> tuple[Pieces, ...]:
        return query_pieces(self.heads, self.kv_heads, module.weight.shape[int(self.row) ^ int(self.transposed)], group)

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_linear(module, self.transposed)
        layer = RowParallelLinear if self.row else ColumnParallelLinear
        return layer.like(module, site.group, pieces=self._pieces(module, site.group), transposed=self.transposed)

    def flow(self, module: nn.Module, group: Group) -> Flow:
        size = module.weight.shape[int(self.row) ^ int(self.transposed)]
        return Flow(not self.row, size, self._pieces(module, group))


@dataclass(frozen=True)
class Row(Swap):
    """nn.Linear -> RowParallelLinear."""

    units: int | None = None
    input_is_parallel: bool = True
    transposed: bool = False

    def __post_init__(self) -> None:
        check_counts("Row", units=self.units)

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_linear(module, self.transposed)
        size = module.weight.shape[1 - int(self.transposed)]
        return RowParallelLinear.like(
            module,
            site.group,
            input_is_parallel=self.input_is_parallel,
            pieces=even_pieces(size, site.group, self.units),
            transposed=self.transposed,
        )

    def flow(self, module: nn.Module, group: Group) -> Flow | None:
        if not self.input_is_parallel:
            return None
        size = module.weight.shape[1 - int(self.transposed)]
        return Flow(False, size, even_pieces(size, group, self.units))


@dataclass(frozen=True)
class Vocab(Swap):
    """nn.Embedding -> VocabParallelEmbedding."""

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        return VocabParallelEmbedding.like(module, site.group, site.plan.vocab_multiple)


@dataclass(frozen=True)
class Head(Swap):
    """The output nn.Linear -> VocabHead, column-parallel by vocabulary, as the embedding is; logits are never
    gathered."""

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_linear(module)
        vocab, multiple, group = module.weight.shape[0], site.plan.vocab_multiple, site.group
        if vocab != site.plan.vocab_size:
            raise ValueError(
                f"it has {vocab} rows and plan.vocab_size is {site.plan.vocab_size}; give Plan(vocab_size={vocab})"
            )
        _, _, rows = vocab_range(vocab, group.size, group.index, multiple)
        return VocabHead.like(module, group, pieces=vocab_pieces(vocab, group, multiple), padded=rows)


@dataclass(frozen=True)
class Shares(Swap):
    """Set integer attributes of a module to this rank's share of heads: Shares(heads, kv_heads,
    attributes={"num_heads": ("q", 1), "split_size": ("q", 64)}) sets num_heads to the local query heads and split_size
    to 64 times as many. The module must have the whole number there."""

    heads: int
    kv_heads: int
    attributes: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts("Shares", heads=self.heads, kv_heads=self.kv_heads)

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        head_pieces(self.heads, self.kv_heads, site.group.size, site.group.index)
        for attribute, (which, width) in self.attributes.items():
            if which not in ("q", "kv"):
                raise ValueError(f"attribute {attribute} is given ({which!r}, {width}); wanted 'q' or 'kv' first")
            if not hasattr(module, attribute):  # a misspelt attribute is an error, not a new attribute
                raise ValueError(f"a {type(module).__name__} has no attribute {attribute}; check the name")
            if isinstance(getattr(type(module), attribute, None), property):
                raise ValueError(f"{attribute} is computed by a property; name the attribute that it reads")
            value, total = getattr(module, attribute), {"q": self.heads, "kv": self.kv_heads}[which]
            if isinstance(value, bool) or value != total * width:
                raise ValueError(f"{attribute} is {value!r}, wanted the whole number, {total} x {width}; check the row")
        return module

    def fill(self, shell: nn.Module, module: nn.Module, site: Site) -> None:
        q, kv, _ = head_pieces(self.heads, self.kv_heads, site.group.size, site.group.index)
        for attribute, (which, width) in self.attributes.items():
            start, stop = {"q": q, "kv": kv}[which]
            setattr(module, attribute, (stop - start) * width)


@dataclass(frozen=True)
class HeadDropout(Swap):
    """A megacore Dropout on attention probabilities [B, heads, S, S]: its masks are keyed by the global head."""

    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        check_counts("HeadDropout", heads=self.heads, kv_heads=self.kv_heads)

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        if type(module) is not Dropout:
            raise ValueError(f"{type(module).__name__} is no megacore Dropout; build the model with that one")
        (start, _), _, _ = head_pieces(self.heads, self.kv_heads, site.group.size, site.group.index)
        return Dropout(module.p, module.streams, module.name, group_start=start)


@dataclass(frozen=True)
class KeyedDropout(Swap):
    """nn.Dropout of a foreign model -> Dropout with masks that no layout changes."""

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        check_dropout(module)
        if module.p == 0:
            return module
        made = Dropout(module.p, site.streams, site.name)
        check_heir(made, module)
        return made


@dataclass(frozen=True)
class Fused(Swap):
    """A GeLU that the Column(activation=...) before it computes already."""

    def shell(self, module: nn.Module, site: Site) -> nn.Module:
        if gelu_form(module) is None:
            raise ValueError(
                f"{type(module).__name__} is not GeLU alone, which is what a Column computes; drop this row, and "
                "activation of the Column"
            )
        return nn.Identity()

    def gelu(self, module: nn.Module) -> tuple[str, str]:
        return "fused", gelu_form(module)
