"""The plan of Hugging Face's GPT2LMHeadModel, which stays as it is: its Conv1D layers store weights [in, out].

model = GPT2LMHeadModel(config)
parallelize(model, mesh, hf_gpt2.plan(model))

The plan is read from the modules, not from the config: dropouts may have been set, heads pruned, activations exchanged
and embeddings resized since the config was read, and the modules are what runs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megacore.parallel.batch import MicroBatch
from megacore.parallel.gelu import gelu_form, is_elementwise
from megacore.parallel.plan import Link, Plan, Style, Tensors
from megacore.parallel.styles import Column, Fused, Head, KeyedDropout, Qkv, QueryHeads, Row, Shares, Vocab

CAUSAL = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")  # causal where _block says so


def plan(model: nn.Module) -> Plan:
    """Plan of a GPT2LMHeadModel, one row a module, sizes from the modules. Raises ValueError for what cannot be served:
    cross-attention, dropout of attention probabilities, which the model draws from a generator that depends on the
    layout, and attention that is not causal without a mask."""
    if not isinstance(getattr(getattr(model, "transformer", None), "h", None), nn.ModuleList) or not hasattr(
        model, "lm_head"
    ):
        raise ValueError(f"model is a {type(model).__name__}, wanted a GPT2LMHeadModel; write a Plan for it")
    kind = model.config._attn_implementation
    if kind not in CAUSAL:
        raise ValueError(f"attn_implementation={kind!r} is not served by this plan; choose one of {', '.join(CAUSAL)}")
    table: dict[str, Style] = {"transformer.wte": Vocab(), "transformer.drop": KeyedDropout()}
    for i, block in enumerate(model.transformer.h):
        table |= _rows(f"transformer.h.{i}", block)
    vocab, hidden = model.lm_head.weight.shape
    # read now, from the whole model: every rank must cut the pipeline at the same places
    blocks = [sum(p.numel() for p in block.parameters() if p.dim() > 1) for block in model.transformer.h]
    chain = partial(links, costs=[hidden, *blocks, hidden * vocab])
    return Plan(table | {"lm_head": Head()}, vocab, chain, gives_up_logits=True)


def _rows(name: str, block: nn.Module) -> dict[str, Style]:
    """The rows of one block."""
    if hasattr(block, "crossattention"):
        raise ValueError(
            f"{name}.crossattention (add_cross_attention=True) is not served by this plan; "
            "build the model with add_cross_attention=False"
        )
    attn = block.attn
    p = getattr(attn.attn_dropout, "p", None)  # what the attention reads, whatever attn_dropout is
    if p != 0:
        raise ValueError(
            f"{name}.attn.attn_dropout has p={p} (attn_pdrop={p}), drawn where no mask of ours can reach; "
            "set attn_dropout.p = 0 in every block, or attn_pdrop=0 before the model is built"
        )
    heads, width = attn.num_heads, attn.head_dim
    rows = attn.c_attn.weight.shape[-1]
    if rows != 3 * heads * width:
        raise ValueError(
            f"{name}.attn has num_heads={heads} and head_dim={width}, but c_attn gives {rows} features, wanted "
            f"{3 * heads * width}; set num_heads to the heads that are there"
        )
    form = gelu_form(block.mlp.act)
    if form is None and not is_elementwise(block.mlp.act):
        raise ValueError(
            f"{name}.mlp.act, a {type(block.mlp.act).__name__}, is not a function of each feature alone, so features "
            "cannot be split over ranks; use another activation, or a Plan of your own that leaves the MLP whole"
        )
    rows_of = {
        "attn": Shares(heads, heads, {"num_heads": ("q", 1), "split_size": ("q", width)}),
        "attn.c_attn": Qkv(heads, heads, transposed=True),
        "attn.c_proj": QueryHeads(heads, heads, row=True, transposed=True),
        "attn.resid_dropout": KeyedDropout(),
        "mlp.c_fc": Column(activation=form, transposed=True),
        **({"mlp.act": Fused()} if form else {}),
        "mlp.c_proj": Row(transposed=True),
        "mlp.dropout": KeyedDropout(),
    }
    return {f"{name}.{row}": style for row, style in rows_of.items()}


def links(model: nn.Module, costs: list[int]) -> list[Link]:
    """Embeddings | block 0 | ... | final norm and head; `costs` in multiply-adds a token, one a link."""
    first, *blocks, last = map(float, costs)

    def block_link(i: int, cost: float) -> Link:
        return Link((f"transformer.h.{i}",), lambda m, t, _: {"x": _block(m, i, t["x"])}, cost)

    def embed(m: nn.Module, _: Tensors, batch: MicroBatch) -> Tensors:
        return {"x": m.transformer.drop(m.transformer.wte(batch.ids) + m.transformer.wpe(batch.positions))}

    def head(m: nn.Module, t: Tensors, _: MicroBatch) -> Tensors:
        return {"logits": m.lm_head(m.transformer.ln_f(t["x"]))}

    return [
        Link(("transformer.wte", "transformer.wpe", "transformer.drop"), embed, first),
        *(block_link(i, cost) for i, cost in enumerate(blocks)),
        Link(("transformer.ln_f", "lm_head"), head, last),
    ]


def _block(model: nn.Module, i: int, x: Tensor) -> Tensor:
    mask = None  # sdpa is causal where no mask is given; the eager path attends everywhere
    if model.config._attn_implementation == "eager":
        s = x.shape[1]
        mask = torch.full((s, s), float("-inf"), dtype=x.dtype, device=x.device).triu(1)[None, None]
    out = model.transformer.h[i](x, attention_mask=mask)
    return out[0] if isinstance(out, tuple) else out  # a tuple before transformers 5
