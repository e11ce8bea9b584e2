"""What a module has that the plain one of its kind has not, and that the parallel form would lose.

A parallel layer computes what nn.Linear (nn.Embedding, Hugging Face's Conv1D) computes from `weight` and `bias`, and is
a new module with new parameters. A forward of one's own, a parametrised weight, an adapter, a hook would vanish without
a word, so each is refused here by name, with what to do. Attributes of the module and of its parameters that no forward
of the base class reads (`is_residual`, `no_decay`) go over to the replacement: `inherit`, `reborn`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
BARE = frozenset(vars(nn.Module()))
# what the plain modules and their parallel forms both have, with one meaning
LINEAR, TABLE = ("in_features", "out_features", "weight", "bias"), ("num_embeddings", "embedding_dim", "padding_idx")
OWN = frozenset((*LINEAR, *TABLE, "p", "inplace"))
INTERNAL = ("__dict__", "__weakref__", "__annotate__", "__annotate_func__")
HARMLESS = frozenset(("__init__", "__repr__", "extra_repr", "reset_parameters", *INTERNAL))
DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def check_linear(module: nn.Module, transposed: bool = False) -> None:
    """ValueError unless `module` computes x W^T + b as nn.Linear does, or, transposed, x W + b as Conv1D does."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())  # nobody has one who lacks the module
    if transposed and isinstance(module, nn.Linear):
        raise ValueError("transposed=True is for Conv1D, whose weight is [in, out], and this is an nn.Linear; drop it")
    if not transposed and conv1d and isinstance(module, conv1d):
        raise ValueError("a Conv1D has its weight as [in, out]; say transposed=True")
    _check(module, conv1d if transposed else nn.Linear, "Conv1D of transformers" if transposed else "nn.Linear")
    n = module.weight.shape[int(transposed)]
    if module.bias is not None and module.bias.shape != (n,):
        raise ValueError(f"its bias has shape {tuple(module.bias.shape)} beside {n} outputs, wanted ({n},)")


def check_embedding(module: nn.Module) -> None:
    """ValueError unless `module` looks up rows as nn.Embedding does."""
    _check(module, nn.Embedding, "nn.Embedding")
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise ValueError(
            "embedding with max_norm, sparse or scale_grad_by_freq cannot be split by vocabulary; unset them"
        )


def check_dropout(module: nn.Module) -> None:
    """ValueError unless `module` is torch's nn.Dropout, out of place."""
    _check(module, nn.Dropout, "nn.Dropout")
    if module.inplace:
        raise ValueError("inplace=True changes its input, which a keyed dropout leaves alone; set inplace=False")


def _check(module: nn.Module, base: type[nn.Module] | tuple, wanted: str) -> None:
    if not isinstance(module, base):
        raise ValueError(f"{_name(module)} is no {wanted}; {_wrapped(module)}")
    reason = next(more_than(module, base), None)
    if reason is not None:
        raise ValueError(f"{_name(module)} is more than a plain {wanted}: {reason}")


def _name(module: nn.Module) -> str:
    name = type(module).__name__
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def _wrapped(module: nn.Module) -> str:
    """What to do about a module of another kind: a wrapper has a remedy of its own."""
    name = type(module).__name__
    if name == "OptimizedModule":
        return "parallelize first, then torch.compile"
    if isinstance(module, torch.jit.ScriptModule):
        return "parallelize the model that was scripted, before it is"
    if name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        return "parallelize first, then wrap"
    inner = [child for child, m in module.named_children() if isinstance(m, (nn.Linear, nn.Embedding, nn.Dropout))]
    if inner:
        return f"it holds {', '.join(inner)}: name that in the row, if the rest may stay whole on every rank"
    return "give the row the style of this module, or leave it out of the table"


def more_than(module: nn.Module, base: type[nn.Module] | tuple) -> Iterator[str]:
    """What `module` has beyond `base`: "<what>; <remedy>", most telling first."""
    bare = base in (nn.Dropout, nn.Identity)
    plain = () if bare else ("weight",) if base is nn.Embedding else ("weight", "bias")
    params = {name: p for name, p in module._parameters.items() if p is not None}
    if any(isinstance(p, nn.parameter.UninitializedTensorMixin) for p in params.values()):
        yield "its weight has no shape yet; run the model once, or give the layer its sizes"
    yield from _reshaped(module)
    held = {"parameter": [name for name in params if name not in plain]}
    held |= {"buffer": [*module._buffers], "submodule": [*module._modules]}
    for kind, names in held.items():
        for name in names:
            yield f"it has the {kind} {name}, which a split would lose; fold it into the weight, or write a style"
    for dictionary, what in HOOKS.items():
        for hook in (getattr(module, dictionary, None) or {}).values():
            yield f"it has a {what} ({_called(hook)}); remove it, and register it on what parallelize puts there"
    yield from _overrides(module, base)
    if not bare and "weight" not in params:
        yield "its weight is no parameter; give it an nn.Parameter"
    for name in plain:
        if name in params:
            yield from _unlike(name, params[name])


def _reshaped(module: nn.Module) -> Iterator[str]:
    """Weights that something computes anew at each forward."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        for name, chain in module.parametrizations.items():
            how = ", ".join(type(p).__name__ for p in chain)
            yield (
                f"its {name} is parametrised ({how}); "
                f"torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) first"
            )
    for name in module._parameters:
        if name.endswith("_orig"):
            leaf = name.removesuffix("_orig")
            if f"{leaf}_mask" in module._buffers:
                yield f"its {leaf} is pruned; torch.nn.utils.prune.remove(module, {leaf!r}) first"
            else:
                yield f"its {leaf} is normalised by torch.nn.utils.spectral_norm; remove_spectral_norm(module) first"
        if name.endswith("_g") and f"{name[:-2]}_v" in module._parameters:
            yield f"its {name[:-2]} is normalised by torch.nn.utils.weight_norm; remove_weight_norm(module) first"


def _overrides(module: nn.Module, base: type[nn.Module]) -> Iterator[str]:
    remedy = "fold what it adds into a plain one, or write a style for it (docs/parallel.md)"
    for name, value in vars(module).items():
        if callable(getattr(type(module), name, None)):
            yield f"its {name} was replaced on the instance ({_called(value)}); {remedy}"
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield "it is compiled; parallelize first, then compile"
    if not base.forward.__module__.startswith(("torch.", "transformers.")):
        yield f"{base.__name__}.forward itself was replaced ({_called(base.forward)}); parallelize without that patch"
    for cls in type(module).__mro__:
        if cls in base.__mro__:
            continue
        for name, value in vars(cls).items():
            if not _acts(value) or name in HARMLESS:
                continue
            if hasattr(base, name):
                yield f"{cls.__name__} has a {name} of its own; {remedy}"
            elif not name.startswith("_"):
                yield f"{cls.__name__} adds {name}; {remedy}"


def _acts(value: object) -> bool:
    """Whether an attribute of a class is more than data: a method, a property or another descriptor."""
    return callable(value) or hasattr(type(value), "__get__")


def _unlike(name: str, param: Tensor) -> Iterator[str]:
    """What a parameter has that a piece cut from it would not have."""
    if type(param) is not nn.Parameter or type(param.data) is not Tensor:
        kind = type(param.data) if type(param) is nn.Parameter else type(param)
        yield f"its {name} is a {kind.__name__}, no plain tensor; parallelize first, then convert"
    elif param.layout != torch.strided or param.dtype not in DTYPES:
        yield f"its {name} is {param.layout} of {param.dtype}, wanted strided fp64, fp32, bf16 or fp16; convert it"
    elif param.dim() != (2 if name == "weight" else 1):
        yield f"its {name} has {param.dim()} dimensions, wanted {2 if name == 'weight' else 1}"
    elif param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        yield f"its {name} has a gradient hook; register it on the new parameter, after parallelize"
    elif param.grad is not None:
        yield f"its {name} has a gradient, which the cut would drop; model.zero_grad() first"


def _called(hook: object) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__


def reborn(old: Tensor, local: Tensor) -> nn.Parameter:
    """The parameter that takes the place of `old`: with its requires_grad and what was set on it (`no_decay`, ...)."""
    made = nn.Parameter(local, requires_grad=old.requires_grad)
    vars(made).update(vars(old))
    return made


def check_heir(new: nn.Module, old: nn.Module) -> None:
    """ValueError where something was set on `old` under a name for which `new` has another use."""
    for name in set_on(old):
        if name not in OWN and hasattr(new, name):
            raise ValueError(f"its attribute {name} is a name that {type(new).__name__} uses itself; rename it")


def inherit(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the mode of `old`, and what was set on it or on its class that `new` does not have: other code may
    read that (`nf` of a Conv1D, a mark for the initialiser)."""
    new.train(old.training)
    for name, value in set_on(old).items():
        if not hasattr(new, name):
            setattr(new, name, value)


def set_on(module: nn.Module) -> dict[str, object]:
    """Attributes of the instance, and data of classes that are not torch's, that a bare nn.Module does not have."""
    found: dict[str, object] = {}
    for cls in reversed(type(module).__mro__):
        if cls.__module__.partition(".")[0] not in ("torch", "transformers", "builtins"):
            found |= {k: v for k, v in vars(cls).items() if not k.startswith("__") and not _acts(v)}
    return {name: value for name, value in (found | vars(module)).items() if name not in BARE}
