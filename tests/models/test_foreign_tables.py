"""Models of transformers that have no plan of ours, through tables as a user would write them: the logits and gradients
of the unsplit model. GPT-NeoX has its heads one after another, Phi-3 gate and up in one, Llama separate projections."""

import pytest
import torch
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.loss import vocab_parallel_cross_entropy
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.styles import Column, Fused, Head, KvHeads, Qkv, QueryHeads, Row, Vocab
from tests.parallel.gradients import full_gradients
from tests.parallel.plain_net import rank

IDS = torch.arange(24).view(2, 12) * 5 % 50
TARGETS = (IDS * 3 + 1) % 50
SIZES = dict(
    vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=16,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def neox():
    config = GPTNeoXConfig(intermediate_size=40, attention_dropout=0.0, hidden_dropout=0.0, hidden_act="gelu", **SIZES)
    return GPTNeoXForCausalLM(config)


def llama():
    return LlamaForCausalLM(LlamaConfig(intermediate_size=40, num_key_value_heads=3, **SIZES))


def phi3():
    return Phi3ForCausalLM(Phi3Config(intermediate_size=40, num_key_value_heads=3, **SIZES))


NEOX_AT, AT = "gpt_neox.layers.*", "model.layers.*"
NEOX = {
    "gpt_neox.embed_in": Vocab(),
    f"{NEOX_AT}.attention.query_key_value": Qkv(6, 6, interleaved=True),
    f"{NEOX_AT}.attention.dense": QueryHeads(6, 6, row=True),
    f"{NEOX_AT}.mlp.dense_h_to_4h": Column(activation="none"),
    f"{NEOX_AT}.mlp.act": Fused(),
    f"{NEOX_AT}.mlp.dense_4h_to_h": Row(),
    "lm_head": Head(),
}
LLAMA = {
    "model.embed_tokens": Vocab(),
    f"{AT}.self_attn.q_proj": QueryHeads(6, 3),
    f"{AT}.self_attn.k_proj": KvHeads(6, 3),
    f"{AT}.self_attn.v_proj": KvHeads(6, 3),
    f"{AT}.self_attn.o_proj": QueryHeads(6, 3, row=True),
    f"{AT}.mlp.gate_proj": Column(),
    f"{AT}.mlp.up_proj": Column(),
    f"{AT}.mlp.down_proj": Row(),
    "lm_head": Head(),
}
PHI3 = {
    "model.embed_tokens": Vocab(),
    f"{AT}.mlp.gate_up_proj": Column(blocks=2),
    f"{AT}.mlp.down_proj": Row(),
    "lm_head": Head(),
}
MODELS = {"neox": (neox, NEOX), "llama": (llama, LLAMA), "phi3": (phi3, PHI3)}


def built(make):
    torch.manual_seed(3)
    model = make().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype))
    return model


def split(tp, name):
    make, table = MODELS[name]
    mesh = Mesh.build(Layout(tp=tp))
    model = parallelize(built(make), mesh, Plan(table, vocab_size=50))
    logits = model(IDS, use_cache=False).logits
    vocab_parallel_cross_entropy(logits, TARGETS, vocab_size=50, group=mesh.tp, reduction="mean").backward()
    grads = full_gradients(model, mesh)
    mesh.destroy()
    return logits.detach(), grads


@pytest.mark.parametrize("name, tp", [("neox", 1), ("neox", 2), ("neox", 3), ("llama", 3), ("phi3", 2), ("phi3", 3)])
def test_a_table_splits_it(pool, name, tp):
    model = built(MODELS[name][0])
    logits = model(IDS, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).backward()
    answers = pool.run(split, tp, name, world=tp)
    # rotary tables are fp32 in these models, on both sides
    torch.testing.assert_close(torch.cat([y for y, _ in answers], -1), logits, rtol=1e-11, atol=1e-11)
    for key, p in model.named_parameters():
        total = sum(grads[key] for _, grads in answers)
        torch.testing.assert_close(total, p.grad, rtol=1e-10, atol=1e-13, msg=key)


def test_the_plain_rows_would_have_been_wrong():
    for name, row, style in (
        ("phi3", "model.layers.*.mlp.gate_up_proj", Column()),
        ("neox", "gpt_neox.layers.*.attention.query_key_value", Qkv(6, 6)),
    ):
        make, table = MODELS[name]
        with pytest.raises(ValueError, match="say (Column.blocks=2|interleaved=True)"):
            parallelize(built(make), rank(2), Plan(table | {row: style}, vocab_size=50))
