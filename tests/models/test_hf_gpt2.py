"""Hugging Face's GPT-2, unchanged, through a table: same logits and gradients at tp 1, 2, 4 (and an uneven 3)."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from megacore.comm.mesh import Layout, Mesh
from megacore.models import hf_gpt2
from megacore.parallel.loss import vocab_parallel_cross_entropy
from megacore.parallel.plan import parallelize
from megacore.parallel.record import records
from megacore.parallel.stage import chain_of, cut


def hf(attention="sdpa", act="gelu_new", **change):
    torch.manual_seed(7)
    settings = dict(
        vocab_size=50, n_positions=16, n_embd=24, n_layer=3, n_head=6, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    model = GPT2LMHeadModel(
        GPT2Config(activation_function=act, attn_implementation=attention, **settings | change)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype))  # biases and norms leave their trivial values
    return model


IDS = torch.arange(24).view(2, 12) * 5 % 50
TARGETS = (IDS * 3 + 1) % 50


def run(tp, attention, act):
    mesh = Mesh.build(Layout(tp=tp))
    model = hf(attention, act)
    plan = hf_gpt2.plan(model)
    parallelize(model, mesh, plan)
    logits = model(IDS).logits
    vocab_parallel_cross_entropy(logits, TARGETS, vocab_size=50, group=mesh.tp, reduction="mean").backward()
    recs, grads = records(model, mesh), {}
    for name, p in model.named_parameters():
        grads[name] = torch.zeros(recs[name].shape, dtype=torch.float64)
        recs[name].add_into_full(p.grad, grads[name], recs[name].counted())
    mesh.destroy()
    return logits.detach(), grads


@pytest.mark.parametrize(
    "tp, attention, act", [(1, "sdpa", "gelu_new"), (2, "sdpa", "gelu_new"), (4, "sdpa", "gelu"), (3, "eager", "relu")]
)
def test_logits_and_gradients_are_those_of_the_unsplit_model(pool, tp, attention, act):
    model = hf(attention, act)
    logits = model(IDS).logits
    F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).backward()
    answers = pool.run(run, tp, attention, act, world=tp)
    torch.testing.assert_close(torch.cat([y for y, _ in answers], -1), logits, rtol=1e-12, atol=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sum(grads[name] for _, grads in answers), p.grad, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_chain_computes_what_the_model_computes(attention):
    from megacore.parallel.batch import MicroBatch

    want = hf(attention)(IDS).logits
    model = hf(attention)
    plan = hf_gpt2.plan(model)
    links = chain_of(model, plan)
    stage = cut(model, links, [range(len(links))], 0)
    torch.testing.assert_close(stage({}, MicroBatch.of(IDS, TARGETS))["logits"], want, rtol=1e-12, atol=1e-12)


def test_what_the_plan_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="attn_pdrop=0.1"):
        hf_gpt2.plan(hf(attn_pdrop=0.1))
