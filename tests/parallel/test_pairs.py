"""Rows that belong together: a Column and its Row wherever they are, the blocks and heads of one fused weight;
against the unsplit model, or one line that names the row."""

from functools import partial

import pytest
import torch
from torch import nn

from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.styles import Column, Head, Qkv, QueryHeads, Row, Vocab
from tests.parallel.plain_net import TABLE, Net, Whole, net, rank, refused, same_as_unsplit


def nested(model):
    """up and down in modules of their own, as many models have them."""
    model.inside = nn.ModuleDict({"a": nn.ModuleDict({"up": model.up}), "b": nn.ModuleDict({"down": model.down})})
    del model.up, model.down
    model.__class__ = Nested


class Nested(Net):
    def forward(self, ids):
        x = self.tok(ids)
        return self.head(x + self.inside["b"]["down"](self.act(self.inside["a"]["up"](x))))


NESTED = {"tok": Vocab(), "inside.a.up": Column(), "inside.b.down": Row(), "head": Head()}


def test_a_column_without_its_row():
    refused(r"plan row 'up': Column\(\) on up: its output is split over ranks, and no Row", {"up": Column()})
    refused(r"plan row 'up': Column\(\) on up: its output", {"tok": Vocab(), "up": Column(), "head": Head()}, 3)
    refused(r"plan row 'up': Qkv\(\) on up: its output", {"up": Qkv(2, 1)})
    refused(r"'inside.a.up': Column\(\) on inside.a.up: its output", {"inside.a.up": Column()}, change=nested)


def test_a_row_without_its_column():
    refused(r"plan row 'down': Row\(\) on down: it wants its input split over ranks, and no Col", {"down": Row()})
    refused(r"'down': Row\(\) on down: it wants", {"up": Column(gather_output=True), "down": Row()})
    refused(r"'up': Column\(\) on up: its output", {"up": Column(), "down": Row(input_is_parallel=False)})


def test_the_partner_of_another_block_is_none():
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2))
    for table, name in (
        ({"*.up": Column(), "1.down": Row()}, "0.up"),
        ({"0.up": Column(), "*.down": Row()}, "1.down"),
    ):
        with pytest.raises(ValueError, match=rf"on {name}: "):
            parallelize(blocks, rank(2), Plan(table, vocab_size=1))


def test_partners_that_split_differently():
    words = (
        r"its 12 features are split otherwise than those of down: rank 0 has \[\(0, 8\)\] and \[\(0, 6\)\]; give both"
    )
    refused(rf"'up': Column\(\) on up: {words}", TABLE | {"up": Column(units=3)})
    refused("split otherwise", {"up": QueryHeads(3, 3), "down": Row()})


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    "change, table",
    [
        (None, TABLE | {"up": Column(units=3), "down": Row(units=3)}),
        (None, TABLE | {"up": Column(gather_output=True), "down": Row(input_is_parallel=False)}),
        (None, {"up": Column(gather_output=True), "head": Head()}),
        (None, {"down": Row(input_is_parallel=False), "head": Head()}),
        (None, {"up": QueryHeads(6, 6), "down": QueryHeads(6, 6, row=True), "head": Head()}),
        (nested, NESTED),
    ],
)
def test_partners_wherever_they_are(pool, tp, change, table):
    same_as_unsplit(pool, tp, change, table)


def test_a_style_of_ones_own_may_be_the_partner():
    model = net()
    parallelize(model, rank(2), Plan({"up": Column(), "down": Whole()}, vocab_size=12))
    assert model.up.local == 6


class Gated(Net):
    def forward(self, ids):
        x = self.tok(ids)
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.head(x + self.down(torch.nn.functional.silu(gate) * up))


def gated(model):
    model.__class__, model.gate_up_proj = Gated, nn.Linear(8, 24)
    del model.up
    weights = torch.arange(24 * 9, dtype=torch.float64).view(24, 9).sin()
    model.gate_up_proj.weight = nn.Parameter(weights[:, :8].clone())
    model.gate_up_proj.bias = nn.Parameter(weights[:, 8].clone())


GATED = {"tok": Vocab(), "down": Row(), "head": Head()}


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_gate_and_up_in_one_are_split_each(pool, tp):
    same_as_unsplit(pool, tp, gated, GATED | {"gate_up_proj": Column(blocks=2)})


def test_gate_and_up_in_one_are_not_cut_as_one():
    words = r"its 24 rows look like 2 blocks of 12 in one \(gate_up_proj\).*say Column\(blocks=2\)"
    refused(words, GATED | {"gate_up_proj": Column()}, change=gated)

    def renamed(model):
        gated(model)
        model.wide = model.gate_up_proj
        del model.gate_up_proj

    refused(r"its 24 rows look like 2 blocks of 12 in one \(wide\)", GATED | {"wide": Column()}, change=renamed)
    model = net(gated)
    parallelize(model, rank(2), Plan(GATED | {"gate_up_proj": Column(blocks=1)}, vocab_size=12))
    assert model.gate_up_proj.pieces[0] == (((0, 12), True),)  # its author has said so


class PerHead(Net):
    """Attention as GPT-NeoX has it: rows [q k v] of one KV head after another."""

    def forward(self, ids):
        x = self.tok(ids)
        b, s, _ = x.shape
        y = self.query_key_value(x).view(b, s, -1, self.group + 2, 2)
        q, k, v = y[..., :-2, :], y[..., -2:-1, :].expand_as(y[..., :-2, :]), y[..., -1:, :].expand_as(y[..., :-2, :])
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.down(a.transpose(1, 2).flatten(2)))


def per_head(model, kv=6):
    rows = (6 + 2 * kv) * 2
    model.__class__, model.query_key_value, model.group = PerHead, nn.Linear(8, rows), 6 // kv
    del model.up
    weights = torch.arange(rows * 9, dtype=torch.float64).view(rows, 9).sin()
    model.query_key_value.weight = nn.Parameter(weights[:, :8].clone())
    model.query_key_value.bias = nn.Parameter(weights[:, 8].clone())


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kv", [6, 3])
def test_heads_that_lie_one_after_another(pool, tp, kv):
    table = GATED | {"query_key_value": Qkv(6, kv, interleaved=True), "down": QueryHeads(6, kv, row=True)}
    same_as_unsplit(pool, tp, partial(per_head, kv=kv), table)


def test_the_order_of_heads_is_said_where_it_differs_among_models():
    refused("say interleaved=True or interleaved=False", GATED | {"query_key_value": Qkv(6, 6)}, change=per_head)


@pytest.mark.parametrize("heads, kv, tp", [(8, 2, 4), (8, 1, 3), (6, 2, 3), (6, 6, 4), (12, 3, 2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_row_is_held_first_by_one_rank(heads, kv, tp, interleaved):
    size = (heads + 2 * kv) * 2
    pieces = Qkv(heads, kv, interleaved=interleaved).pieces(size, rank(tp).tp)
    firsts = sorted(row for one in pieces for (a, b), first in one if first for row in range(a, b))
    assert firsts == list(range(size))
