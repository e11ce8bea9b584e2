"""Models with a parameter that is whole but acts among split columns or heads, one kind each."""

import torch
from torch import nn

from megacore.parallel.partial import CopyTo, Partial, PerHead, Split, Together
from megacore.parallel.plan import Plan
from megacore.parallel.styles import Column, Head, KvHeads, QueryHeads, Row, Shares, Vocab

HEADS, SIZE, HIDDEN, FFN, VOCAB = 6, 4, 12, 20, 30


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.heads = kind, HEADS
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HEADS * SIZE))
        self.o_proj = nn.Linear(HEADS * SIZE, HIDDEN)
        if kind in ("qk_norm", "head_norm"):
            first, second = ("q_norm", "k_norm") if kind == "qk_norm" else ("over_q", "over_k")
            setattr(self, first, nn.RMSNorm(SIZE, eps=1e-6))
            setattr(self, second, nn.RMSNorm(SIZE, eps=1e-6))
        if kind == "full_norm":
            self.q_norm = nn.RMSNorm(HEADS * SIZE, eps=1e-6)
        if kind == "slopes":
            self.slopes = nn.Parameter(torch.linspace(0.1, 0.6, HEADS))
        if kind == "table":
            self.table = nn.Embedding(8, HEADS)
        if kind == "temperature":
            self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = self.q_norm(q) if self.kind == "full_norm" else q
        q, k, v = (t.view(b, s, -1, SIZE) for t in (q, k, v))
        if self.kind == "qk_norm":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.kind == "head_norm":
            q, k = self.over_q(q), self.over_k(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1)
        far = (torch.arange(s)[:, None] - torch.arange(s)).clamp(0, 7)
        if self.kind == "slopes":
            scores = scores - self.slopes[:, None, None] * far
        if self.kind == "table":
            scores = scores + self.table(far).permute(2, 0, 1)
        if self.kind == "temperature":
            scores = scores * self.temperature
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))


class Mlp(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(HIDDEN)  # before the Column, in the same parent: whole and right
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        if kind == "prelu":
            self.act = nn.PReLU()
        if kind == "gate":
            self.gate = nn.Parameter(torch.tensor([0.8]))
        if kind == "columns":
            self.gate = nn.Parameter(torch.linspace(0.5, 1.5, FFN))
        if kind == "router":
            self.router = nn.Linear(HIDDEN, 1)
        if kind == "layer_norm":
            self.inner = nn.LayerNorm(FFN)

    def forward(self, x):
        x = self.norm(x)
        y = self.up(x)
        if self.kind == "prelu":
            y = self.act(y)
        if self.kind in ("gate", "columns"):
            y = y.tanh() * self.gate
        if self.kind == "router":
            y = y.tanh() * self.router(x).sigmoid()
        if self.kind == "layer_norm":
            y = self.inner(y)
        return self.down(y)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.tok, self.attn, self.mlp = nn.Embedding(VOCAB, HIDDEN), Attention(kind), Mlp(kind)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)
        if kind == "logit_scale":
            self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, ids):
        x = self.tok(ids)
        x = x + self.attn(x)
        logits = self.head(self.norm(x + self.mlp(x)))
        return logits * self.logit_scale if self.kind == "logit_scale" else logits


MENDED = {  # the rows that are right; qk_norm needs none
    "plain": {},
    "qk_norm": {},
    "head_norm": {"attn.over_q": Partial(), "attn.over_k": Partial()},
    "slopes": {"attn": Together(Shares(HEADS, HEADS, {"heads": ("q", 1)}), PerHead("slopes", heads=HEADS))},
    "table": {"attn.table": PerHead(heads=HEADS, dim=1)},
    "temperature": {
        "attn": Together(Shares(HEADS, HEADS, {"heads": ("q", 1)}), Partial("temperature")),
    },
    "prelu": {"mlp.act": Partial()},
    "gate": {"mlp": Partial("gate")},
    "columns": {"mlp": Split("gate")},
    "router": {"mlp.router": CopyTo()},
    "logit_scale": {"": Partial("logit_scale")},
}


def plan(rows):
    table = {
        "tok": Vocab(),
        "attn": Shares(HEADS, HEADS, {"heads": ("q", 1)}),
        "attn.q_proj": QueryHeads(HEADS, HEADS),
        "attn.k_proj": KvHeads(HEADS, HEADS),
        "attn.v_proj": KvHeads(HEADS, HEADS),
        "attn.o_proj": QueryHeads(HEADS, HEADS, row=True),
        "mlp.up": Column(),
        "mlp.down": Row(),
        "head": Head(),
    }
    return Plan(table | rows, vocab_size=VOCAB)


def build(kind):
    torch.manual_seed(3)
    return Model(kind).double()


def bare(model):
    """A plan without the rows that mend."""
    return plan({})


def mended(model):
    return plan(MENDED[model.kind])


def qk_norm():
    return Model("qk_norm")


def router():
    return Model("router")


def columns():
    return Model("columns")


def prelu():
    return Model("prelu")
