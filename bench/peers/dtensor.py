"""A GPT made tensor-parallel by torch itself: parallelize_module for the layers, loss_parallel for the loss.

The same function as megacore.models.gpt.GPT, from that model's weights; q, k and v are separate projections, because a
DTensor split by columns cannot be cut into q, k and v again without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from megacore.models.gpt import GELU, GPTConfig


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        h = config.hidden
        self.head_size, self.approximate = h // config.heads, GELU[config.activation]
        self.norm1, self.norm2 = nn.LayerNorm(h, config.eps), nn.LayerNorm(h, config.eps)
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(h, config.ffn_size), nn.Linear(config.ffn_size, h)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate=self.approximate))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.hidden)
        self.pos = nn.Embedding(config.seq_length, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:  # [B, S] -> [B, S, V], a DTensor split by vocabulary
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """megacore's names and fused rows [q | k | v] -> the names above."""
    found = {}
    for name, value in state.items():
        plain = name.replace("embed.", "").replace("mlp.", "").replace("attn.out", "out")
        if ".attn.qkv." in name:
            for which, rows in zip("qkv", value.chunk(3), strict=True):
                found[name.replace("attn.qkv", which)] = rows
        else:
            found[plain] = value
    return found


def build(config: GPTConfig, state: Mapping[str, Tensor], world: int) -> tuple[Callable, nn.Module, Tensor]:
    """(step(ids, targets) -> loss after backward, the model, its position table), tensor-parallel over all ranks."""
    model = GPT(config)
    model.load_state_dict(renamed(state))
    mesh = init_device_mesh("cpu", (world,))
    vocabulary = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"tok": RowwiseParallel(input_layouts=Replicate()), "head": vocabulary})
    columns, rows = ("q", "k", "v", "fc1"), ("out", "fc2")
    for block in model.blocks:
        styles = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh, styles)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.detach().full_tensor()

    return step, model, model.pos.weight
