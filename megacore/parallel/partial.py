"""Styles for parameters that are not a split layer's own, but act among split columns or heads.

A parameter that is whole on every rank of a tensor-parallel group and acts on this rank's columns alone gets a gradient
of these columns only: another one on every rank. Unless it is summed, the copies drift apart.

| the parameter acts on            | for example                                | style                         |
|----------------------------------|--------------------------------------------|-------------------------------|
| each column or head alike        | q_norm, k_norm; one PReLU slope or gate    | Partial()                     |
| one column each                  | a gate [ffn], a PReLU of ffn slopes        | Split()                       |
| one head each                    | sinks [heads], a bias table [n, heads]     | PerHead(heads, kv_heads)      |
| whole tensors, whose output then | a gate computed by a whole Linear          | CopyTo()                      |
| meets split columns              |                                            |                               |
| what its author sums over ranks  |                                            | Whole()                       |

`parallelize` gives the norms of queries and keys their Partial() by itself, and refuses what it finds without a style:
see megacore.parallel.regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megacore.comm.collectives import copy_to, split_range
from megacore.comm.mesh import Group
from megacore.parallel.record import Placement, Range, along, head_pieces

if TYPE_CHECKING:
    from megacore.parallel.plan import Site, Style


@dataclass(frozen=True, init=False)
class OfParameters:
    """A style for the parameters that are named, or for all of a module. Names are relative to the module."""

    parameters: tuple[str, ...]

    def __init__(self, *parameters: str):
        object.__setattr__(self, "parameters", parameters)

    def names(self, module: nn.Module) -> list[str]:
        """Raises ValueError for a name that the module has not, and for a module without parameters."""
        known = [name for name, _ in module.named_parameters()]
        for name in self.parameters:
            if name not in known:
                raise ValueError(f"{name!r} is no parameter of {type(module).__name__}; it has {', '.join(known)}")
        if not known:
            raise ValueError(f"{type(self).__name__}() finds no parameter in {type(module).__name__}; drop the row")
        return list(self.parameters or known)


class Whole(OfParameters):
    """The parameters are whole, and their gradients are the same on every rank without help of ours: said by whoever
    sums them over ranks, where `parallelize` takes them for partial. Training still stops where they differ."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        self.names(module)
        return module


class Partial(OfParameters):
    """The parameters (default: all of the module) stay whole, and their gradients are summed over tp ranks.

    Inside the module's forward each is copy_to(parameter): p.grad is whole on every rank, with the same bits, as soon
    as backward has passed, in a loop of the user's own too. The module must be called: a parameter that its parent
    reads directly is named on the parent, Partial("gate"). Cost: one all-reduce of each parameter a micro-batch.
    """

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        sum_over(module, self.names(module), site.group)
        return module


def sum_over(module: nn.Module, names: list[str], group: Group) -> None:
    """Have the gradients of these parameters summed over the group, wherever the module's forward uses them."""
    if group.size > 1:
        swap = _Swap(names, group)
        module.register_forward_pre_hook(_Enter(swap), prepend=True)
        module.register_forward_hook(_Leave(swap), always_call=True)


class _Swap:
    """While the module's forward runs, its `_parameters` hold copy_to of them (as torch.func.functional_call does)."""

    def __init__(self, names: list[str], group: Group):
        self.names, self.group = names, group
        self.held: list[list[nn.Parameter]] = []  # a stack: a module may call itself

    def enter(self, module: nn.Module) -> None:
        kept = []
        for owner, leaf in [owner_of(module, name) for name in self.names]:
            kept.append(owner._parameters[leaf])
            owner._parameters[leaf] = copy_to(kept[-1], self.group)
        self.held.append(kept)

    def leave(self, module: nn.Module) -> None:
        for name, param in zip(self.names, self.held.pop() if self.held else (), strict=False):
            owner, leaf = owner_of(module, name)
            owner._parameters[leaf] = param


@dataclass(frozen=True)
class _Enter:
    swap: _Swap

    def __call__(self, module: nn.Module, args: tuple) -> None:
        self.swap.enter(module)


@dataclass(frozen=True)
class _Leave:
    swap: _Swap

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.swap.leave(module)


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


@dataclass(frozen=True)
class CopyTo:
    """The module is whole and its output meets this rank's columns: the gradient of its output is summed over
    tensor-parallel ranks, so that everything before it has whole gradients. Cost: one all-reduce of the output's
    gradient a micro-batch."""

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        if site.group.size > 1:
            module.register_forward_hook(_Copies(site.group))
        return module


@dataclass(frozen=True)
class _Copies:
    group: Group

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return tree_map_only(Tensor, lambda t: copy_to(t, self.group) if t.is_floating_point() else t, output)


@dataclass(frozen=True, init=False)
class Split(OfParameters):
    """Dimension `dim` of the parameters (default: all of the module) is cut as Column cuts its outputs: in `units`
    indivisible units, unevenly where they do not divide. Raises ValueError for a norm, which needs all columns."""

    dim: int
    units: int | None

    def __init__(self, *parameters: str, dim: int = 0, units: int | None = None):
        super().__init__(*parameters)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "units", units)

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        def pieces(size: int) -> list[Range]:
            units = size if self.units is None else self.units
            if size % units or units < site.group.size:
                raise ValueError(f"size={size} in units={units} does not split over tp={site.group.size}; change units")
            return [tuple(size // units * at for at in split_range(units, site.group.size, site.group.index))]

        return _cut(self, module, site.group, pieces, shared=False)


@dataclass(frozen=True, init=False)
class PerHead(OfParameters):
    """Dimension `dim` of the parameters (default: all of the module) goes by heads, as QueryHeads (or, with kv=True,
    KvHeads) cuts the projections: `size / heads` elements a head. KV heads are replicated where ranks outnumber
    them: GradBuffers sums their gradients, as those of the projections."""

    heads: int
    kv_heads: int
    dim: int
    kv: bool

    def __init__(self, *parameters: str, heads: int, kv_heads: int | None = None, dim: int = 0, kv: bool = False):
        super().__init__(*parameters)
        for name, value in (("heads", heads), ("kv_heads", kv_heads or heads), ("dim", dim), ("kv", kv)):
            object.__setattr__(self, name, value)

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        count = self.kv_heads if self.kv else self.heads

        def pieces(size: int) -> list[Range]:
            if size % count:
                raise ValueError(f"dim {self.dim} of size {size} does not divide by its {count} heads; check dim")
            q, kv, _ = head_pieces(self.heads, self.kv_heads, site.group.size, site.group.index)
            return [tuple(size // count * at for at in (kv if self.kv else q))]

        return _cut(self, module, site.group, pieces, shared=self.kv and self.kv_heads < site.group.size)


def _cut(style: OfParameters, module: nn.Module, group: Group, pieces_of: Any, shared: bool) -> nn.Module:
    names = style.names(module)
    if group.size == 1:
        return module
    for name in names:
        owner, leaf = owner_of(module, name)
        if "norm" in type(owner).__name__.lower():
            raise ValueError(
                f"{type(owner).__name__} needs all columns for its statistics, a rank has its own; move it before the "
                "Column or after the Row, or let it act on each head and give it Partial()"
            )
        old = owner._parameters[leaf]
        if not -old.dim() <= style.dim < old.dim():
            raise ValueError(f"{name} has shape {tuple(old.shape)} and no dim={style.dim}; give one that it has")
        dim = style.dim % old.dim()
        first = not shared or _first_holder(style, group)
        boxes = along(old.shape, dim, [(piece, first) for piece in pieces_of(old.shape[dim])])
        here = boxes[0].full
        local = old.detach()[tuple(slice(*r) for r in here)].clone()
        setattr(owner, leaf, nn.Parameter(local, requires_grad=old.requires_grad))
        if not isinstance(getattr(owner, "placements", None), Placements):
            owner.placements = Placements({})
        owner.placements.found[leaf] = Placement(tuple(old.shape), boxes, shared)
    return module


def _first_holder(style: Any, group: Group) -> bool:
    return head_pieces(style.heads, style.kv_heads, group.size, group.index)[2]


@dataclass(frozen=True)
class Placements:
    """What records() asks a module: here one of a user's own, whose parameters a style has cut."""

    found: dict[str, Placement]

    def __call__(self) -> dict[str, Placement]:
        return self.found


@dataclass(frozen=True, init=False)
class Together:
    """Several styles on one module, one after another: Together(Shares(...), PerHead("sinks", heads=8))."""

    styles: tuple[Style, ...]

    def __init__(self, *styles: Style):
        object.__setattr__(self, "styles", styles)

    def apply(self, module: nn.Module, site: Site) -> nn.Module:
        for style in self.styles:
            module = style.apply(module, site)
        return module


def single_styles(styles: Sequence[Style]) -> Iterator[Style]:
    """The styles, those inside Together one by one."""
    for style in styles:
        yield from single_styles(style.styles) if isinstance(style, Together) else (style,)
