"""The plan of Hugging Face's GPT2LMHeadModel, which stays as it is: its Conv1D layers store weights [in, out].

model = GPT2LMHeadModel(config)
parallelize(model, mesh, hf_gpt2.plan(model))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megacore.parallel.batch import MicroBatch
from megacore.parallel.plan import Link, Plan, Style, Tensors
from megacore.parallel.styles import Column, Fused, Head, KeyedDropout, Qkv, QueryHeads, Row, Shares, Vocab

GELU = {
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu": "none",
}  # their names -> torch's forms


def plan(model: nn.Module, gather: bool = False) -> Plan:
    """Plan of a GPT2LMHeadModel, sizes from its config; gather: its row is Head(gather=True). Raises ValueError for
    what cannot be served: cross-attention, and attn_pdrop > 0, which the model draws inside its attention from a
    generator that depends on the layout."""
    config = model.config
    if config.attn_pdrop > 0:
        raise ValueError(
            f"attn_pdrop={config.attn_pdrop} is drawn where no mask of ours can reach; set config.attn_pdrop=0"
        )
    if config.add_cross_attention:
        raise ValueError("add_cross_attention=True is not served by this plan; set config.add_cross_attention=False")
    heads = config.num_attention_heads
    width = config.hidden_size // heads
    fused = GELU.get(config.activation_function)
    mlp: dict[str, Style] = {"transformer.h.*.mlp.c_fc": Column(activation=fused, transposed=True)}
    if fused:
        mlp["transformer.h.*.mlp.act"] = Fused()
    table = {
        "transformer.wte": Vocab(),
        "transformer.drop": KeyedDropout(),
        "transformer.h.*.attn": Shares(heads, heads, {"num_heads": ("q", 1), "split_size": ("q", width)}),
        "transformer.h.*.attn.c_attn": Qkv(heads, heads, transposed=True),
        "transformer.h.*.attn.c_proj": QueryHeads(heads, heads, row=True, transposed=True),
        "transformer.h.*.attn.resid_dropout": KeyedDropout(),
        **mlp,
        "transformer.h.*.mlp.c_proj": Row(transposed=True),
        "transformer.h.*.mlp.dropout": KeyedDropout(),
        "lm_head": Head(gather),
    }
    return Plan(table, config.vocab_size, links, gives_up_logits=True)


def links(model: nn.Module) -> list[Link]:
    """Embeddings | block 0 | ... | final norm and head."""
    h = model.config.hidden_size
    inner = model.config.n_inner or 4 * h

    def block_link(i: int) -> Link:
        return Link(
            (f"transformer.h.{i}",), lambda m, t, _: {"x": _block(m, i, t["x"])}, float(4 * h * h + 2 * h * inner)
        )

    def embed(m: nn.Module, _: Tensors, batch: MicroBatch) -> Tensors:
        return {"x": m.transformer.drop(m.transformer.wte(batch.ids) + m.transformer.wpe(batch.positions))}

    def head(m: nn.Module, t: Tensors, _: MicroBatch) -> Tensors:
        return {"logits": m.lm_head(m.transformer.ln_f(t["x"]))}

    return [
        Link(("transformer.wte", "transformer.wpe", "transformer.drop"), embed, float(h)),
        *(block_link(i) for i in range(model.config.num_hidden_layers)),
        Link(("transformer.ln_f", "lm_head"), head, float(h * model.config.vocab_size)),
    ]


def _block(model: nn.Module, i: int, x: Tensor) -> Tensor:
    mask = None  # sdpa is causal where no mask is given; the eager path attends everywhere
    if model.config._attn_implementation == "eager":
        s = x.shape[1]
        mask = torch.full((s, s), float("-inf"), dtype=x.dtype, device=x.device).triu(1)[None, None]
    out = model.transformer.h[i](x, attention_mask=mask)
    return out[0] if isinstance(out, tuple) else out  # a tuple before transformers 5
