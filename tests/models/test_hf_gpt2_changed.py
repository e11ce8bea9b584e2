"""The plan is read from what a GPT-2 is, not from what its config says: each changed model gives the logits and
gradients of the same model unsplit, or is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from megacore.comm.mesh import Layout, Mesh
from megacore.models import hf_gpt2
from megacore.parallel.batch import MicroBatch
from megacore.parallel.loss import vocab_parallel_cross_entropy
from megacore.parallel.plan import parallelize
from megacore.parallel.record import records
from megacore.parallel.stage import chain_of, cut
from tests.models.test_hf_gpt2 import IDS, TARGETS, hf


def dropout_set_to_zero():
    model = hf(attn_pdrop=0.1)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    return model


def activation_exchanged():
    model = hf()
    model.transformer.h[1].mlp.act, model.transformer.h[2].mlp.act = nn.ReLU(), nn.GELU()
    return model


def inner_size():
    return hf(n_inner=22)


def scaled_by_layer():
    return hf(scale_attn_by_inverse_layer_idx=True)


def unscaled():
    return hf(scale_attn_weights=False)


def untied():
    return hf(tie_word_embeddings=False)


def resized():
    model = hf()
    model.resize_token_embeddings(57, mean_resizing=False)
    return model.double()


def pruned():
    """Three of six heads of one block are gone, as transformers 4 prunes them."""
    model = hf()
    attn = model.transformer.h[1].attn
    rows = torch.cat([torch.arange(12) + at for at in (0, 24, 48)])
    attn.c_attn.weight = nn.Parameter(attn.c_attn.weight.data[:, rows])
    attn.c_attn.bias = nn.Parameter(attn.c_attn.bias.data[rows])
    attn.c_proj.weight = nn.Parameter(attn.c_proj.weight.data[:12])
    attn.c_attn.nf, attn.num_heads, attn.split_size = 36, 3, 12
    return model


def frozen():
    model = hf()
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" in name or name.endswith("bias"))
    return model


SERVED = (
    dropout_set_to_zero, activation_exchanged, inner_size, scaled_by_layer, unscaled, untied, resized, pruned, frozen,
)  # fmt: skip


def split(tp, build):
    mesh = Mesh.build(Layout(tp=tp))
    model = build()
    plan = hf_gpt2.plan(model)
    parallelize(model, mesh, plan)
    logits = model(IDS).logits
    size = plan.vocab_size
    vocab_parallel_cross_entropy(logits, TARGETS, vocab_size=size, group=mesh.tp, reduction="mean").backward()
    recs, grads = records(model, mesh), {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads[name] = torch.zeros(recs[name].shape, dtype=torch.float64)
            recs[name].add_into_full(p.grad, grads[name], recs[name].counted())
    mesh.destroy()
    return logits.detach(), grads


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("build", SERVED, ids=lambda f: f.__name__)
def test_a_changed_model_is_split_as_it_is(pool, build, tp):
    model = build()
    logits = model(IDS).logits
    F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).backward()
    answers = pool.run(split, tp, build, world=tp)
    torch.testing.assert_close(torch.cat([y for y, _ in answers], -1), logits, rtol=1e-12, atol=1e-12)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in answers[0][1]), name
        if p.grad is not None:
            total = sum(grads[name] for _, grads in answers)
            torch.testing.assert_close(total, p.grad, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("build", SERVED, ids=lambda f: f.__name__)
def test_its_chain_computes_what_it_computes(build):
    want, model = build()(IDS).logits, build()
    links = chain_of(model, hf_gpt2.plan(model))
    stage = cut(model, links, [range(len(links))], 0)
    torch.testing.assert_close(stage({}, MicroBatch.of(IDS, TARGETS))["logits"], want, rtol=1e-12, atol=1e-12)


def upcast(tp):
    """Products and softmax in fp32, in one batch over heads; Hugging Face's own code refuses fp64 there."""
    mesh = Mesh.build(Layout(tp=tp))
    model = hf("eager", reorder_and_upcast_attn=True).float()
    parallelize(model, mesh, hf_gpt2.plan(model))
    logits = model(IDS).logits.detach()
    mesh.destroy()
    return logits


def test_reordered_attention(pool):
    want = hf("eager", reorder_and_upcast_attn=True).float()(IDS).logits
    got = torch.cat(pool.run(upcast, 2, world=2), -1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="Error with upcasting"):  # so that path is the one taken
        hf("eager", reorder_and_upcast_attn=True)(IDS)


class Lora(Conv1D):
    def forward(self, x):
        return super().forward(x) + 1.0


def at_block(act, **settings):
    def build():
        model = hf(**settings)
        act(model.transformer.h[1])
        return model

    return build


def lora(block):
    block.mlp.c_fc = Lora(96, 24).double()


REFUSED = {
    "dropout set after": (
        at_block(lambda b: setattr(b.attn.attn_dropout, "p", 0.1)),
        r"transformer.h.1.attn.attn_dropout has p=0.1 \(attn_pdrop=0.1\)",
    ),
    "dropout replaced": (
        at_block(lambda b: setattr(b.attn, "attn_dropout", nn.Identity())),
        "transformer.h.1.attn.attn_dropout has p=None",
    ),
    "cross-attention": (lambda: hf(add_cross_attention=True), "transformer.h.0.crossattention"),
    "cross-attention that the config denies": (
        at_block(lambda b: setattr(b, "crossattention", nn.Linear(1, 1))),
        "transformer.h.1.crossattention",
    ),
    "heads that are not there": (
        at_block(lambda b: setattr(b.attn, "num_heads", 3)),
        "transformer.h.1.attn has num_heads=3 and head_dim=4, but c_attn gives 72 features, wanted 36",
    ),
    "activation over features": (
        at_block(lambda b: setattr(b.mlp, "act", nn.Softmax(-1))),
        "transformer.h.1.mlp.act, a Softmax, is not a function of each feature alone",
    ),
    "activation with parameters": (
        at_block(lambda b: setattr(b.mlp, "act", nn.PReLU(96))),
        "transformer.h.1.mlp.act, a PReLU, is not a function",
    ),
    "another attention": (
        at_block(lambda b: setattr(b.attn.config, "_attn_implementation", "flex_attention")),
        "attn_implementation='flex_attention' is not served",
    ),
    "a layer that is more": (
        at_block(lora),
        r"'transformer.h.1.mlp.c_fc': Column\(\).*a Lora is more than a plain Conv1D",
    ),
    "split size changed": (
        at_block(lambda b: setattr(b.attn, "split_size", 12)),
        r"'transformer.h.1.attn': Shares\(\).*split_size is 12, wanted the whole number, 6 x 4",
    ),
    "another model": (lambda: nn.Linear(2, 2), "model is a Linear, wanted a GPT2LMHeadModel"),
    "no head": (lambda: hf().transformer, "model is a GPT2Model, wanted a GPT2LMHeadModel"),
}  # fmt: skip


@pytest.mark.parametrize("variant", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(variant):
    build, words = REFUSED[variant]
    model = build()
    with pytest.raises(ValueError, match=words) as caught:
        parallelize(model, Mesh(), hf_gpt2.plan(model))
    assert "\n" not in str(caught.value)
