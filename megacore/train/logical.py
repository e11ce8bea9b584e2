"""Logical tensors: the full, unpadded tensor of the plain model, of which this rank holds some boxes.

torch.distributed.checkpoint plans in terms of chunks of a full tensor; a parameter's record says which chunks this rank
holds (several for a fused QKV) and where they lie in the local tensor. So a checkpoint knows nothing of the layout that
wrote it, and each layout reads the chunks that overlap its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megacore.comm.mesh import SOLO, Group
from megacore.parallel.record import Box, ParamRecord, whole


@dataclass(frozen=True)
class LogicalTensor:
    """A full tensor seen from one rank: `record` says what it is, `local` [record.local_shape] holds this rank's boxes.

    `writes` is False on replicas that leave the writing to another one. Implements torch.distributed._checkpointable.
    """

    record: ParamRecord
    local: Tensor
    writes: bool = True

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != tuple(self.record.local_shape):
            raise ValueError(
                f"{self.record.name}: local tensor has shape {tuple(self.local.shape)}, its record says "
                f"{tuple(self.record.local_shape)}; describe a tensor by the record of its own layout"
            )

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> LogicalTensor:
        """A tensor that every rank holds in full."""
        shape = tuple(tensor.shape)
        return cls(ParamRecord(name, shape, shape, whole(shape, True)), tensor)

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def size(self) -> torch.Size:
        """The full, true shape; the planner compares it with the stored one."""
        return torch.Size(self.record.shape)

    @property
    def held(self) -> tuple[Box, ...]:
        """The boxes on this rank that have elements (an uneven split may leave a rank with none)."""
        return tuple(b for b in self.record.boxes if prod(b.shape) or not prod(self.record.shape))

    @property
    def written(self) -> tuple[Box, ...]:
        """The boxes that this rank writes, so that each element is written once."""
        counted = self.record.counted() if self.writes else ()
        return tuple(b for b in self.held if b in counted)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, _chunk(box).offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in self.written
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of the local tensor at a chunk: where a write is read from and where a read is written to."""
        for box in self.held:  # index.index is a hint, and no good one: on saving it counts the chunks of all ranks
            if _chunk(box).offsets == index.offset:
                return self.local.detach()[tuple(slice(start, stop) for start, stop in box.local)]
        raise ValueError(f"{index.fqn} has no chunk at {tuple(index.offset or ())} on this rank")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([start for start, _ in box.full]), sizes=torch.Size(box.shape))


def describe(
    kind: str, records: Mapping[str, ParamRecord], local: Mapping[str, Tensor], part: str = ""
) -> dict[str, LogicalTensor]:
    """Logical tensors under their stored names: `kind/<parameter>` or `kind/<parameter>/part`.

    `local` holds, by the names of `records`, the parameters or tensors of their local shape (optimizer state).
    A tied parameter is stored under the name of its first copy, whichever stage asks.
    """
    suffix = f"/{part}" if part else ""
    return {f"{kind}/{records[name].canonical}{suffix}": LogicalTensor(records[name], t) for name, t in local.items()}


def share_out(tensors: Mapping[str, LogicalTensor], replicas: Group = SOLO) -> dict[str, LogicalTensor]:
    """The same tensors, each to be written by one of its replicas: the one with the fewest bytes so far.

    Every replica computes the same answer from the same names and shapes, so nothing is sent and plans hold one copy.
    """
    load, shared = [0] * replicas.size, {}
    for name in sorted(tensors):
        tensor = tensors[name]
        owner = load.index(min(load))
        load[owner] += tensor.local.element_size() * sum(prod(b.shape) for b in tensor.written)
        shared[name] = replace(tensor, writes=tensor.writes and owner == replicas.index)
    return shared


class SavePlanner(DefaultSavePlanner):
    """DCP's planner over logical tensors. The default looks chunks up in subclasses of Tensor only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner over logical tensors: each chunk of this rank is filled from the stored ones that overlap it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:  # noqa: ANN001  as in the base class
        # not the base class's: it passes over the values by type and replaces those it does not know by None
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)
