"""Rows that belong together: what leaves a module split must enter another one split, and a GeLU is computed once.

Partners meet at the lowest module that holds both (mlp.up and mlp.down in mlp), whatever the names are. What finds no
partner up to the model's root is refused by name. A style of a user's own may be any partner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megacore.comm.mesh import Group
from megacore.parallel.layers import ColumnParallelLinear, Pieces, RowParallelLinear, Sharded
from megacore.parallel.rows import Place

# one nn.Linear with several blocks of rows, in models that are well known
GATE_UP = ("gate_up_proj", "gate_up", "up_gate_proj", "gate_and_up_proj", "up_and_gate_proj", "w12", "w13", "wi_fused")
FUSED_NAMES = frozenset((*GATE_UP, "linear_gate_up", "qkv", "qkv_proj", "Wqkv", "c_attn", "kv_proj_fused"))


@dataclass(frozen=True)
class Flow:
    """What leaves (`out`) or enters a module split: `size` features of which rank i has `pieces[i]`; None where that
    is not known. `rows`: all outputs of a Column that was told nothing about blocks or units, otherwise None."""

    out: bool
    size: int | None = None
    pieces: tuple[Pieces, ...] | None = None
    rows: int | None = None

    @property
    def ranges(self) -> tuple | None:
        if self.pieces is None:
            return None
        return tuple(tuple(r for r, _ in rank if r[0] < r[1]) for rank in self.pieces)


@dataclass(frozen=True)
class End:
    """One end of a pair, in the tree of names."""

    name: str
    place: Place | None  # None: a parallel module that the model had already, or another user's
    flow: Flow | None  # None: may be either end


def check_pairs(found: Iterable[Place], model: nn.Module, group: Group) -> None:
    """ValueError for a Column without its Row, a Row without its Column, and partners that split differently."""
    ends = [*_ends(found, group), *_ends_there(model)]
    groups, lone = _meet(ends, lambda e: {True, False} if e.flow is None else {e.flow.out})
    for end in lone:
        if end.place is not None and end.flow is not None:
            raise end.place.error(_alone(end.flow.out))
    for together in groups:
        _check_group([e for e in together if e.flow is not None], all(e.flow is not None for e in together))


def _ends(found: Iterable[Place], group: Group) -> Iterable[End]:
    for place in found:
        if hasattr(place.style, "flow"):
            flow = place.style.flow(place.module, group)
            if flow is None:
                continue
        else:
            flow = None
        yield from (End(name, place, flow) for name in place.names)


def _ends_there(model: nn.Module) -> Iterable[End]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ColumnParallelLinear) and not module.gather_output:
            yield End(name, None, Flow(True))
        elif isinstance(module, RowParallelLinear) and module.input_is_parallel:
            yield End(name, None, Flow(False))
        elif hasattr(module, "placements") and not isinstance(module, Sharded):
            yield End(name, None, None)


def _alone(out: bool) -> str:
    if out:
        return (
            "its output is split over ranks, and no Row() takes it in again; give the nn.Linear that reads it a Row() "
            "row, or say Column(gather_output=True), or Head() if it gives the logits"
        )
    return (
        "it wants its input split over ranks, and no Column() gives it so; give the nn.Linear before it a Column() "
        "row, or say Row(input_is_parallel=False)"
    )


def _meet(ends: Sequence, sides) -> tuple[list[list], list]:
    """(groups that meet at the lowest module with both sides, those left at the root)."""
    at: dict[tuple[str, ...], list] = {}
    for end in ends:
        at.setdefault(tuple(end.name.split(".")[:-1]), []).append(end)
    groups, lone = [], []
    for depth in range(max(map(len, at), default=0), -1, -1):
        for path in [p for p in at if len(p) == depth]:
            here = at.pop(path)
            if len(set().union(*map(sides, here))) > 1:
                groups.append(here)
            elif path:
                at.setdefault(path[:-1], []).extend(here)
            else:
                lone = here
    return groups, lone


def _check_group(ends: list[End], known: bool) -> None:
    """`known`: there is no style of a user's own among the partners, which might be the other end."""
    gives, takes = [e for e in ends if e.flow.out], [e for e in ends if not e.flow.out]
    for one, others in [(e, takes) for e in gives] + [(e, gives) for e in takes]:
        if one.place is None or one.flow.size is None or not known:
            continue
        same = [o for o in others if o.flow.size == one.flow.size and o.flow.ranges is not None]
        if same and all(o.flow.ranges != one.flow.ranges for o in same):
            raise one.place.error(
                f"its {one.flow.size} features are split otherwise than those of {same[0].name}: rank 0 has "
                f"{list(one.flow.ranges[0])} and {list(same[0].flow.ranges[0])}; give both the same units or heads"
            )
    for give in gives:
        if give.place is not None and give.flow.rows is not None:
            _check_blocks(give, [t.flow.size for t in takes] + ([] if known else [None]))


def _check_blocks(give: End, wanted: list[int | None]) -> None:
    """A plain Column cuts its rows as one block. Where that is likely to be wrong, its author must say how many."""
    rows, leaf = give.flow.rows, give.name.rpartition(".")[2]
    several = [k for k in wanted if k and rows > k and rows % k == 0]
    if rows in wanted or None in wanted and leaf not in FUSED_NAMES:
        return
    if several or leaf in FUSED_NAMES:
        count = f"{rows // several[0]} blocks of {several[0]}" if several else "blocks"
        raise give.place.error(
            f"its {rows} rows look like {count} in one ({leaf}), of which each rank needs its share of every block; "
            f"say Column(blocks={rows // several[0] if several else 2}) for [gate | up], Qkv() for [q | k | v], "
            "or Column(blocks=1) if they are one"
        )


def check_gelus(found: Iterable[Place], forms: Mapping[int, tuple[str, str]]) -> None:
    """ValueError unless each Column(activation=...) has the Fused() GeLU of that form which it computes, and each
    Fused() its Column. `forms`: ("column" or "fused", form) by id of the module."""
    ends = [End(name, p, None) for p in found if id(p.module) in forms for name in p.names]
    groups, lone = _meet(ends, lambda e: {forms[id(e.place.module)][0]})
    for end in lone:
        role, form = forms[id(end.place.module)]
        if role == "column":
            raise end.place.error(
                f"activation={form!r} computes the GeLU that follows, and no Fused() row takes that one's place; "
                "add the row for the activation, or drop activation"
            )
        raise end.place.error(
            f"no Column(activation={form!r}) computes this GeLU; give one to the nn.Linear before it, or drop the row"
        )
    for together in groups:
        of: dict[str, dict[int, str]] = {"column": {}, "fused": {}}
        for end in together:
            role, form = forms[id(end.place.module)]
            of[role][id(end.place.module)] = form
        if len(of["fused"]) > len(of["column"]):
            raise together[0].place.error(
                f"{len(of['fused'])} Fused() rows beside {len(of['column'])} Column(activation=...): each Column "
                "computes one GeLU; give the others theirs, or drop their rows"
            )
        if set(of["column"].values()) != set(of["fused"].values()):
            column = next(e for e in together if forms[id(e.place.module)][0] == "column")
            raise column.place.error(
                f"activation={forms[id(column.place.module)][1]!r} is not the GeLU that the model has after it, "
                f"{sorted(set(of['fused'].values()))[0]!r} in torch's names; give that one"
            )
