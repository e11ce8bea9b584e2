"""MB-08: attention split by heads, KV heads replicated where ranks outnumber them; against the plain module."""

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.models.attention import CausalSelfAttention
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.record import head_pieces, records
from megacore.parallel.replicas import SharedBoxes
from megacore.parallel.styles import Qkv, QueryHeads, Shares
from tests.parallel.gradients import fill, full_gradients, sgd


def attention(kv):
    return fill(CausalSelfAttention(32, 8, kv).double()).eval()


def attention_plan(kv):
    table = {
        "attn": Shares(8, kv, {"heads": ("q", 1), "kv_heads": ("kv", 1)}),
        "attn.qkv": Qkv(8, kv),
        "attn.out": QueryHeads(8, kv, row=True),
    }
    return Plan(table, vocab_size=1)


def run_attention(tp, kv, steps=5):
    mesh = Mesh.build(Layout(tp=tp))
    model = nn.ModuleDict({"attn": attention(kv)})
    parallelize(model, mesh, attention_plan(kv))
    x = torch.cos(torch.arange(192, dtype=torch.float64)).view(1, 6, 32).requires_grad_()
    trace = []
    for _ in range(steps):
        y = model["attn"](x)
        (0.1 * y.sin().mean()).backward()
        grads = full_gradients(model, mesh)
        trace.append((y.detach().clone(), x.grad.clone(), grads))
        recs, params = records(model, mesh), dict(model.named_parameters())
        local = {n: p.grad for n, p in params.items()}
        SharedBoxes(recs, list(params), mesh.tp, torch.device("cpu")).sum_(local)
        sgd(model, 0.1)
        x.grad = None
    weight = model["attn"].qkv.weight.detach()
    boxes = records(model, mesh)["attn.qkv.weight"].boxes
    held = [(b.full, weight[tuple(slice(*r) for r in b.local)].clone()) for b in boxes]
    mesh.destroy()
    return trace, held


@pytest.mark.parametrize("tp, kv", [(2, 2), (4, 2), (2, 1), (4, 1), (8, 4), (3, 8), (3, 2), (5, 8), (4, 8)])
def test_fewer_kv_heads_than_ranks(pool, tp, kv):
    plain = attention(kv)
    x = torch.cos(torch.arange(192, dtype=torch.float64)).view(1, 6, 32).requires_grad_()
    answers = pool.run(run_attention, tp, kv, world=tp)
    for step in range(5):
        y = plain(x)
        (0.1 * y.sin().mean()).backward()
        for trace, _ in answers:
            torch.testing.assert_close(trace[step][0], y, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(trace[step][1], x.grad, rtol=1e-11, atol=1e-12)
        for name, p in plain.named_parameters():
            total = sum(trace[step][2][f"attn.{name}"] for trace, _ in answers)
            torch.testing.assert_close(total, p.grad, rtol=1e-11, atol=1e-12, msg=name)
        sgd(plain, 0.1)
        x.grad = None
    replicas = {}
    for _, held in answers:
        for box, values in held:
            assert torch.equal(values, replicas.setdefault(box, values))  # copies of a KV head stay the same bits


@pytest.mark.parametrize(
    "heads, kv, tp, words", [(8, 3, 2, "kv_heads=3 does not divide heads=8"), (8, 8, 9, "tp=9 is more than heads=8")]
)
def test_impossible_heads_are_refused_at_construction(heads, kv, tp, words):
    with pytest.raises(ValueError, match=words):
        head_pieces(heads, kv, tp, 0)
    if heads % kv:
        with pytest.raises(ValueError, match=words):
            CausalSelfAttention(32, heads, kv)


@pytest.mark.parametrize("heads, kv", [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (12, 4)])
def test_every_query_head_is_held_once_beside_its_kv_head(heads, kv):
    for tp in range(1, heads + 1):
        try:
            shares = [head_pieces(heads, kv, tp, i) for i in range(tp)]
        except ValueError:
            continue
        assert [h for (a, b), _, _ in shares for h in range(a, b)] == list(range(heads))
        assert sorted(k for _, (a, b), first in shares if first for k in range(a, b)) == list(range(kv))
        for (a, b), (c, d), _ in shares:
            assert b > a and {h * kv // heads for h in range(a, b)} == set(range(c, d))
