"""Parameters that are one: tied ones stay tied, and what is tied by memory alone is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from megacore.parallel.layers import Sharded
from megacore.parallel.record import Placement, whole


def tied_names(model: nn.Module) -> list[list[str]]:
    """Full names that are one and the same parameter, first name first."""
    by_id: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), []).append(name)
    return [names for names in by_id.values() if len(names) > 1]


def check_ties(tied: Iterable[list[str]], shells: Mapping[str, nn.Module], model: nn.Module) -> None:
    """ValueError where two names of one parameter would hold different pieces of it. `shells`: what takes the place of
    the modules that are replaced, by name."""
    for first, *others in tied:
        for other in others:
            one, two = (_placed(name, shells, model) for name in (first, other))
            if one != two:
                raise ValueError(
                    f"{other} is tied to {first}, but the plan splits them differently; give both the same style"
                )


def _placed(name: str, shells: Mapping[str, nn.Module], model: nn.Module) -> tuple:
    owner, _, leaf = name.rpartition(".")
    module = shells.get(owner)
    if module is None:
        shape = tuple(model.get_parameter(name).shape)
        return shape, whole(shape, True)
    if isinstance(module, Sharded):
        placed: Placement = module.placements()[leaf]
        shape = tuple(getattr(module, leaf).shape)
        ranges = tuple((box.full, box.local) for box in placed.boxes)
        uncut = ranges == tuple((box.full, box.local) for box in whole(placed.shape, True))
        return (shape, whole(shape, True)) if uncut and shape == placed.shape else (shape, ranges)
    shape = tuple(module.get_parameter(leaf).shape)
    return shape, whole(shape, True)


def tie(model: nn.Module, first: str, other: str) -> None:
    owner, _, leaf = other.rpartition(".")
    setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


def check_memory(model: nn.Module, replaced: Iterable[str]) -> None:
    """ValueError where a parameter of a module that is to be replaced lies in the memory of another tensor of the
    model without being the same parameter: the copy that is cut from it would end that."""
    inside = tuple(f"{name}." for name in replaced)
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}  # each object once
    spans = sorted((span, name) for name, t in tensors.items() if (span := _span(t)) is not None)
    reach: tuple[tuple, str] | None = None  # the one seen so far that ends last
    for span, name in spans:
        if reach is not None and reach[0][0] == span[0] and span[1] < reach[0][2]:
            hit = next((n for n in (name, reach[1]) if n.startswith(inside)), None) if inside else None
            if hit is not None:
                other = reach[1] if hit == name else name
                raise ValueError(
                    f"{hit} shares its memory with {other}, but is another parameter, and a split would end that; "
                    "make them one parameter, or give each its own copy"
                )
        if reach is None or reach[0][0] != span[0] or span[2] > reach[0][2]:
            reach = (span, name)


def _span(t: Tensor) -> tuple[str, int, int] | None:
    """(device, first byte, last byte + 1) of a tensor with memory; None for meta and empty ones and subclasses."""
    if t.is_meta or t.numel() == 0 or type(t.data) is not Tensor:
        return None
    try:
        start = t.data_ptr()
        last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    except RuntimeError:  # no storage: sparse, functional
        return None
    return str(t.device), start, start + (last + 1) * t.element_size()
