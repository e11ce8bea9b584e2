"""A model that is split on the meta device and then given its weights is, bit for bit, the one that was split with
them: frozen parameters stay frozen, what was set on parameters and modules stays there."""

import pytest
import torch
from torch import nn

from megacore.parallel.materialize import materialize
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.random import parameter_generator
from megacore.parallel.styles import Column, Fused
from tests.parallel.plain_net import TABLE, net, rank

FULL = TABLE | {"up": Column(activation="none"), "act": Fused()}


def init(name, full, generator):
    full.normal_(generator=generator)


def partly_frozen(model):
    model.up.weight.requires_grad_(False), model.down.bias.requires_grad_(False), model.head.requires_grad_(False)
    model.up.weight.no_decay, model.act.mark = True, 1
    model.head.weight = model.tok.weight
    model.eval()


def with_weights():
    """The plain net, its weights drawn as `materialize` draws them."""
    model = net(partly_frozen).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            init(name, p, parameter_generator(5, name))
    return model


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_split_on_meta_is_the_split_of_the_weights(tp):
    for index in range(tp):
        mesh, plan = rank(tp, index), Plan(FULL, vocab_size=12)
        with torch.device("meta"):
            bare = net(partly_frozen)
        split = parallelize(bare.to("meta"), mesh, plan)
        assert all(p.is_meta for p in split.parameters())
        made, want = materialize(split, mesh, init, seed=5), parallelize(with_weights(), mesh, plan)
        assert dict(made.named_parameters()).keys() == dict(want.named_parameters()).keys()
        for name, p in want.named_parameters():
            got = made.get_parameter(name)
            assert torch.equal(got, p) and got.requires_grad == p.requires_grad and vars(got) == vars(p), name
        assert made.up.weight.no_decay and made.act.mark == 1 and made.head.weight is made.tok.weight
        assert not any(m.training for m in made.modules())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_bias_keeps_its_dtype(device):
    model = net().to(device)
    model.up.bias = nn.Parameter(model.up.bias.data.float())
    split = parallelize(model, rank(2), Plan(TABLE, vocab_size=12))
    assert split.up.bias.dtype == torch.float32 and split.up.weight.dtype == torch.float64


def test_a_row_has_the_dtype_of_autocast():
    """The bias is added after the sum over ranks; it must not widen the result again."""
    plain, split = net().float(), parallelize(net().float(), rank(1), Plan(TABLE, vocab_size=12))
    x = torch.linspace(-1, 1, 24).view(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = split.down(x), plain.down(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
