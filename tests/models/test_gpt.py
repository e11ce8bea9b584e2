"""The plain GPT against transformers' GPT-2, which is not our code: same weights, same logits and gradients."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from megacore.comm.mesh import Mesh
from megacore.models import gpt
from megacore.models.attention import CausalSelfAttention
from megacore.parallel.materialize import materialize
from tests.toy import TOY, batch, formula


def plain(config=TOY, dtype=torch.float64):
    with torch.device("meta"):
        model = gpt.GPT(config)
    return materialize(model, Mesh(), formula(config), seed=0, dtype=dtype)


def hf(config):
    settings = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.seq_length, n_embd=config.hidden, n_layer=config.layers,
        n_head=config.heads, n_inner=config.ffn, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(settings).double()


NAMES = {
    "transformer.wte.": "embed.tok.", "transformer.wpe.": "embed.pos.", "transformer.h.": "blocks.",
    ".ln_1.": ".norm1.", ".ln_2.": ".norm2.", ".attn.c_attn.": ".attn.qkv.", ".attn.c_proj.": ".attn.out.",
    ".mlp.c_fc.": ".mlp.fc1.", ".mlp.c_proj.": ".mlp.fc2.", "transformer.ln_f.": "norm.", "lm_head.": "head.",
}  # fmt: skip


def ours(name):
    for theirs, own in NAMES.items():
        name = name.replace(theirs, own)
    return name


def turned(name, tensor):
    return tensor.t() if tensor.dim() == 2 and ("c_attn" in name or "c_proj" in name or "c_fc" in name) else tensor


def test_logits_and_gradients_are_those_of_transformers():
    model, reference = plain(), hf(TOY)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in reference.named_parameters():
            p.copy_(turned(name, own[ours(name)]))
    whole = batch(3)
    logits = model(whole.ids)
    torch.testing.assert_close(logits, reference(whole.ids).logits, rtol=1e-12, atol=1e-12)
    for out in (logits, reference(whole.ids).logits):
        F.cross_entropy(out.flatten(0, 1), whole.targets.flatten()).backward()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(turned(name, own[ours(name)].grad), p.grad, rtol=1e-10, atol=1e-13, msg=name)


def test_dropped_attention_at_rate_zero_is_the_fused_one():
    """The written-out path of training with dropout, on the same inputs as torch's scaled_dot_product_attention."""
    torch.manual_seed(0)
    attn = CausalSelfAttention(16, 4, 2).double()
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    fused = attn(x)
    attn.drop.p = 0.5
    attn.drop.forward = lambda probabilities: probabilities
    torch.testing.assert_close(attn(x), fused, rtol=1e-12, atol=1e-13)


def test_flops_per_token_is_six_times_the_matrix_weights_and_attention():
    model = plain()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    head = TOY.vocab_size * TOY.hidden
    assert gpt.flops_per_token(TOY) == 6 * (matrices + head) + 12 * TOY.layers * TOY.hidden * TOY.seq_length


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(hidden=18), "hidden=18 does not divide by heads=4"),
        (dict(kv_heads=3), "kv_heads=3 does not divide heads=4"),
        (dict(activation="relu"), "activation='relu'"),
        (dict(dropout=1.0), "dropout=1.0 is outside"),
        (dict(layers=0), "layers=0 is not a positive"),
    ],
)
def test_sizes_that_cannot_work_are_refused(change, words):
    sizes = dict(layers=4, hidden=16, heads=4, vocab_size=48, seq_length=8) | change
    with pytest.raises(ValueError, match=words):
        gpt.GPTConfig(**sizes)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="sequence of 9 tokens is longer than seq_length=8"):
        plain()(torch.zeros(1, 9, dtype=torch.long))
