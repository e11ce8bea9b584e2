"""A model of a user's own, not a Transformer of ours: what `megacore verify --model tests.user_model:Tiny` imports."""

from dataclasses import replace

import torch
from torch import nn

from megacore.parallel.plan import Link, Plan
from megacore.parallel.styles import Column, Head, KeyedDropout, Row, Vocab


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(30, 12)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(12, 30)

    def body(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))

    def forward(self, ids):
        return self.head(self.body(self.tok(ids)))


def _links(_):
    return [
        Link(("tok",), lambda m, _, batch: {"x": m.tok(batch.ids)}),
        Link(("norm", "up", "down", "drop"), lambda m, t, _: {"x": m.body(t["x"])}),
        Link(("head",), lambda m, t, _: {"logits": m.head(t["x"])}),
    ]


def plan(_):
    table = {"tok": Vocab(), "up": Column(), "down": Row(), "drop": KeyedDropout(), "head": Head()}
    return Plan(table, vocab_size=30, chain=_links)


class Wrong(Tiny):
    """Adds a rank's own noise: parallel cannot equal serial."""

    def body(self, x):
        return super().body(x) * (1 + 1e-6 * self.up.weight.shape[0])


class Odd(Tiny):
    """What plain models also have: a frozen part, a number, a matrix that nothing uses, logits that something saved."""

    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.norm.requires_grad_(False)

    def logits(self, x):
        return 4 * torch.tanh(self.head(x * self.scale) / 4)

    def forward(self, ids):
        return self.logits(self.body(self.tok(ids)))


def odd_plan(model):
    first, middle, last = _links(model)
    last = replace(last, modules=("head", "unused", "scale"), run=lambda m, t, _: {"logits": m.logits(t["x"] * 1.0)})
    middle = replace(middle, run=lambda m, t, _: {"x": m.body(t["x"])})
    table = {"tok": Vocab(), "up": Column(), "down": Row(), "drop": KeyedDropout(), "head": Head()}
    return Plan(table, vocab_size=30, chain=lambda _: [first, middle, last])


def data_parallel_only():
    model = Tiny()
    model.drop = nn.Identity()
    return model


def hugging_face():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=4)
    return GPT2LMHeadModel(
        GPT2Config(attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **sizes)
    )  # its other dropouts stay on


def headless(_):
    return Plan({"up": Column(), "down": Row()}, vocab_size=30)


def small_vocabulary(_):
    return Plan({}, vocab_size=20)


def no_module():
    return 3
