"""MB-49 for the other styles: embeddings that scale, memory that is shared, dropouts of other kinds, activations
that are not the GeLU which a Column computes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacore.comm.mesh import Mesh
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.styles import Column, Fused, HeadDropout, KeyedDropout
from tests.parallel.plain_net import TABLE, net, rank, same_as_unsplit


def viewed(model):
    model.head.weight = nn.Parameter(model.tok.weight.data)


def sliced(model):
    model.other = nn.Linear(8, 4).double()
    model.other.weight = nn.Parameter(model.up.weight.data[:4])


class Embed(nn.Embedding):
    """Gemma's: the rows are scaled."""

    def forward(self, ids):
        return super().forward(ids) * math.sqrt(self.embedding_dim)


def at_tok(make):
    return lambda model: setattr(model, "tok", make().double())


@pytest.mark.parametrize(
    "change, words",
    [
        (at_tok(lambda: Embed(12, 8)), "Embed has a forward of its own"),
        (at_tok(lambda: nn.Embedding(12, 8, max_norm=1.0)), "max_norm"),
        (at_tok(lambda: nn.Linear(12, 8)), "a Linear is no nn.Embedding"),
        (at_tok(lambda: nn.EmbeddingBag(12, 8)), "an EmbeddingBag is no nn.Embedding"),
        (lambda m: m.tok.register_forward_hook(lambda m, a, y: 2 * y), "a forward hook"),
        (viewed, "tok.weight shares its memory with head.weight|head.weight shares its memory with tok.weight"),
        (sliced, "shares its memory with"),
    ],
)
def test_embeddings_and_shared_memory(change, words):
    model = net()
    change(model)
    with pytest.raises(ValueError, match=words) as caught:
        parallelize(model, Mesh(), Plan(TABLE, vocab_size=12))
    assert "\n" not in str(caught.value)


class Odd(nn.Dropout):
    def forward(self, x):
        return F.dropout(x, self.p, True)


@pytest.mark.parametrize(
    "made", [nn.AlphaDropout(0.1), nn.Dropout2d(0.1), Odd(0.1), nn.Dropout(0.1, inplace=True), nn.Identity()]
)
def test_dropouts_that_are_no_plain_dropout(made):
    model = net(lambda m: setattr(m, "drop", made))
    with pytest.raises(
        ValueError, match=r"plan row 'drop': KeyedDropout\(\) on drop: .*(no nn.Dropout|inplace=True|of its own)"
    ):
        parallelize(model, Mesh(), Plan({"drop": KeyedDropout()}, vocab_size=12))
    with pytest.raises(ValueError, match="is no megacore Dropout"):
        parallelize(model, Mesh(), Plan({"drop": HeadDropout(2, 2)}, vocab_size=12))


FUSED = TABLE | {"up": Column(activation="none"), "act": Fused()}


class Gelu(nn.Module):
    """The tanh form, written out, as Hugging Face has it."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("form, make", [("none", nn.GELU), ("tanh", Gelu)])
def test_a_gelu_is_known_by_its_values(pool, tp, form, make):
    same_as_unsplit(pool, tp, GELUS[form], TABLE | {"up": Column(activation=form), "act": Fused()})


def erf(model):
    model.act = nn.GELU()


def tanh(model):
    model.act = Gelu()


GELUS = {"none": erf, "tanh": tanh}


@pytest.mark.parametrize(
    "act, table, words",
    [
        (nn.ReLU(), FUSED, r"'act': Fused\(\) on act: ReLU is not GeLU alone"),
        (nn.Sequential(nn.GELU(), nn.Dropout(0.1)), FUSED, "Sequential is not GeLU alone"),
        (nn.SiLU(), FUSED, "SiLU is not GeLU alone"),
        (nn.GELU("tanh"), FUSED, "activation='none' is not the GeLU that the model has after it, 'tanh'"),
        (nn.GELU(), TABLE | {"act": Fused()}, r"no Column\(activation='none'\) computes this GeLU"),
        (nn.GELU(), TABLE | {"up": Column(activation="none")}, r"no Fused\(\) row takes that one's place"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_an_activation_vanishes_only_where_a_column_computes_it(act, table, words, tp):
    with pytest.raises(ValueError, match=words) as caught:
        parallelize(net(lambda m: setattr(m, "act", act)), rank(tp), Plan(table, vocab_size=12))
    assert "\n" not in str(caught.value)
