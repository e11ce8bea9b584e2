"""Tables that mean nothing, or not what their author thinks: one line that names the row, and nothing is changed."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Mesh
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.styles import Column, Head, KvHeads, Qkv, QueryHeads, Row, Shares, Vocab
from tests.parallel.plain_net import TABLE, net, rank, same_as_unsplit


def refused(words, table, tp=2, change=None, **settings):
    for index in range(tp):
        model = net(change)
        before = dict(model.named_modules(remove_duplicate=False))
        with pytest.raises(ValueError, match=words) as caught:
            parallelize(model, rank(tp, index), Plan(table, **{"vocab_size": 12} | settings))
        assert "\n" not in str(caught.value)
        assert dict(model.named_modules(remove_duplicate=False)) == before


@pytest.mark.parametrize(
    "table, words",
    [
        ({"up": Column}, r"plan row 'up' has the class Column, wanted a style; write Column\(\)"),
        ({"up": "column"}, r"plan row 'up' has 'column', a str, wanted a style such as Column\(\)"),
        ({"up": None}, "plan row 'up' has None"),
        ({3: Column()}, "plan row 3 is a int, wanted a module's name"),
        ([("up", Column())], "table is a list, wanted a dict"),
        (None, "table is a NoneType, wanted a dict"),
        ("up", "table is a str, wanted a dict"),
    ],
)
def test_what_is_no_table(table, words):
    with pytest.raises(ValueError, match=words) as caught:
        Plan(table, vocab_size=12)
    assert "\n" not in str(caught.value)


def test_a_table_that_changed_since_is_read_again():
    table = dict(TABLE)
    plan = Plan(table, vocab_size=12)
    table["up"] = "column"
    with pytest.raises(ValueError, match="plan row 'up' has 'column'"):
        parallelize(net(), Mesh(), plan)


@pytest.mark.parametrize("field", ["vocab_size", "vocab_multiple"])
@pytest.mark.parametrize("value", [0, -8, 2.0, True, None, "12"])
def test_sizes_of_a_plan_are_whole_numbers(field, value):
    with pytest.raises(ValueError, match=rf"Plan\({field}={value!r}\) is not a positive whole number"):
        Plan(TABLE, **{"vocab_size": 12} | {field: value})


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Column(units=0), r"Column\(units=0\)"),
        (lambda: Column(blocks=-1), r"Column\(blocks=-1\)"),
        (lambda: Column(activation="gelu"), r"Column\(activation='gelu'\) is not a form of GeLU"),
        (lambda: Row(units=2.0), r"Row\(units=2.0\)"),
        (lambda: Qkv(0, 1), r"Qkv\(heads=0\)"),
        (lambda: KvHeads(4, 0), r"KvHeads\(kv_heads=0\)"),
        (lambda: QueryHeads("4", 4), r"QueryHeads\(heads='4'\)"),
        (lambda: Shares(True, 1), r"Shares\(heads=True\)"),
    ],
)
def test_numbers_of_a_style_are_refused_where_it_is_written(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(
    "row, style, words",
    [
        ("up", Vocab(), "a Linear is no nn.Embedding"),
        ("tok", Head(), "an Embedding is no nn.Linear"),
        ("tok", Row(), "an Embedding is no nn.Linear"),
        ("act", Column(), "a GELU is no nn.Linear"),
        ("up", Column(transposed=True), "transposed=True is for Conv1D"),
        ("up", Column(units=5), "size=12 does not divide into units=5"),
        ("up", Column(blocks=5), "blocks=5 does not divide its 12 rows"),
        ("up", Qkv(3, 2), "kv_heads=2 does not divide heads=3|its 12 features do not divide into 7 heads"),
        ("up", Qkv(5, 5), "its 12 features do not divide into 15 heads"),
        ("up", KvHeads(5, 5), r"its 12 features do not divide into 5 heads \(kv_heads=5\)"),
        ("down", QueryHeads(5, 5, row=True), r"its 12 features do not divide into 5 heads \(heads=5\)"),
        ("head", Head(), "it has 12 rows and plan.vocab_size is 11; give Plan"),
        ("up", Shares(4, 4, {"heads": ("q", 1)}), "a Linear has no attribute heads"),
        ("up", Shares(4, 4, {"out_features": ("q", 1)}), "out_features is 12, wanted the whole number, 4 x 1"),
        ("up", Shares(4, 4, {"out_features": ("k", 3)}), "wanted 'q' or 'kv' first"),
        ("", Column(), "a Net is no nn.Linear"),
    ],
)
def test_a_style_on_a_wrong_module(row, style, words, tp):
    refused(rf"plan row '{row}': {type(style).__name__}\(\) on {row}: .*({words})", {row: style}, tp, vocab_size=11)


def test_more_ranks_than_there_is_to_split():
    refused(r"'tok': Vocab\(\) on tok: tp=13 is more than vocab_size=12", TABLE, 13)
    refused(r"'up': Column\(\) on up: tp=13 is more than out_features=12", {"up": Column(), "down": Row()}, 13)
    refused(r"'up': Column\(\) on up: tp=3 is more than units=2", TABLE | {"up": Column(units=2)}, 3)
    refused(r"'up': Qkv\(\) on up: tp=3 is more than heads=2", {"up": Qkv(2, 2)}, 3)


def test_one_module_for_two_rows():
    refused("plan rows 'up' and 'u.' both name up; keep one of them", TABLE | {"u*": Column()})
    refused("plan rows 'up' and 'u.' both name up; keep one of them", TABLE | {"u*": Row()})


@dataclass(frozen=True)
class Whole:
    """A style of a user's own: the module stays, or another takes its place."""

    made: nn.Module | None = None

    def apply(self, module, site):
        return self.made or module


def test_a_row_inside_what_another_row_replaces():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})})
    plan = Plan({"mlp": Whole(nn.Identity()), "mlp.up": Column(), "mlp.down": Row()}, vocab_size=12)
    with pytest.raises(
        ValueError, match=r"'mlp.up': Column\(\) on mlp.up: it lies inside mlp, which the row 'mlp' replaces"
    ):
        parallelize(model, rank(2), plan)
    assert isinstance(model["mlp"]["up"], nn.Linear)
    kept = Plan({"mlp": Whole(), "mlp.up": Column(), "mlp.down": Row()}, vocab_size=12)
    assert parallelize(model, rank(2), kept)["mlp"]["up"].local == 6


# --- partners


def nested(model):
    """up and down in modules of their own, as many models have them."""
    model.inside = nn.ModuleDict({"a": nn.ModuleDict({"up": model.up}), "b": nn.ModuleDict({"down": model.down})})
    del model.up, model.down
    model.__class__ = Nested


class Nested(type(net())):
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


# --- blocks of rows in one


class Gated(type(net())):
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


class PerHead(type(net())):
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


# --- MB-48: one module under several names


class Twice(type(net())):
    def forward(self, ids):
        x = self.tok(ids)
        x = x + self.down(self.act(self.up(x)))
        return self.head(x + self.down2(self.act(self.up2(x))))


def twice(model):
    model.__class__, model.up2, model.down2 = Twice, model.up, model.down


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"up2": Column()}, {"up2": Column(), "down2": Row()}])
def test_a_module_of_two_names_is_replaced_under_both(pool, tp, more):
    same_as_unsplit(pool, tp, twice, TABLE | more)
    model = parallelize(net(twice), rank(tp), Plan(TABLE | more, vocab_size=12))
    assert model.up is model.up2 and model.down is model.down2


def test_two_styles_for_one_module_are_refused_by_both_names():
    words = r"rows 'up' and 'up2' give Column\(\) and Row\(\) to one module, up and up2; give both the same style"
    refused(words, TABLE | {"up2": Row()}, change=twice)


def test_a_shared_module_needs_its_partner_wherever_it_is():
    def alone(model):
        twice(model)
        model.far = nn.ModuleDict({"up": model.up})
        del model.up2

    refused(r"'up': Column\(\) on up: its output", {"up": Column(), "tok": Vocab()}, change=alone)


# --- ties


def test_ties_that_a_plan_would_cut():
    def tied(model):
        model.head.weight = model.tok.weight

    refused(
        "head.weight is tied to tok.weight, but the plan splits them differently",
        TABLE | {"head": Column(gather_output=True, units=3)},
        2,
        tied,
    )
    refused("head.weight is tied to tok.weight", {"tok": Vocab()}, 2, tied)
    model = parallelize(net(tied), Mesh(), Plan({"tok": Vocab()}, vocab_size=12))
    assert model.head.weight is model.tok.weight
