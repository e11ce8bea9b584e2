"""Checkpoints: a changed manifest (sealed again, or not) and changed shards. Refused, or the very tensors that were
saved: never other values without a word."""

import json
import random
from pathlib import Path

import torch

from megacore.train import checkpoint, manifest
from megacore.train.logical import LogicalTensor

from . import mutate
from .targets import refusal


class Shards:
    def __init__(self, folder: Path):
        self.folder = folder / "checkpoints"
        draw = torch.Generator().manual_seed(0)
        self.tensors = {f"model/w{i}": torch.rand(3, 4 + i, generator=draw) for i in range(3)}
        logical = {name: LogicalTensor.whole(name.partition("/")[2], t) for name, t in self.tensors.items()}
        self.path = checkpoint.save(self.folder, 1, logical, {"settings": {"run": {}}})
        (self.shard,) = self.path.glob("*.safetensors")
        self.data, self.body = self.shard.read_bytes(), (self.path / manifest.METADATA).read_bytes()

    def try_one(self, draw: random.Random) -> str:
        self.change(draw)
        found: dict = {}

        def read() -> None:
            newest = checkpoint.find(self.folder)
            if newest is None:
                raise ValueError("no valid checkpoint")
            found.update(checkpoint.read_full(newest, list(self.tensors)))

        said = refusal(read)
        if not self.path.exists():  # set aside
            for path in self.folder.iterdir():
                path.rename(self.path)
        if said:
            return "refused"
        for name, tensor in self.tensors.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, f"{name} has other values"
        return "right"

    def change(self, draw: random.Random) -> None:
        changed = draw.random() > 0.1  # one that is whole must load, and every other is refused
        self.shard.write_bytes(mutate.of_bytes(draw, self.data) if changed else self.data)


class Manifest(Shards):
    def change(self, draw: random.Random) -> None:
        (self.path / manifest.METADATA).write_bytes(mutate.of_json(draw, self.body))


class Sealed(Shards):
    """A manifest as a tool would write it that seals what it does not understand: the digest is right, the rest not."""

    def change(self, draw: random.Random) -> None:
        body = mutate.of_tree(draw, json.loads(self.body))
        if isinstance(body, dict):
            body["blake2b"] = manifest._seal(body)
        (self.path / manifest.METADATA).write_text(json.dumps(body))
