"""Which rows (or columns) of a projection belong to each rank's heads: n query heads, g KV heads, d rows a head."""

from __future__ import annotations

from megacore.comm.mesh import Group
from megacore.parallel.layers import Pieces
from megacore.parallel.record import head_pieces


def check_counts(style: str, **counts: int | None) -> None:
    """ValueError unless each count that is given is a positive whole number."""
    for field, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{style}({field}={value!r}) is not a positive whole number; give {field} >= 1")


def rows_a_head(size: int, heads: int, what: str) -> int:
    if size % heads:
        raise ValueError(f"its {size} features do not divide into {heads} heads ({what}); check the numbers of heads")
    return size // heads


def query_pieces(heads: int, kv_heads: int, size: int, group: Group) -> tuple[Pieces, ...]:
    """Of `size` = n d features, those of each rank's query heads."""
    width = rows_a_head(size, heads, f"heads={heads}")
    shares = (head_pieces(heads, kv_heads, group.size, i)[0] for i in range(group.size))
    return tuple((((a * width, b * width), True),) for a, b in shares)


def kv_pieces(heads: int, kv_heads: int, size: int, group: Group) -> tuple[Pieces, ...]:
    """Of `size` = g d features, those of each rank's KV heads."""
    width, found = rows_a_head(size, kv_heads, f"kv_heads={kv_heads}"), []
    for i in range(group.size):
        _, (a, b), first = head_pieces(heads, kv_heads, group.size, i)
        found.append((((a * width, b * width), first),))
    return tuple(found)


def qkv_pieces(heads: int, kv_heads: int, size: int, group: Group, interleaved: bool) -> tuple[Pieces, ...]:
    """Of `size` = (n + 2 g) d rows: [q | k | v], or interleaved, [n/g q, k, v] for one KV head after another."""
    width = rows_a_head(size, heads + 2 * kv_heads, f"heads + 2 kv_heads, {heads} + 2 x {kv_heads}")
    found = []
    for i in range(group.size):
        q, kv, first = head_pieces(heads, kv_heads, group.size, i)
        if interleaved:
            blocks = _interleaved(q, kv, first, heads // kv_heads)
        else:
            blocks = [
                (q, True),
                (tuple(heads + k for k in kv), first),
                (tuple(heads + kv_heads + k for k in kv), first),
            ]
        found.append(tuple(((a * width, b * width), own) for (a, b), own in blocks))
    return tuple(found)


def _interleaved(q: tuple[int, int], kv: tuple[int, int], first: bool, group: int) -> list:
    """In heads: the query heads q lie `group` beside each k and v of the KV heads."""
    if first and q == (kv[0] * group, kv[1] * group):  # whole groups: one piece
        return [((kv[0] * (group + 2), kv[1] * (group + 2)), True)]
    begin = kv[0] * (group + 2)  # a share of one KV head's queries, and a copy of its k and v
    k = begin + group
    return [
        ((begin + q[0] - kv[0] * group, begin + q[1] - kv[0] * group), True),
        ((k, k + 1), first),
        ((k + 1, k + 2), first),
    ]
