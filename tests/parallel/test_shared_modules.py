"""MB-48 across stages: one module under two names, one that several links list. Right, or refused with a remedy that
works."""

import pytest
import torch
from torch import nn

from megacore.parallel.plan import Link, Plan
from megacore.parallel.stage import cut
from megacore.verify import verify
from tests.toy import TOY

VOCAB = TOY.vocab_size


class TwoNames(nn.Module):
    """One nn.Linear as `a` and as `b`, another under `mid` between."""

    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)
        self.a = self.b = nn.Linear(12, 12)
        self.mid = nn.Linear(12, 12)

    def forward(self, ids):
        return self.head(self.b(torch.tanh(self.mid(self.a(self.tok(ids))))))


def two_names(order):
    pieces = {
        "tok": Link(("tok",), lambda m, _, b: {"x": m.tok(b.ids)}),
        "tok+a": Link(("tok", "a"), lambda m, _, b: {"x": m.a(m.tok(b.ids))}),
        "a": Link(("a",), lambda m, t, _: {"x": m.a(t["x"])}),
        "mid": Link(("mid",), lambda m, t, _: {"x": torch.tanh(m.mid(t["x"]))}),
        "b": Link(("b",), lambda m, t, _: {"x": m.b(t["x"])}),
        "b+head": Link(("b", "head"), lambda m, t, _: {"logits": m.head(m.b(t["x"]))}),
        "a mid b": Link(("a", "b", "mid"), lambda m, t, _: {"x": m.b(torch.tanh(m.mid(m.a(t["x"]))))}),
        "head": Link(("head",), lambda m, t, _: {"logits": m.head(t["x"])}),
    }
    return Plan({}, VOCAB, lambda _: [pieces[name] for name in order])


class Planned:
    def __init__(self, *order):
        self.order = order

    def __call__(self, _):
        return two_names(self.order)


def whys(report):
    return [row.where for row in report.rows]


def test_one_module_under_two_names_on_the_first_and_the_last_stage(pool):
    report = verify(TwoNames, Planned("tok+a", "mid", "b+head"), "pp2,pp3,pp3-dp2", pool=pool)
    assert report.count("passed") == 3, whys(report)


def test_elsewhere_it_is_refused_and_the_remedy_works(pool):
    report = verify(TwoNames, Planned("tok", "a", "mid", "b", "head"), "pp5", pool=pool)
    (why,) = whys(report)
    assert report.count("refused") == 1 and "a.weight has copies on stages [1, 3]" in why, why
    assert "list its module in the links of one stage" in why and "\n" not in why
    mended = verify(TwoNames, Planned("tok", "a mid b", "head"), "pp2,pp3", pool=pool)
    assert mended.count("passed") == 2, whys(mended)


class Listed(nn.Module):
    """A norm with weights that the first and the last link list."""

    def __init__(self):
        super().__init__()
        self.tok, self.norm = nn.Embedding(VOCAB, 12), nn.LayerNorm(12)
        self.mid, self.head = nn.Linear(12, 12), nn.Linear(12, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.mid(self.norm(self.tok(ids)))))


def listed(_):
    return Plan(
        {},
        VOCAB,
        lambda _: [
            Link(("tok", "norm"), lambda m, _, b: {"x": m.norm(m.tok(b.ids))}),
            Link(("mid",), lambda m, t, _: {"x": m.mid(t["x"])}),
            Link(("norm", "head"), lambda m, t, _: {"logits": m.head(m.norm(t["x"]))}),
        ],
    )


def test_a_module_with_weights_that_two_links_list_is_trained_as_one(pool):
    report = verify(Listed, listed, "pp2,pp3,pp2-dp2", pool=pool)
    assert report.count("passed") == 3, whys(report)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_has_what_it_lists_and_nothing_else(index):
    model = TwoNames()
    stage = cut(model, two_names(("tok+a", "mid", "b+head")).chain(model), [range(i, i + 1) for i in range(3)], index)
    held = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    want = [{"tok", "a"}, {"mid"}, {"b", "head"}][index]
    assert {name.split(".")[0] for name in held} == want
