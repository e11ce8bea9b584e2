"""Tables that mean nothing, or not what their author thinks: one line that names the row, and nothing is changed."""

import pytest
from torch import nn

from megacore.comm.mesh import Mesh
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.styles import Column, Head, KvHeads, Qkv, QueryHeads, Row, Shares, Vocab
from tests.parallel.plain_net import TABLE, Net, Whole, net, rank, refused, same_as_unsplit


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


@pytest.mark.parametrize(
    "row, words",
    [
        ("inside.a.ups", r"did you mean 'inside\.a\.up'\?"),
        ("zebra", r"see model.named_modules\(\)"),
        ("blocks.*.up ", r"did you mean 'blocks\.\*\.up'\?"),
    ],
)
def test_a_row_that_matches_nothing_offers_what_is_near(row, words):
    block = nn.ModuleDict({"up": nn.Linear(8, 12)})
    model = nn.ModuleDict({"inside": nn.ModuleDict({"a": block}), "blocks": nn.ModuleList([block])})
    with pytest.raises(ValueError, match=f"plan row .* matches no module of ModuleDict; {words}"):
        parallelize(model, Mesh(), Plan({row: Column()}, vocab_size=12))


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


# MB-48: one module under several names


class Twice(Net):
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
