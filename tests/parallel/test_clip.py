"""megacore.clip_grad_norm_ on plain `.grad`s is torch's on the plain model, on every rank."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacore
from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.plan import parallelize
from megacore.parallel.record import records
from tests.models.test_hf_gpt2 import IDS, TARGETS
from tests.parallel.test_whole import Net, message, net_plan


def backward(model):
    F.cross_entropy(model(IDS).flatten(0, 1), TARGETS.flatten()).backward()


def clipped(tp, multiple, max_norm, norm_type):
    mesh = Mesh.build(Layout(tp=tp))
    model = parallelize(Net(), mesh, net_plan(True, multiple))
    backward(model)
    norm = megacore.clip_grad_norm_(model, mesh, max_norm, norm_type)
    again = megacore.clip_grad_norm_(model, mesh, math.inf, norm_type)  # must not sum the shared head a second time
    recs, grads = records(model, mesh), {}
    for name, p in model.named_parameters():
        grads[name] = torch.zeros(recs[name].shape, dtype=p.dtype)
        recs[name].add_into_full(p.grad, grads[name], recs[name].counted())
    held = model.k.weight.grad.clone()
    model.zero_grad()
    backward(model)
    fresh = megacore.clip_grad_norm_(model, mesh, math.inf, norm_type)
    mesh.destroy()
    return norm, again, fresh, held, grads


@pytest.mark.parametrize("tp, multiple, max_norm", [(1, 1, 0.1), (2, 1, 0.1), (2, 8, 0.1), (4, 16, 1e9)])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
def test_norm_and_gradients_are_torchs(pool, tp, multiple, max_norm, norm_type):
    model = Net()
    backward(model)
    want = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    after = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    answers = pool.run(clipped, tp, multiple, max_norm, norm_type, world=tp)
    for norm, again, fresh, held, _ in answers:
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        torch.testing.assert_close(again, after, rtol=1e-12, atol=0)
        torch.testing.assert_close(fresh, want, rtol=1e-12, atol=0)
        assert torch.equal(held, answers[0][3])  # the shared KV head is whole, with the same bits
    for name, p in model.named_parameters():
        torch.testing.assert_close(sum(a[-1][name] for a in answers), p.grad, rtol=1e-10, atol=1e-14, msg=name)


def poisoned(value, norm_type):
    mesh = Mesh.build(Layout(tp=2))
    model = parallelize(Net(), mesh, net_plan(True))
    backward(model)
    if mesh.rank == 1:
        model.q.weight.grad[0, 0] = value
    said = message(megacore.clip_grad_norm_, model, mesh, 1.0, norm_type, error_if_nonfinite=True)
    norm = megacore.clip_grad_norm_(model, mesh, math.inf, norm_type)
    mesh.destroy()
    return said, norm


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_what_is_not_finite_on_one_rank_is_so_on_all(pool, value, norm_type):
    for said, norm in pool.run(poisoned, value, norm_type, world=2):
        assert "not finite" in said or f"is {value}" in said
        assert not math.isfinite(norm)


def test_wrong_arguments_are_one_line():
    model = Net()
    for args, word in (((list(model.parameters()), Mesh(), 1.0), "model"), ((model, 1.0, 2.0), "mesh")):
        assert word in message(megacore.clip_grad_norm_, *args)
    assert "max_norm=-1" in message(megacore.clip_grad_norm_, model, Mesh(), -1.0)
