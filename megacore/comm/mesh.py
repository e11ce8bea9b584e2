"""Ranks <-> axes <-> groups.

Axes from fastest to slowest in the default order: tp, cp, dp, pp, so
    rank = tp + t * (cp + c * (dp + d * pp)),   world = t * c * d * p.
Tensor-parallel groups are contiguous, data-parallel groups have stride t*c inside one pipeline stage, and pipeline
groups have stride t*c*d. `Layout` is the arithmetic (no torch.distributed); `Mesh` is a layout seen from one rank, with
its communicators. A mesh is a value handed down: nothing here is global, and two meshes may live in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from math import prod

import torch.distributed as dist

AXES = ("tp", "cp", "dp", "pp")
ORDER = "tp-cp-dp-pp"


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes and the order in which they number the ranks (fastest first), as in Megatron's order strings.

    `ep` (expert parallelism) divides dp * cp and is no factor of the world; an order may name it anywhere, since it has
    no stride of its own: an expert group is `ep` consecutive members of a dp x cp group.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    order: str = ORDER

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{axis}={size!r} is not a positive whole number; give {axis} >= 1")
        named = [a for a in self.order.split("-") if a != "ep"]
        if sorted(named) != sorted(AXES):
            raise ValueError(f"order={self.order!r} does not name each of {'-'.join(AXES)} once; for example {ORDER!r}")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep={self.ep} does not divide dp*cp={self.dp * self.cp}; choose a divisor of it")

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def _axes(self) -> list[str]:
        return [a for a in self.order.split("-") if a != "ep"]

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank={rank} is outside the world of {self.world}; ranks are 0..{self.world - 1}")
        at = {}
        for axis in self._axes:
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return at

    def rank(self, **at: int) -> int:
        """The rank at a position; axes that are not named are at 0."""
        number, stride = 0, 1
        for axis in self._axes:
            number += at.get(axis, 0) * stride
            stride *= getattr(self, axis)
        return number

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Every group of ranks that differ only along `axes`: a partition of the world, in ascending order of first
        member."""
        within = [a for a in self._axes if a in axes]
        others = [a for a in self._axes if a not in axes]
        found = []
        for outer in product(*(range(getattr(self, a)) for a in reversed(others))):
            fixed = dict(zip(reversed(others), outer, strict=True))
            inner = product(*(range(getattr(self, a)) for a in reversed(within)))
            found.append(tuple(self.rank(**fixed, **dict(zip(reversed(within), at, strict=True))) for at in inner))
        return sorted(found)

    def embedding_groups(self) -> list[tuple[int, ...]]:
        """First and last member of each pipeline group: the holders of a tied embedding."""
        return [(g[0], g[-1]) if len(g) > 1 else g for g in self.groups("pp")]

    def expert_groups(self) -> list[tuple[int, ...]]:
        """`ep` consecutive members of each dp x cp group."""
        return sorted(g[i : i + self.ep] for g in self.groups("cp", "dp") for i in range(0, len(g), self.ep))

    def expert_replica_groups(self) -> list[tuple[int, ...]]:
        """The ranks that hold the same experts: every ep-th member of a dp x cp group."""
        return sorted(g[i :: self.ep] for g in self.groups("cp", "dp") for i in range(self.ep))

    def kinds(self) -> dict[str, list[tuple[int, ...]]]:
        """Every kind of group by name, in the order in which communicators are created."""
        return {
            "tp": self.groups("tp"),
            "cp": self.groups("cp"),
            "dp": self.groups("dp"),
            "pp": self.groups("pp"),
            "dp_cp": self.groups("dp", "cp"),
            "model": self.groups("tp", "pp"),
            "embed": self.embedding_groups(),
            "ep": self.expert_groups(),
            "expert_dp": self.expert_replica_groups(),
            "world": [tuple(range(self.world))],
        }


@dataclass(frozen=True)
class Group:
    """The members of one communicator, and where this process stands among them. A group of one has no communicator."""

    ranks: tuple[int, ...] = (0,)
    index: int = 0  # this process among `ranks`
    pg: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    waited: list[float] = field(default_factory=lambda: [0.0], compare=False, repr=False)  # seconds, see collectives

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """What a schema carries: the name under which torch resolves the process group; empty for a group of one."""
        return "" if self.pg is None else self.pg.group_name

    def __deepcopy__(self, memo: dict) -> Group:
        return self  # a communicator is shared by a layer and its copy, never duplicated

    def __reduce__(self):
        if self.pg is not None:
            raise TypeError("a Group with a live communicator cannot be pickled; save the module's state_dict instead")
        return (Group, (self.ranks, self.index))


SOLO = Group()


@dataclass(frozen=True)
class Mesh:
    """A layout seen from one rank. `pp_up` has the members of `pp` on a communicator of its own: activations travel
    down
    `pp` and gradients travel up `pp_up`, so that on a backend that executes in order (NCCL) neither waits behind the
    other."""

    layout: Layout = Layout()
    rank: int = 0
    tp: Group = SOLO
    cp: Group = SOLO
    dp: Group = SOLO
    pp: Group = SOLO
    dp_cp: Group = SOLO  # gradients are summed here
    model: Group = SOLO  # tp x pp: holds one copy of the model between them; norms are summed here
    embed: Group = SOLO  # first and last stage of a pipeline
    ep: Group = SOLO
    expert_dp: Group = SOLO
    world: Group = SOLO
    pp_up: Group = SOLO
    files: Group = SOLO  # the world once more: agreement about files, on which one rank may work for long

    @property
    def stage(self) -> int:
        return self.pp.index

    @property
    def is_first_stage(self) -> bool:
        return self.pp.index == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.index == self.pp.size - 1

    @classmethod
    def build(cls, layout: Layout, timeout: timedelta | None = None, files: timedelta | None = None) -> Mesh:
        """Collective over the default process group. Raises ValueError on every rank, before any collective, when the
        world is not tp*cp*dp*pp. Every rank creates every group in the same order; equal memberships share one
        communicator; groups of one create nothing. `timeout`: how long a collective of any group may wait, by default
        as long as the default group's. `files`: another time-out for the group `files`, which then has a gloo
        communicator of its own; otherwise it is the world."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != world:
            raise ValueError(
                f"world={world} is not tp*cp*dp*pp = {layout.tp}*{layout.cp}*{layout.dp}*{layout.pp} = {layout.world}; "
                f"start {layout.world} processes or change the layout"
            )
        rank = dist.get_rank() if world > 1 else 0
        timeout = timeout or _default_timeout()
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}

        def create(ranks: Sequence[int]) -> dist.ProcessGroup:
            return dist.new_group(list(ranks), timeout=timeout)

        mine: dict[str, Group] = {}
        for kind, memberships in layout.kinds().items():
            for ranks in memberships:
                if len(ranks) > 1 and ranks not in made:
                    made[ranks] = dist.group.WORLD if len(ranks) == world else create(ranks)
                if rank in ranks:
                    mine[kind] = Group(ranks, ranks.index(rank), made.get(ranks))
            mine.setdefault(kind, Group((rank,), 0))  # a middle stage belongs to no embedding group
        mine["pp_up"] = mine["pp"]
        if layout.pp > 1:
            for ranks in layout.groups("pp"):
                pg = create(ranks)
                if rank in ranks:
                    mine["pp_up"] = Group(ranks, ranks.index(rank), pg)
        mine["files"] = mine["world"]
        if files is not None and world > 1:
            mine["files"] = Group(mine["world"].ranks, rank, dist.new_group(timeout=files, backend="gloo"))
        return cls(layout=layout, rank=rank, **mine)

    def destroy(self) -> None:
        """Destroy the communicators that `build` created (the default group is its owner's)."""
        groups = (
            self.tp,
            self.cp,
            self.dp,
            self.pp,
            self.dp_cp,
            self.model,
            self.embed,
            self.ep,
            self.expert_dp,
            self.pp_up,
            self.files,
        )
        for pg in {id(g.pg): g.pg for g in groups if g.pg not in (None, dist.group.WORLD)}.values():
            dist.destroy_process_group(pg)


def _default_timeout() -> timedelta | None:
    """How long the default group waits; new_group would wait for 30 minutes, whatever that is."""
    try:
        pg = dist.group.WORLD
        return pg._get_backend(pg._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # no group, or a torch that keeps it elsewhere
        return None


def layouts(world: int) -> list[Layout]:
    """Every (tp, pp, dp) whose product is at most `world`, cp = ep = 1, smallest world first."""
    sizes = range(1, world + 1)
    found = [Layout(tp=t, dp=d, pp=p) for t, p, d in product(sizes, repeat=3) if prod((t, p, d)) <= world]
    return sorted(found, key=lambda lay: (lay.world, lay.tp, lay.pp))
