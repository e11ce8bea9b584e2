"""Rows of a plan's table, resolved against a model: which module each row means, and whether it can be replaced there.
Nothing is changed here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from megacore.parallel.layers import Sharded

WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


@dataclass(frozen=True)
class Place:
    """One module that a row names, under all names that the model has for it; `name` is the one that the row found."""

    row: str
    style: object
    module: nn.Module
    name: str
    names: tuple[str, ...]

    def error(self, reason: object) -> ValueError:
        return ValueError(f"plan row {self.row!r}: {type(self.style).__name__}() on {self.name}: {reason}")


def check_table(table: object) -> None:
    """ValueError, naming the row, unless `table` maps names (with *) to styles."""
    if not isinstance(table, Mapping):
        raise ValueError(f"table is a {type(table).__name__}, wanted a dict from names to styles: {{'up': Column()}}")
    for row, style in table.items():
        if not isinstance(row, str):
            raise ValueError(f"plan row {row!r} is a {type(row).__name__}, wanted a module's name, such as 'mlp.up'")
        if isinstance(style, type):
            raise ValueError(
                f"plan row {row!r} has the class {style.__name__}, wanted a style; write {style.__name__}()"
            )
        if not callable(getattr(style, "apply", None)):
            raise ValueError(
                f"plan row {row!r} has {style!r}, a {type(style).__name__}, wanted a style such as Column() or Row()"
            )


def places(model: nn.Module, table: Mapping[str, object]) -> list[Place]:
    """What the rows mean, in their order. ValueError for a row that means nothing, a module that two rows mean, and one
    that cannot be replaced where it is."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(id(module), []).append(name)
    taken: dict[int, Place] = {}
    for row, style in table.items():
        found = _matches(row, modules)
        if not found:
            raise ValueError(f"plan row {row!r} matches no module of {type(model).__name__}; {_near(row, modules)}")
        for name in found:
            module = modules[name]
            place = Place(row, style, module, name, tuple(names[id(module)]))
            _check_once(place, taken.get(id(module)))
            for reason in _immovable(place, modules):
                raise place.error(reason)
            taken.setdefault(id(module), place)
    return list(taken.values())


def _matches(row: str, modules: Mapping[str, nn.Module]) -> list[str]:
    if "*" not in row:
        return [row] if row in modules else []
    wanted = re.compile(re.escape(row).replace(r"\*", "[^.]+"))
    return [name for name in modules if wanted.fullmatch(name)]


def _near(row: str, modules: Mapping[str, nn.Module]) -> str:
    """What the author may have meant; only what is near is worth a line."""
    patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in modules if name))
    near = difflib.get_close_matches(row, [*modules, *patterns], 1, 0.8)
    return f"did you mean {near[0]!r}?" if near else "see model.named_modules()"


def _check_once(place: Place, other: Place | None) -> None:
    if isinstance(place.module, Sharded):
        raise ValueError(f"{place.name} is parallel already; call parallelize once, on the plain model")
    if other is None or other.row == place.row:
        return
    if other.name == place.name:
        raise ValueError(f"plan rows {other.row!r} and {place.row!r} both name {place.name}; keep one of them")
    if other.style != place.style:
        raise ValueError(
            f"plan rows {other.row!r} and {place.row!r} give {type(other.style).__name__}() and "
            f"{type(place.style).__name__}() to one module, {other.name} and {place.name}; give both the same style"
        )


def _immovable(place: Place, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Why putting another module under these names would not do."""
    for name in place.names:
        parts = name.split(".") if name else []
        above = [modules[".".join(parts[:i])] for i in range(len(parts))]
        parent = above[-1] if above else None
        if type(parent).__name__ == "OptimizedModule":
            yield "its parent holds the compiled code of this very module; parallelize first, then torch.compile"
        if isinstance(parent, nn.MultiheadAttention):
            yield "nn.MultiheadAttention reads the weights of its layers without calling them; use separate nn.Linear"
        if isinstance(parent, nn.TransformerEncoderLayer):
            yield (
                "nn.TransformerEncoderLayer reads the weights of its layers without calling them in inference; "
                "write the layer with modules of its own"
            )
        for outer in above:
            if wrapper := WRAPPERS & {cls.__name__ for cls in type(outer).__mro__}:
                yield f"the model is wrapped in {', '.join(wrapper)} already; parallelize first, then wrap"
            if isinstance(outer, torch.jit.ScriptModule):
                yield "the model is scripted already; parallelize first"


def check_apart(found: list[Place], replaced: list[Place]) -> None:
    """ValueError where a row means a module inside one that another row replaces."""
    for outer in replaced:
        for inner in found:
            for name in inner.names:
                if any(name.startswith(f"{o}.") for o in outer.names):
                    raise inner.error(
                        f"it lies inside {outer.name}, which the row {outer.row!r} replaces; keep one of the two rows"
                    )
