"""Which host each rank runs on, and which groups leave their host. Ranks fill the hosts in order, as torchrun numbers
them."""

from __future__ import annotations

from collections.abc import Sequence


def place_ranks(hosts: str, world: int) -> list[str]:
    """The host of every rank. `hosts` is a number of equal hosts ("2") or a list of name:slots ("a:4,b:4").

    ValueError when the hosts do not divide the world, a slot count is no positive number, or there are too few
    slots."""
    if hosts.strip().isdigit():
        count = int(hosts)
        if count < 1 or world % count:
            raise ValueError(
                f"hosts={count} does not divide world={world}; give a divisor of it, or a list name:slots,name:slots"
            )
        slots = [(f"host{i}", world // count) for i in range(count)]
    else:
        slots = [_slot(entry) for entry in hosts.replace(" ", ",").split(",") if entry]
    names = [name for name, n in slots for _ in range(n)]
    if len(names) < world:
        raise ValueError(f"hosts={hosts!r} has {len(names)} slots for world={world}; add {world - len(names)} slots")
    return names[:world]


def _slot(entry: str) -> tuple[str, int]:
    name, _, number = entry.partition(":")
    if not name or not number.isdigit() or int(number) < 1:
        raise ValueError(f"hosts entry {entry!r} is not name:slots; for example node1:8")
    return name, int(number)


def crossing(groups: Sequence[Sequence[int]], host_of: Sequence[str]) -> list[Sequence[int]]:
    """The groups whose members run on more than one host."""
    return [g for g in groups if len({host_of[r] for r in g}) > 1]
