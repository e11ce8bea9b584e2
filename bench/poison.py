"""Memory that nobody wrote reads as NaN, so that an answer which was not written cannot pass for a right one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block torch fills what it allocates uninitialised: NaN, or the largest value of an integer dtype."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an operator without a deterministic form runs as it is
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warned)
            torch.utils.deterministic.fill_uninitialized_memory = filling


def spoil(like: Iterable[Tensor]) -> None:
    """Takes blocks of the sizes of `like`, fills them with NaN and gives them back: the next blocks of these sizes,
    also those taken past torch.empty, do not hold an earlier right answer."""
    taken = [torch.full_like(x, torch.nan, dtype=x.dtype) for x in like if x.is_floating_point() for _ in range(2)]
    del taken
