"""Whole tensors among split ones: found, and mended or refused, before a gradient is wrong.

Between a Column and its Row tensors hold this rank's columns alone: a region. Whatever is whole and enters a region
without copy_to gets the gradient of this rank's columns, another one on every rank. Three looks, none of which
communicates, so that each says the same on every rank:

1. `parallelize` (tp > 1): norms of queries and keys over one head get Partial(); parameters of as many elements as
   there are heads or columns to be split are refused, with the row that is missing;
2. the first forward of each Row, and the loss: its input's autograd graph is walked back to the Columns. What is met
   on the way and is whole is refused by name;
3. the first forward of a norm that got fewer features than it has.

What these cannot see (gradients of reentrant recomputation, regions that end in no Row) is found by
megacore.parallel.drift in the first training steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megacore.comm.collectives import enters_region
from megacore.comm.mesh import Group
from megacore.parallel.head import VocabHead
from megacore.parallel.layers import ColumnParallelLinear, RowParallelLinear, Sharded
from megacore.parallel.partial import OfParameters, Whole, single_styles, sum_over

if TYPE_CHECKING:
    from megacore.parallel.plan import Style

MARK = "_megacore_whole"  # attribute of a parameter: its full name, where it is whole on every rank
QUERY_KEY_NORMS = frozenset(
    f"{which}_{norm}" for which in ("q", "k", "query", "key") for norm in ("norm", "layernorm", "ln", "rmsnorm")
) | {"norm_q", "norm_k", "ln_q", "ln_k"}


def guard(model: nn.Module, group: Group, rows: Mapping[str, list[Style]]) -> None:
    """Looks 1 to 3 of the module's head. `rows`: the styles that reached each module, by its name."""
    if group.size == 1:
        return
    rows = {name: styles for name, styles in rows.items() if styles}
    covered = set(_covered(model, rows))
    for parent_name, parent in model.named_modules():
        for child, norm in _query_key_norms(parent, rows, parent_name):
            full = f"{parent_name}.{child}".lstrip(".")
            if _mend(norm, full, child, parent, group):
                covered.update(f"{full}.{name}" for name, _ in norm.named_parameters())
    for parent_name, parent in model.named_modules():
        _refuse_unsplit(parent_name, parent, rows, covered, group)
    trusted = set(_covered(model, rows, Whole))
    for name, module in model.named_modules():
        whole = {leaf: full for leaf, full in _whole(name, module) if full not in trusted}
        if whole:  # before the hooks of Partial(), which put other tensors in their place
            module.register_forward_pre_hook(_Mark(whole), prepend=True)
        if isinstance(module, RowParallelLinear) and module.input_is_parallel:
            module.register_forward_pre_hook(_Watch(name))
        elif _is_norm(module) and name not in rows:
            module.register_forward_pre_hook(_FullNorm(name))


def _whole(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """(name in the module, full name) of its own parameters that no style has split; a Row's bias is one of them."""
    placed = module.placements() if hasattr(module, "placements") else {}
    split = {leaf for leaf, p in placed.items() if p.shared or [box.shape for box in p.boxes] != [p.shape]}
    own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
    return ((leaf, f"{name}.{leaf}".lstrip(".")) for leaf in own if leaf not in split)


def _covered(model: nn.Module, rows: Mapping[str, list[Style]], kind: type = OfParameters) -> Iterator[str]:
    """Full names of the parameters that a style of this kind names."""
    for name, styles in rows.items():
        for style in single_styles(styles):
            if isinstance(style, kind):
                module = model.get_submodule(name)
                yield from (f"{name}.{p}".lstrip(".") for p in style.parameters or dict(module.named_parameters()))


def _columns(parent: nn.Module) -> dict[str, ColumnParallelLinear]:
    """The Columns among the children whose outputs stay split."""
    return {
        name: child
        for name, child in parent.named_children()
        if isinstance(child, ColumnParallelLinear) and not isinstance(child, VocabHead) and not child.gather_output
    }


def _widths(column: ColumnParallelLinear) -> list[int]:
    return [sum(stop - start for (start, stop), _ in rank) for rank in column.pieces]


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    one = [p for p in module.parameters(recurse=False) if p.dim() == 1]
    return bool(one) and ("layernorm" in name or "rmsnorm" in name)


def _query_key_norms(parent: nn.Module, rows: Mapping[str, Any], at: str) -> list[tuple[str, nn.Module]]:
    if not _columns(parent) or not any(isinstance(c, RowParallelLinear) for c in parent.children()):
        return []
    return [
        (name, child)
        for name, child in parent.named_children()
        if name in QUERY_KEY_NORMS and f"{at}.{name}".lstrip(".") not in rows and any(True for _ in child.parameters())
    ]


def _mend(norm: nn.Module, name: str, child: str, parent: nn.Module, group: Group) -> bool:
    """Partial() where the norm is certainly over one head; a ValueError where it is over the columns of several ranks;
    otherwise nothing (False): the Row's watch will see on which side of the projection it is."""
    columns = _columns(parent)
    initial = child.removeprefix("norm_").removeprefix("ln_")[0]
    beside = {n: c for n, c in columns.items() if n.removeprefix("w").startswith(initial)} or columns
    shapes = {tuple(p.shape) for p in norm.parameters()}
    if len(shapes) != 1 or len(*shapes) != 1:
        return False
    ((size,),) = shapes
    widths = {w for c in beside.values() for w in _widths(c)}
    if all(w % size == 0 for w in widths) and all(size != c.in_features for c in beside.values()):
        sum_over(norm, [n for n, _ in norm.named_parameters()], group)
        return True
    if all(size == c.out_features != c.in_features for c in beside.values()):
        raise ValueError(
            f"{name} takes its statistics over all {size} columns of {next(iter(beside))}, of which tp={group.size} "
            f"leaves {min(widths)} on a rank; leave the rows of these projections out, or set tp=1"
        )
    return False


def _refuse_unsplit(
    at: str, parent: nn.Module, rows: Mapping[str, list[Style]], covered: set[str], group: Group
) -> None:
    """ValueError for an uncovered parameter with one element for each of the heads or columns that ranks share out."""
    from megacore.parallel.styles import Shares  # it imports plan, which imports this

    shares = [s for s in single_styles(rows.get(at, [])) if isinstance(s, Shares)]
    heads = {n: s for s in shares for n in (s.heads, s.kv_heads) if n > 1}
    whole_sizes = {c.in_features for c in _columns(parent).values()}
    whole_sizes |= {c.out_features for c in parent.children() if isinstance(c, RowParallelLinear)}
    columns = {c.out_features for c in _columns(parent).values()} - whole_sizes
    for owner, param in _candidates(at, parent, rows, bool(shares)):
        full = f"{at}.{param}".lstrip(".")
        shape = tuple(parent.get_parameter(param).shape)
        size = next((n for n in shape if n in heads or (not owner and n in columns)), None)
        if full in covered or size is None:
            continue
        dim = f", dim={shape.index(size)}" if shape.index(size) else ""
        leaf = param.rpartition(".")[2]
        if size in heads:
            style, what = f"PerHead({leaf!r}, heads={heads[size].heads}, kv_heads={heads[size].kv_heads}{dim})", "heads"
            style = style if owner else f"Together(Shares(...), {style})"
        else:
            style, what = f"Split({leaf!r}{dim})", "columns"
        row = f"{at}.{owner}".strip(".")
        raise ValueError(
            f"{full} is whole and has one element for each of the {size} {what} of {at or 'the model'}, of which a "
            f"rank of tp={group.size} has its own; add {row!r}: {style}, or Whole({leaf!r}) if all ranks use all of it"
        )


def _candidates(at: str, parent: nn.Module, rows: Mapping[str, Any], children: bool) -> Iterator[tuple[str, str]]:
    """(child or "", name of a whole parameter within the parent): the parent's own, and those of children that are
    neither split, nor products, nor norms, nor named by a row."""
    if isinstance(parent, Sharded):
        return
    yield from (("", leaf) for leaf, _ in _whole(at, parent))
    for child, module in parent.named_children() if children else ():
        if not isinstance(module, Sharded | nn.Linear) and not _is_norm(module) and f"{at}.{child}" not in rows:
            yield from ((child, f"{child}.{leaf}") for leaf, _ in _whole(child, module))


def _forget(hook: object, module: nn.Module) -> None:
    for key, other in list(module._forward_pre_hooks.items()):
        if other is hook:
            del module._forward_pre_hooks[key]


@dataclass(frozen=True, eq=False)
class _Mark:
    """Gives whole parameters their full names, once, at the first forward: only then are they the ones that train, and
    copies of the module bring the hook along."""

    names: Mapping[str, str]  # in the module -> in the model

    def __call__(self, module: nn.Module, args: tuple) -> None:
        _forget(self, module)
        for leaf, name in self.names.items():
            setattr(module._parameters[leaf], MARK, name)


@dataclass(frozen=True, eq=False)
class _Watch:
    """Look 2: once, at the first forward that records a graph."""

    name: str

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not args or not torch.is_grad_enabled():
            return
        _forget(self, module)
        check_region(args[0], self.name)


@dataclass(frozen=True, eq=False)
class _FullNorm:
    """Look 3."""

    name: str

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
            return
        _forget(self, module)
        size = next(p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 1)
        if args[0].shape[-1] != size:
            raise ValueError(
                f"{self.name} takes its statistics over {size} features and got {args[0].shape[-1]}, a rank's own "
                "columns; move it before the Column or after the Row, or leave the rows around it out"
            )


def check_region(x: Tensor, end: str) -> None:
    """ValueError if x, this rank's columns at the end of a region, depends on a whole tensor that entered the region
    without copy_to. `end` names the place. Whole parameters are those that `guard` found. Cost: the graph since the
    Columns, in Python."""
    root = x.grad_fn
    if root is None:
        return
    status = _statuses(root)
    found = [root] if status[root] == "whole" else _entrances(root, status)
    if not found:
        return
    for node in found:
        name, activations = _origin(node)
        if name and not activations:
            owner, _, leaf = name.rpartition(".")
            raise ValueError(
                f"{name} is whole on every rank but acts on a rank's own columns, before {end}: its gradient would be "
                f"partial; add {owner!r}: Partial({leaf!r}) to the plan"
            )
    named = [name for name, _ in map(_origin, found) if name]
    owner = named[0].rpartition(".")[0] if named else ""
    what = f"the output of {owner or 'a module'}" if named else "a tensor"
    raise ValueError(
        f"{what} is whole and meets a rank's own columns before {end}: gradients behind it would be partial; add "
        f"{owner or 'its module (an nn.Identity will do)'!r}: CopyTo() to the plan"
    )


def _children(node: Any) -> list[Any]:
    if enters_region(node) is not None or _foreign_collective(node):
        return []
    return [child for child, _ in node.next_functions if child is not None]


def _foreign_collective(node: Any) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "__module__", "").startswith("torch.distributed")


def _statuses(root: Any) -> dict[Any, str]:
    """Each node of the region: "split" if it depends on anything that copy_to or a split parameter gave, else "whole"
    if on a whole tensor, else "none" (data)."""
    status: dict[Any, str] = {}
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in status:
            continue
        children = _children(node)
        if children and not ready:
            stack.append((node, True))
            stack.extend((child, False) for child in children if child not in status)
            continue
        kinds = {status[child] for child in children} or {_leaf(node)}
        status[node] = next((kind for kind in ("split", "whole") if kind in kinds), "none")
    return status


def _leaf(node: Any) -> str:
    enters = enters_region(node)
    if enters is not None:
        return "split" if enters else "whole"
    param = getattr(node, "variable", None)
    if hasattr(param, MARK):
        return "whole"
    return "split" if isinstance(param, nn.Parameter) else "none"


def _entrances(root: Any, status: Mapping[Any, str]) -> list[Any]:
    """Whole nodes right behind split ones, nearest to the root first."""
    found, seen, queue = [], {root}, deque([root])
    while queue:
        for child in _children(queue.popleft()):
            if child in seen or status[child] == "none":
                continue
            seen.add(child)
            (found if status[child] == "whole" else queue).append(child)
    return found


def _origin(node: Any) -> tuple[str, bool]:
    """(name of the nearest whole parameter behind a node or "", whether activations are behind it too)."""
    name, activations, seen, queue = "", False, {node}, deque([node])
    while queue:
        at = queue.popleft()
        activations |= enters_region(at) is False
        name = name or getattr(getattr(at, "variable", None), MARK, "")
        fresh = [child for child in _children(at) if child not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    return name, activations
