"""GPT: a plain single-device decoder (learned positions, pre-norm, GeLU, tied head), and the plan that makes it
parallel.

B batch, S sequence, H hidden, V vocabulary. x = tok[id] + pos; for each block x += attn(norm(x)), x += mlp(norm(x));
logits = norm(x) head^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacore.models.attention import CausalSelfAttention
from megacore.parallel.plan import Link, Plan
from megacore.parallel.random import Dropout, Streams, name_dropouts
from megacore.parallel.record import divisors
from megacore.parallel.styles import Column, Fused, Head, HeadDropout, Qkv, QueryHeads, Row, Shares, Vocab

GELU = {"tanh": "tanh", "erf": "none"}  # our names of the two forms -> torch's


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. ffn and kv_heads default to 4*hidden and heads; `tied` shares the embedding with the head."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    seq_length: int
    ffn: int | None = None
    kv_heads: int | None = None
    dropout: float = 0.0
    activation: str = "tanh"
    tied: bool = True
    eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "vocab_size", "seq_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} is not a positive whole number; give {field} >= 1")
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} does not divide by heads={self.heads}; choose one of {divisors(self.hidden)}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose one of {divisors(self.heads)}"
            )
        if self.activation not in GELU:
            raise ValueError(f"activation={self.activation!r} is not a GeLU form; choose one of {sorted(GELU)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is outside [0, 1); choose a share of elements to drop below 1")

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig, streams: Streams):
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.hidden)
        self.pos = nn.Embedding(config.seq_length, config.hidden)
        self.drop = Dropout(config.dropout, streams)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:  # [B, S], [S] -> [B, S, H]
        if ids.shape[1] > self.pos.num_embeddings:
            raise ValueError(
                f"sequence of {ids.shape[1]} tokens is longer than seq_length={self.pos.num_embeddings}; cut it"
            )
        return self.drop(self.tok(ids) + self.pos(positions))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, config.ffn_size)
        self.act = nn.GELU(approximate=GELU[config.activation])
        self.fc2 = nn.Linear(config.ffn_size, config.hidden)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, streams: Streams):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, config.eps)
        self.attn = CausalSelfAttention(config.hidden, config.heads, config.kv_heads, config.dropout, streams)
        self.drop1 = Dropout(config.dropout, streams)
        self.norm2 = nn.LayerNorm(config.hidden, config.eps)
        self.mlp = MLP(config)
        self.drop2 = Dropout(config.dropout, streams)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        x = x + self.drop1(self.attn(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """`model(ids) -> logits [B, S, V]`. With dropout, train inside `with model.streams.at(batch):`."""

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config, self.streams = config, Streams(seed)
        self.embed = Embedding(config, self.streams)
        self.blocks = nn.ModuleList(Block(config, self.streams) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.tok.weight
        name_dropouts(self)

    def forward(self, ids: Tensor) -> Tensor:  # [B, S] -> [B, S, V]
        x = self.embed(ids, torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialise(config: GPTConfig):
    """GPT-2's initialisation as an initialiser for materialize(): N(0, std), residual projections N(0, std / sqrt(2
    L)), biases 0, norms 1."""

    def init(name: str, full: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            full.zero_()
        elif "norm" in name:
            full.fill_(1.0)
        else:
            residual = name.endswith(("attn.out.weight", "mlp.fc2.weight"))
            full.normal_(0.0, config.init_std * ((2 * config.layers) ** -0.5 if residual else 1.0), generator=generator)

    return init


def plan(config: GPTConfig, vocab_multiple: int = 1) -> Plan:
    """Attention by heads, MLP by columns then rows, embedding and head by vocabulary; one link a block."""
    heads, kv = config.heads, config.num_kv_heads
    table = {
        "embed.tok": Vocab(),
        "blocks.*.attn": Shares(heads, kv, {"heads": ("q", 1), "kv_heads": ("kv", 1)}),
        "blocks.*.attn.qkv": Qkv(heads, kv),
        "blocks.*.attn.drop": HeadDropout(heads, kv),
        "blocks.*.attn.out": QueryHeads(heads, kv, row=True),
        "blocks.*.mlp.fc1": Column(activation=GELU[config.activation]),
        "blocks.*.mlp.act": Fused(),
        "blocks.*.mlp.fc2": Row(),
        "head": Head(),
    }
    return Plan(table, config.vocab_size, lambda _: links(config), vocab_multiple, gives_up_logits=True)


def links(config: GPTConfig) -> list[Link]:
    """Embedding | block 0 | ... | final norm and head. Costs in multiply-adds a token: 12 H^2 a block or so, H V the
    head."""
    h, s = config.hidden, config.seq_length
    block = h * h * (2 + 2 * config.num_kv_heads / config.heads) + 2 * h * config.ffn_size + 2 * s * h

    def block_link(i: int) -> Link:
        return Link((f"blocks.{i}",), lambda m, t, _: {"x": m.blocks[i](t["x"])}, block)

    return [
        Link(("embed",), lambda m, _, batch: {"x": m.embed(batch.ids, batch.positions)}, float(h)),
        *(block_link(i) for i in range(config.layers)),
        Link(("norm", "head"), lambda m, t, _: {"logits": m.head(m.norm(t["x"]))}, float(h * config.vocab_size)),
    ]


def flops_per_token(config: GPTConfig) -> float:
    """Floating-point operations of forward and backward for one token: 6 for each weight of a matrix product, and the
    attention products 12 L H S (as if not causal), as in Narayanan et al. 2021, equation 3, without recomputation."""
    h = config.hidden
    matrices = h * h * (2 + 2 * config.num_kv_heads / config.heads) + 2 * h * config.ffn_size
    return 6.0 * (config.layers * matrices + h * config.vocab_size) + 12.0 * config.layers * h * config.seq_length
