"""Causal self-attention as a plain module. B batch, S sequence, H hidden, n query heads, g KV heads, d head size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.random import Dropout, Streams
from megacore.parallel.record import divisors


class CausalSelfAttention(nn.Module):
    """out(softmax(q k^T / sqrt(d) + causal) v), q, k, v the rows [q | k | v] of one projection.

    `heads` and `kv_heads` are those present here, so a plan that splits the projections by heads sets them to its
    share.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int | None = None, dropout: float = 0.0, streams: Streams | None = None
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if hidden % heads:
            raise ValueError(f"hidden={hidden} does not divide by heads={heads}; choose one of {divisors(hidden)}")
        if heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}; choose one of {divisors(heads)}")
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_size)
        self.drop = Dropout(dropout, streams or Streams())
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H] -> [B, S, H]
        b, s, _ = x.shape
        n, g, d = self.heads, self.kv_heads, self.head_size
        q, k, v = self.qkv(x).split((n * d, g * d, g * d), dim=-1)
        q, k, v = (t.unflatten(-1, (m, d)).transpose(1, 2) for t, m in ((q, n), (k, g), (v, g)))  # [B, n or g, S, d]
        if g < n:
            k, v = (t.repeat_interleave(n // g, dim=1) for t in (k, v))
        return self.out(self._attend(q, k, v).transpose(1, 2).reshape(b, s, n * d))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, n, S, d]
        if not self.training or self.drop.p == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # written out: the masks of torch's fused kernel depend on the layout, ours on (sample, position, head, key)
        s = q.shape[-2]
        scores = q @ k.transpose(-2, -1) * self.head_size**-0.5
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        return self.drop(scores.masked_fill(future, float("-inf")).softmax(-1)) @ v
