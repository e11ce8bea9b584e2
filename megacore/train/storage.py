"""The files of one checkpoint: a storage layer for torch.distributed.checkpoint without pickle.

    metadata.json             what is stored (manifest.py)
    rank-00003-0.safetensors  chunks that rank 3 wrote; several files where one would pass FILE_BYTES

Each chunk is one tensor of a safetensors file, under its name (`model/wte.weight`) where it is the whole tensor and
`name@offsets` where it is a part. DCP's own file reader unpickles its metadata, which runs whatever code a file holds;
this one reads JSON and safetensors and nothing else.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megacore.train import regular
from megacore.train.agreement import CheckpointError, reason
from megacore.train.coverage import key_of
from megacore.train.manifest import (
    ABSENT,
    FORMAT,
    VERSION,
    Stored,
    chunks_of,
    digest,
    dtype_of,
    fsync,
    unreadable,
    write_metadata,
)

FILE_BYTES = 512 << 20  # chunks are copied out of the model one file at a time: bounds the memory that saving needs


def _planned(body: dict[str, Any]) -> Metadata:
    """metadata.json as DCP's planner wants it."""
    tensors = {}
    for name, entry in body["tensors"].items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks_of(body, name)]
        properties = TensorProperties(dtype=dtype_of(entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    return Metadata(state_dict_metadata=tensors)


# one shard file


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A safetensors file; whatever goes wrong with it is an error that names it. It is read once before it is mapped:
    an I/O error is an OSError then, where in a mapping it would be a signal."""
    try:
        with regular.open_regular(file) as whole:
            buffer = bytearray(1 << 20)
            while whole.readinto(buffer):
                pass
    except OSError as error:
        if error.errno not in ABSENT:
            raise unreadable(file, error) from None
        raise CheckpointError(f"missing: {file} does not exist") from None
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except CheckpointError:
        raise
    except Exception as error:  # SafetensorError, OSError: truncated, not a safetensors file, unreadable
        raise CheckpointError(f"corrupt: {file} cannot be read: {reason(error)}") from None


def _read(handle: Any, file: Path, chunk: Stored, dtype: torch.dtype) -> Tensor:
    tensor = handle.get_tensor(chunk.key)
    if tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
        here = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise CheckpointError(f"corrupt: {file}: {chunk.key} is {here}, its manifest says {chunk.sizes} {dtype}")
    if digest(tensor) != chunk.blake2b:
        raise CheckpointError(f"corrupt: {file} does not match its checksum at {chunk.key}")
    return tensor


def check_size(path: Path, body: dict[str, Any], file: str) -> None:
    """CheckpointError that names the file where it is not as long as it was written. Costs no reading."""
    target, written = path / file, body["files"][file]
    if target.exists() and target.stat().st_size != written:
        raise CheckpointError(f"corrupt: {target} has {target.stat().st_size} bytes, {written} were written")


def verify_file(path: Path, body: dict[str, Any], file: str) -> None:
    """Read every chunk of one file and compare it with its checksum. CheckpointError names the file."""
    target = path / file
    check_size(path, body, file)
    with _open(target) as handle:
        for name, entry in body["tensors"].items():
            for chunk in chunks_of(body, name):
                if chunk.file == file:
                    _read(handle, target, chunk, dtype_of(entry["dtype"]))


class SafetensorsWriter(StorageWriter):
    """Writes this rank's chunks into `path`, which exists; the coordinator then writes metadata.json. Committing (the
    rename) is the caller's: until then nobody takes the directory for a checkpoint."""

    def __init__(self, path: Path, rank: int, head: dict[str, Any], names: list[str]):
        self.path, self.rank, self.head, self.names = path, rank, head, names

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return SavePlan(plan.items, storage_data=self.names, planner_data=plan.planner_data)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        asked = {name for plan in plans for name in plan.storage_data}
        given = {item.index.fqn for plan in plans for item in plan.items}
        if asked - given:  # every rank thinks that another one writes it
            raise CheckpointError(f"no rank writes {min(asked - given)}; some rank must be its first holder")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            results += self._write_file(f"rank-{self.rank:05d}-{number}.safetensors", items, planner)
        fsync(self.path)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        tensors, placed = {}, []
        for item in items:
            data, chunk = item.tensor_data, item.tensor_data.chunk
            key = key_of(item.index.fqn, data.size, chunk.offsets, chunk.sizes)
            copy = torch.empty(chunk.sizes, dtype=data.properties.dtype)  # chunks are views, perhaps on a GPU
            tensors[key] = copy.copy_(planner.resolve_data(item))
            placed.append((item, Stored(tuple(chunk.offsets), tuple(chunk.sizes), name, key, digest(copy))))
        try:
            save_file(tensors, self.path / name)
            os.chmod(self.path / name, _mode_of_new_files(self.path))  # safetensors makes its files for the owner alone
            fsync(self.path / name)
            size = os.path.getsize(self.path / name)
        except Exception as error:  # no space, not writable; as a type that can travel between ranks
            raise CheckpointError(f"cannot write {self.path / name}: {reason(error)}") from None
        return [WriteResult(item.index, size, stored) for item, stored in placed]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[dict[str, Any]]] = defaultdict(list)
        files = {}
        for result in (r for per_rank in results for r in per_rank):
            chunks[result.index.fqn].append(vars(result.storage_data))
            files[result.storage_data.file] = result.size_in_bytes
        tensors = {}
        for name, entry in sorted(metadata.state_dict_metadata.items()):
            covered, full = sum(prod(c["sizes"]) for c in chunks[name]), prod(entry.size)
            if covered != full:  # DCP looks for overlaps always, but for gaps only with several ranks
                raise CheckpointError(f"{name}: {covered} of {full} elements are written; its records do not cover it")
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks[name]}
        body = {"format": FORMAT, "version": VERSION, **self.head, "files": files, "tensors": tensors}
        write_metadata(self.path, json.loads(json.dumps(body)))
        fsync(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _mode_of_new_files(folder: Path) -> int:
    """Who may read a file that is made here, by umask and folder (umask itself can only be read by setting it)."""
    probe = folder / f".mode-{uuid4().hex}"
    handle = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return os.fstat(handle).st_mode & 0o777
    finally:
        os.close(handle)
        probe.unlink()


def _batches(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Items in order, cut so that a file holds at most FILE_BYTES (or one chunk that is larger)."""
    batch: list[WriteItem] = []
    total = 0
    for item in items:
        size = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if batch and total + size > FILE_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


class SafetensorsReader(StorageReader):
    """Reads the chunks that this rank's plan asks for, each once, whole, and checked before any of it is used."""

    def __init__(self, path: Path, body: dict[str, Any]):
        self.path, self.body = path, body

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _planned(self.body)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, dict[tuple[str, Stored], list]] = defaultdict(lambda: defaultdict(list))
        names = {item.storage_index.fqn for item in plan.items}
        places = {name: {c.offsets: c for c in chunks_of(self.body, name)} for name in names}
        for item in plan.items:
            name = item.storage_index.fqn
            chunk = places[name][tuple(item.storage_index.offset)]
            by_file[chunk.file][name, chunk].append(item)
        for file, wanted in by_file.items():
            with _open(self.path / file) as handle:
                for (name, chunk), items in wanted.items():
                    tensor = _read(handle, self.path / file, chunk, dtype_of(self.body["tensors"][name]["dtype"]))
                    for item in items:
                        at = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                        planner.resolve_tensor(item).detach().copy_(tensor[at])
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True
