"""Megatron-Core's GPTModel on gloo.

It has no CPU mode: torch.cuda.current_device is asked for a device, and the CUDA RNG tracker is forked around modules
that draw nothing at dropout 0. Both are replaced while it runs; the rest of the step is its own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.harness import Missing
from megacore.models.gpt import GPTConfig

LAYER = {  # megacore's name -> Megatron's
    "norm1": "input_layernorm",
    "attn.qkv": "self_attention.linear_qkv",
    "attn.out": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm",
    "mlp.fc1": "mlp.linear_fc1",
    "mlp.fc2": "mlp.linear_fc2",
}
OUTSIDE = {
    "embed.tok.weight": "embedding.word_embeddings.weight",
    "embed.pos.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    from megatron.core.tensor_parallel import random

    tracker = type(random.get_cuda_rng_tracker())
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(tracker, "fork", lambda self, name="": contextlib.nullcontext()),
    ):
        yield


def renamed(state: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """megacore's names and rows [q | k | v] -> Megatron's, whose fused rows are [q k v] of each head in turn."""
    found = {}
    for name, value in state.items():
        if name in OUTSIDE:
            found[OUTSIDE[name]] = value
            continue
        _, layer, rest = name.split(".", 2)
        module, kind = rest.rsplit(".", 1)
        if module == "attn.qkv":
            by_head = value.view(3, heads, -1, *value.shape[1:])
            value = by_head.transpose(0, 1).reshape(value.shape)
        found[f"decoder.layers.{layer}.{LAYER[module]}.{kind}"] = value
    return found


def _load(model: nn.Module, state: Mapping[str, Tensor], world: int, rank: int) -> None:
    """Each parameter takes its share of the full tensor, along the one dimension in which it is smaller."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            full = state[name]
            for dim, (have, want) in enumerate(zip(param.shape, full.shape, strict=True)):
                if have != want:
                    full = full.chunk(world, dim)[rank]
            param.copy_(full)


def _settings(kind: type, config: GPTConfig, world: int) -> object:
    """A TransformerConfig for this GPT; what Megatron only has as CUDA kernels is off."""
    return kind(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        ffn_hidden_size=config.ffn_size,
        layernorm_epsilon=config.eps,
        activation_func=lambda x: F.gelu(x, approximate="none" if config.activation == "erf" else "tanh"),
        tensor_model_parallel_size=world,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def build(config: GPTConfig, state: Mapping[str, Tensor], world: int, rank: int) -> tuple[Callable, nn.Module, Tensor]:
    """(step(ids, targets) -> loss after backward, the model, its position table). Megatron's global parallel state
    must be free; `destroy` frees it again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each optional CUDA package that is not there
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with _on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = _settings(TransformerConfig, config, world)
        model = GPTModel(settings, get_gpt_layer_local_spec(), config.vocab_size, config.seq_length)
    _load(model, renamed(state, config.heads), world, rank)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        s = ids.shape[1]
        positions = torch.arange(s).expand_as(ids)
        future = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
        with _on_cpu():
            loss = model(ids, positions, future, labels=targets).mean()
            loss.backward()
        return loss.detach()

    return step, model, model.embedding.position_embeddings.weight


def vocab_parallel_loss(world: int) -> Callable[[Tensor, Tensor], Tensor]:
    """(logits [R, V/world], target [R]) -> loss [R]; it writes over fp32 logits. `destroy` frees the parallel state."""
    if find_spec("megatron") is None:
        raise Missing("megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    return vocab_parallel_cross_entropy


def destroy() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
