"""metadata.json: what a checkpoint holds, where each chunk lies, and the checksums of both.

    {format, version, step, extra, files: {name: bytes},
     tensors: {name: {dtype, shape, chunks: [{offsets, sizes, file, key, blake2b}]}}, blake2b}

The digest of a chunk is that of its bytes; the digest at the end is that of the rest of the content. What the content
must be beside that, coverage.py says.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.train import regular
from megacore.train.agreement import CheckpointError, reason
from megacore.train.coverage import first_fault
from megacore.train.plain import plain, shortened

FORMAT, VERSION = "megacore checkpoint", 1
METADATA = "metadata.json"


# What says of a path that nothing readable is there; every other error of the system says that it cannot be known.
ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}


class Unreadable(CheckpointError):
    """The system does not give a file (no permission, an I/O error): whether it is good is not known. To step back to
    an older checkpoint would lose work that may well be there."""

    def __init__(self, text: str):
        super().__init__(text)


def unreadable(file: Path, error: OSError) -> Unreadable:
    return Unreadable(
        f"{file} cannot be read: {reason(error)}; mend that, or move the checkpoint away to go on without"
    )


@dataclass(frozen=True)
class Stored:
    """Where a chunk lies, and the digest of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    blake2b: str


def digest(tensor: Tensor) -> str:
    """blake2b, 16 bytes, of a CPU tensor's elements in row-major order (about 1 GB/s)."""
    flat = tensor.contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy() if flat.numel() else b"", digest_size=16).hexdigest()


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(body: dict[str, Any]) -> str:
    canonical = json.dumps({k: v for k, v in body.items() if k != "blake2b"}, sort_keys=True)
    return blake2b(canonical.encode(), digest_size=16).hexdigest()


def write_metadata(path: Path, body: dict[str, Any]) -> None:
    """Write metadata.json with its digest, and flush it. `body` survives JSON unchanged (string keys, no tuples)."""
    with open(path / METADATA, "w", encoding="utf-8") as file:
        json.dump({**body, "blake2b": _seal(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_metadata(path: Path) -> dict[str, Any]:
    """metadata.json of a checkpoint, checked against its digest; CheckpointError says in one line what is wrong,
    Unreadable that it cannot be known."""
    file = path / METADATA
    try:
        body = json.loads(regular.read_bytes(file))
    except FileNotFoundError:
        raise CheckpointError(f"unfinished: {file} does not exist") from None
    except OSError as error:
        if error.errno not in ABSENT:
            raise unreadable(file, error) from None
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"corrupt: {file} cannot be read: {reason(error)}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"wrong format: {file} does not say format={FORMAT!r}")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"wrong format: {file} has version={shortened(repr(body.get('version')), 60)}, this code reads {VERSION}"
        )
    if body.get("blake2b") != _seal(body):
        raise CheckpointError(f"corrupt: {file} does not match its checksum")
    if fault := first_fault(body):
        why = plain(shortened(fault))
        raise CheckpointError(f"corrupt: {file}: {why}; take another checkpoint, or save this one again")
    return body


def chunks_of(body: dict[str, Any], name: str) -> list[Stored]:
    return [Stored(**{**c, "offsets": tuple(c["offsets"]), "sizes": tuple(c["sizes"])}) for c in _chunks(body, name)]


def _chunks(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return body["tensors"][name]["chunks"]


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)
