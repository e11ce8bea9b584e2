"""From consumed samples to the micro-batches of one rank.

B_g samples in the global batch of a step, d data-parallel ranks, b samples in a micro-batch, S = seq_length.

    global batch    samples number consumed .. consumed + B_g - 1 of the order, whatever the layout
    rank            a contiguous part of it (parts differ by at most one sample where d does not divide B_g)
    micro-batch     b consecutive samples of the part (the last one may be smaller)
The loss divides by the valid tokens of the whole global batch, so unequal parts weigh each token alike. The ranks of a
pipeline and of a tensor-parallel group share their dp index, hence their micro-batches.
"""

from __future__ import annotations

import numpy as np
import torch

from megacore.comm.collectives import split_range
from megacore.parallel.batch import MicroBatch

from .dataset import Dataset
from .order import Order, Ramp, check_ramp


def micro_batches(
    dataset: Dataset,
    order: Order,
    consumed: int,
    global_batch: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    micro_batch: int = 1,
    step: int = 0,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """This rank's micro-batches of the step that begins after `consumed` samples.

    `samples` of a row is its number in the training order, consumed + row of the global batch: dropout is keyed by it.
    ValueError where a rank would have no sample. Cost: reads B_g / d samples.
    """
    check_split(global_batch, dp_size, micro_batch)
    start, stop = split_range(global_batch, dp_size, dp_rank)
    rows = order.indices(consumed + start, stop - start)
    positions = torch.arange(dataset.seq_length, device=device)
    out = []
    for index, first in enumerate(range(0, len(rows), micro_batch)):
        ids, targets = stack(dataset, rows[first : first + micro_batch])
        number = consumed + start + first + torch.arange(len(ids))
        out.append(MicroBatch(ids.to(device), targets.to(device), number.to(device), positions, step, index))
    return out


def stack(dataset: Dataset, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets) of the samples `rows`: int64 [len(rows), S] each, on the CPU."""
    pairs = [dataset.pair(int(i)) for i in rows]
    return tuple(torch.from_numpy(np.stack(side).astype(np.int64, copy=False)) for side in zip(*pairs, strict=True))


def valid_tokens(dataset: Dataset, order: Order, consumed: int, global_batch: int) -> int:
    """Targets of the whole global batch that count: known before the first forward, without a collective."""
    return sum(dataset.valid(int(i)) for i in order.indices(consumed, global_batch))


def check_split(global_batch: int, dp_size: int, micro_batch: int, ramp: Ramp = ()) -> None:
    """ValueError unless every batch of the run gives every data-parallel rank at least one sample."""
    check_ramp(global_batch, ramp)
    if micro_batch < 1:
        raise ValueError(f"micro_batch={micro_batch}: samples in one forward of one rank; give micro_batch >= 1")
    smallest = min([global_batch, *(size for _, size in ramp)])
    if smallest < dp_size:
        raise ValueError(
            f"global_batch={smallest} has no sample for each of dp={dp_size} ranks; "
            f"give global_batch >= {dp_size} or dp <= {smallest}"
        )
