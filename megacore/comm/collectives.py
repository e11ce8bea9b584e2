"""Collectives of a tensor-parallel group inside autograd. Each is two collectives, one a direction:

| function           | forward                  | backward                 |
|--------------------|--------------------------|--------------------------|
| copy_to            | identity                 | all-reduce               |
| reduce_from        | all-reduce               | identity                 |
| gather_from        | all-gather along dim     | own slice                |
| scatter_to         | own slice                | all-gather along dim     |
| gather_seq         | all-gather along dim     | reduce-scatter along dim |
| reduce_scatter_seq | reduce-scatter along dim | all-gather along dim     |

gather_from is for a tensor that every rank goes on to use in the same way (its gradient is the same everywhere);
gather_seq is for one that each rank uses differently (the gradients are partial and must be summed). Shards along `dim`
may be uneven: pass `sizes`, one a rank. Inputs may have any strides. A group of one is the identity.
`group.waited[0]` adds up the seconds that this process spent in them (on NCCL the stream waits, and it is not in it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.comm.mesh import Group

Move = Callable[[Tensor], Tensor]


def split_sizes(n: int, parts: int) -> tuple[int, ...]:
    """n = the sum of `parts` sizes that differ by at most one, larger ones first."""
    return tuple(n // parts + (i < n % parts) for i in range(parts))


def split_range(n: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` under `split_sizes`."""
    start = index * (n // parts) + min(index, n % parts)
    return start, start + n // parts + (index < n % parts)


@contextmanager
def _clocked(group: Group) -> Iterator[None]:
    began = perf_counter()
    yield
    group.waited[0] += perf_counter() - began


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, in place (through a copy where x is not contiguous). Returns x."""
    if group.size == 1:
        return x
    summed = x.contiguous()  # x itself where it is contiguous
    with _clocked(group):
        dist.all_reduce(summed, group=group.pg)
    return x if summed is x else x.copy_(summed)


def broadcast_(x: Tensor, group: Group) -> Tensor:
    """The first member's values, in place, on all."""
    if group.size > 1:
        whole = x.contiguous()
        with _clocked(group):
            dist.broadcast(whole, group.ranks[0], group=group.pg)
        if whole is not x:
            x.copy_(whole)
    return x


def _summed(x: Tensor, group: Group) -> Tensor:
    # a copy in C order: neither an expanded gradient nor an input that autograd still needs may be written over
    return all_reduce_(x.clone(memory_format=torch.contiguous_format), group)


def _sizes(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None, full: bool) -> tuple[int, ...]:
    if sizes is None:
        n = x.shape[dim]
        if full and n % group.size:
            raise ValueError(
                f"dim {dim} of size {n} does not divide by {group.size} ranks; pass sizes, as from split_sizes"
            )
        return (n // group.size if full else n,) * group.size
    want = sum(sizes) if full else sizes[group.index]
    if len(sizes) != group.size or want != x.shape[dim]:
        raise ValueError(
            f"sizes={tuple(sizes)} over {group.size} ranks do not fit dim {dim} of size {x.shape[dim]} (want {want})"
        )
    return tuple(sizes)


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Shards joined along `dim` in rank order; no autograd. Uneven shards are padded to the largest on the wire."""
    if group.size == 1:
        return x
    sizes = _sizes(x, group, dim, sizes, full=False)
    dim = dim % x.dim()
    rows = x.movedim(dim, 0).contiguous()
    if rows.shape[0] < max(sizes):
        rows = torch.cat([rows, rows.new_zeros((max(sizes) - rows.shape[0], *rows.shape[1:]))])
    joined = rows.new_empty((group.size * max(sizes), *rows.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    with _clocked(group):
        gather(joined, rows, group=group.pg)
    if len(set(sizes)) > 1:
        joined = torch.cat([part[:size] for part, size in zip(joined.split(max(sizes)), sizes, strict=True)])
    return joined.movedim(0, dim).contiguous()


def _own(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Tensor:
    sizes = _sizes(x, group, dim, sizes, full=True)
    return x.narrow(dim, sum(sizes[: group.index]), sizes[group.index]).contiguous()


def _reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Tensor:
    sizes = _sizes(x, group, dim, sizes, full=True)
    if x.device.type == "cpu" or len(set(sizes)) > 1:
        return _own(
            _summed(x, group), group, dim, sizes
        )  # gloo's reduce-scatter is slower than its all-reduce (kernels: 0.4-0.67 GB/s)
    rows = x.movedim(dim, 0).contiguous()
    mine = rows.new_empty((sizes[0], *rows.shape[1:]))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    with _clocked(group):
        scatter(mine, rows, group=group.pg)
    return mine.movedim(0, dim).contiguous()


class _Pair(torch.autograd.Function):
    """y = there(x); dx = back(dy). `enters`: each rank goes on with y in a way of its own, and `back` makes the
    gradient of x whole again; otherwise ranks go on alike (see `enters_region`)."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Move, back: Move, enters: bool) -> Tensor:
        ctx.back, ctx.enters = back, enters
        return there(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(dy), None, None, None


def enters_region(node: object) -> bool | None:
    """Of a node of an autograd graph: True for copy_to, scatter_to and gather_seq, False for the other three, None for
    a node that is none of these six."""
    return node.enters if getattr(node, "_forward_cls", None) is _Pair else None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd wants another object where a function returns its input


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Enter a tensor-parallel region: y = x; dx = sum over ranks of dy."""
    return x if group.size == 1 else _Pair.apply(x, _same, partial(_summed, group=group), True)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Leave a tensor-parallel region: y = sum over ranks of x; dx = dy."""
    return x if group.size == 1 else _Pair.apply(x, partial(_summed, group=group), _same, False)


def gather_from(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """y = shards joined along dim; dx = own slice of dy (dy must be the same on every rank)."""
    return _along(x, all_gather, _own, group, dim, sizes, full=False, enters=False)


def scatter_to(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """y = own slice of x along dim; dx = slices of dy joined."""
    return _along(x, _own, all_gather, group, dim, sizes, full=True, enters=True)


def gather_seq(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """y = shards joined along dim; dx = own slice of the sum of dy over ranks."""
    return _along(x, all_gather, _reduce_scatter, group, dim, sizes, full=False, enters=True)


def reduce_scatter_seq(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """y = own slice along dim of the sum of x over ranks; dx = slices of dy joined."""
    return _along(x, _reduce_scatter, all_gather, group, dim, sizes, full=True, enters=False)


def _along(
    x: Tensor,
    there: Callable,
    back: Callable,
    group: Group,
    dim: int,
    sizes: Sequence[int] | None,
    full: bool,
    enters: bool,
) -> Tensor:
    if group.size == 1:
        return x
    where = {"group": group, "dim": dim, "sizes": _sizes(x, group, dim, sizes, full)}
    return _Pair.apply(x, partial(there, **where), partial(back, **where), enters)
