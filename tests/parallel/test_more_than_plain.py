"""MB-49: a module that looks like the one a style expects, and is more. The same output and gradients as the unsplit
model, or a ValueError that names the row, the module and what it has; never a silent change."""

from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from megacore.comm.mesh import Mesh
from megacore.parallel.layers import ColumnParallelLinear
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.styles import Column, KvHeads, Qkv, QueryHeads, Row, Vocab
from tests.parallel.plain_net import IDS, TABLE, net, rank, same_as_unsplit


class Lora(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.ones(2, sizes[0])), nn.Parameter(torch.ones(sizes[1], 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.t() @ self.b.t()


class Scaled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) + 1.0


class Clipped(nn.Linear):
    @property
    def weight(self):
        return self._parameters["weight"].clamp(-0.1, 0.1)


class Merging(nn.Linear):
    def merge(self):
        return self.weight * 2


class Cached(nn.Linear):
    @cached_property
    def norm(self):
        return self.weight.norm()


class Doubling:
    def forward(self, x):
        return 2 * super().forward(x)


class Mixed(Doubling, nn.Linear):
    pass


class Noisy(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("noise", torch.ones(sizes[1]))


class Adapted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adapter = nn.Linear(sizes[1], sizes[1])


class Wrapper(nn.Module):
    """As peft wraps: the layer inside, and more around it."""

    def __init__(self, inner):
        super().__init__()
        self.base_layer, self.lora = inner, nn.Linear(8, 12)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora(x)


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


class Tagged(torch.Tensor):
    """A tensor subclass, as DTensor and torchao's are."""


def put(make):
    """A change that puts another module at `up`."""

    def change(model):
        model.up = make(model.up)

    return change


def on(act):
    """A change that acts on the module at `up`."""

    def change(model):
        act(model.up)

    return change


def typed(cls):
    return put(lambda old: cls(8, 12).double())


def patched(module):
    plain = module.forward
    module.forward = lambda x: plain(x) + 1.0


def scaled_hook(module, args, *rest):
    return None


REFUSED = {
    "subclass with LoRA": (typed(Lora), "the parameter a"),
    "subclass that scales": (typed(Scaled), "Scaled has a forward of its own"),
    "subclass with its own call": (typed(Called), "Called has a __call__ of its own"),
    "weight is a property": (on(lambda m: setattr(m, "__class__", Clipped)), "adds weight"),
    "forward of a mixin": (typed(Mixed), "Doubling has a forward of its own"),
    "cached property": (typed(Cached), "adds norm"),
    "method of its own": (typed(Merging), "adds merge"),
    "extra buffer": (typed(Noisy), "the buffer noise"),
    "extra submodule": (typed(Adapted), "the submodule adapter"),
    "forward patched": (on(patched), "its forward was replaced on the instance"),
    "parametrised": (
        on(lambda m: parametrize.register_parametrization(m, "weight", Doubled())),
        r"weight is parametrised \(Doubled\).*remove_parametrizations",
    ),
    "bias parametrised": (
        on(lambda m: parametrize.register_parametrization(m, "bias", Doubled())),
        r"bias is parametrised \(Doubled\)",
    ),
    "weight_norm": (on(lambda m: parametrizations.weight_norm(m)), r"parametrised \(_WeightNorm\)"),
    "spectral_norm": (on(lambda m: parametrizations.spectral_norm(m)), r"parametrised \(_SpectralNorm\)"),
    "orthogonal": (on(lambda m: parametrizations.orthogonal(m)), r"parametrised \(_Orthogonal\)"),
    "old weight_norm": (on(lambda m: nn.utils.weight_norm(m)), "remove_weight_norm"),
    "old spectral_norm": (on(lambda m: nn.utils.spectral_norm(m)), "remove_spectral_norm"),
    "pruned": (on(lambda m: prune.l1_unstructured(m, "weight", 0.5)), r"weight is pruned.*prune.remove"),
    "forward hook": (on(lambda m: m.register_forward_hook(lambda m, a, y: 2 * y)), "a forward hook"),
    "forward hook that is always called": (
        on(lambda m: m.register_forward_hook(scaled_hook, with_kwargs=True, always_call=True)),
        r"a forward hook \(scaled_hook\)",
    ),
    "forward pre-hook": (on(lambda m: m.register_forward_pre_hook(lambda m, a: (2 * a[0],))), "a forward pre-hook"),
    "backward hook": (on(lambda m: m.register_full_backward_hook(scaled_hook)), "a backward hook"),
    "backward pre-hook": (on(lambda m: m.register_full_backward_pre_hook(scaled_hook)), "a backward pre-hook"),
    "state_dict hook": (on(lambda m: m.register_state_dict_post_hook(scaled_hook)), "a state_dict hook"),
    "state_dict pre-hook": (on(lambda m: m.register_state_dict_pre_hook(scaled_hook)), "a state_dict pre-hook"),
    "load pre-hook": (on(lambda m: m.register_load_state_dict_pre_hook(scaled_hook)), "a load_state_dict pre-hook"),
    "load post-hook": (on(lambda m: m.register_load_state_dict_post_hook(scaled_hook)), "a load_state_dict post-hook"),
    "Sequential": (put(lambda old: nn.Sequential(old)), "a Sequential is no nn.Linear; it holds 0"),
    "wrapper as of peft": (put(Wrapper), "a Wrapper is no nn.Linear; it holds base_layer, lora"),
    "lazy": (put(lambda old: nn.LazyLinear(12)), "no shape yet; run the model once"),
    "int8": (
        on(lambda m: setattr(m, "weight", nn.Parameter(m.weight.data.to(torch.int8), requires_grad=False))),
        r"its weight is torch.strided of torch.int8",
    ),
    "tensor subclass": (
        on(lambda m: setattr(m, "weight", nn.Parameter(m.weight.data.as_subclass(Tagged)))),
        "its weight is a Tagged, no plain tensor",
    ),
    "weight is no parameter": (
        on(lambda m: (delattr(m, "weight"), setattr(m, "weight", torch.ones(12, 8)))),
        "its weight is no parameter",
    ),
    "gradient hook": (on(lambda m: m.weight.register_hook(lambda g: 2 * g)), "its weight has a gradient hook"),
    "hook after accumulation": (
        on(lambda m: m.bias.register_post_accumulate_grad_hook(scaled_hook)),
        "its bias has a gradient hook",
    ),
    "a gradient is there": (on(lambda m: m(torch.ones(1, 8).double()).sum().backward()), "its weight has a gradient"),
    "compiled": (put(torch.compile), "OptimizedModule is no nn.Linear; parallelize first, then torch.compile"),
    "compiled in place": (on(lambda m: m.compile()), "it is compiled; parallelize first"),
    "scripted": (put(torch.jit.script), "RecursiveScriptModule is no nn.Linear; parallelize the model that"),
    "quantised": (
        put(lambda old: torch.ao.nn.quantized.dynamic.Linear(8, 12)),
        "is no nn.Linear; give the row the style of this module",
    ),
    "LayerNorm": (put(lambda old: nn.LayerNorm(8)), "a LayerNorm is no nn.Linear"),
    "an attribute's name is taken": (
        on(lambda m: setattr(m, "pieces", 3)),
        "its attribute pieces is a name that ColumnParallelLinear uses itself",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("variant", REFUSED)
def test_what_would_be_lost_is_refused_by_name(variant, tp):
    change, words = REFUSED[variant]
    for index in range(tp):
        with pytest.raises(ValueError, match=words) as caught:
            parallelize(net(change), rank(tp, index), Plan(TABLE, vocab_size=12))
        assert str(caught.value).startswith("plan row 'up': Column() on up: ") and "\n" not in str(caught.value)


KINDS = {
    "Column": Column(),
    "Row": Row(),
    "Qkv": Qkv(2, 2),
    "KvHeads": KvHeads(2, 2),
    "QueryHeads": QueryHeads(2, 2),
    "QueryHeads(row)": QueryHeads(2, 2, row=True),
}


@pytest.mark.parametrize("style", KINDS)
def test_every_style_of_a_linear_refuses_it(style):
    for change, words in (REFUSED["subclass that scales"], REFUSED["forward hook"], REFUSED["pruned"]):
        with pytest.raises(ValueError, match=words):
            parallelize(net(change), Mesh(), Plan({"up": KINDS[style]}, vocab_size=12))


def test_a_patch_of_torchs_own_class_is_seen(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * F.linear(x, self.weight, self.bias))
    with pytest.raises(ValueError, match="Linear.forward itself was replaced"):
        parallelize(net(), Mesh(), Plan(TABLE, vocab_size=12))


def test_a_layer_made_directly_refuses_it_too():
    with pytest.raises(ValueError, match="a Scaled is more than a plain nn.Linear"):
        ColumnParallelLinear.from_linear(Scaled(8, 12), Mesh().tp)


class Named(nn.Linear):
    """Only its start differs, and what it carries along."""

    scale = 3.0

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self._start()

    def _start(self):
        nn.init.zeros_(self.bias)


def formula(new, old):
    new.weight, new.bias = nn.Parameter(old.weight.data.clone()), nn.Parameter(old.bias.data.clone())
    return new


def named(model):
    model.up = formula(Named(8, 12), model.up)


def marked(model):
    model.up.weight.no_decay, model.down.bias.group = True, "late"
    model.up.is_residual = True


def frozen(model):
    model.up.weight.requires_grad_(False), model.down.bias.requires_grad_(False), model.tok.requires_grad_(False)


def no_bias(model):
    model.up.bias = None


def strided(model):
    model.up.weight = nn.Parameter(torch.stack([model.up.weight.data] * 2, -1).flatten(1)[:, ::2])


def of_attention(model):
    model.down = formula(nn.modules.linear.NonDynamicallyQuantizableLinear(12, 8), model.down)


def watched(model):
    model.register_forward_hook(lambda m, a, y: 2 * y)


def tied(model):
    model.head.weight = model.tok.weight


SAME = {f.__name__: f for f in (named, marked, frozen, no_bias, strided, of_attention, tied)}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("variant", SAME)
def test_what_changes_nothing_is_split(pool, variant, tp):
    same_as_unsplit(pool, tp, SAME[variant], TABLE)


def test_what_was_set_on_a_module_goes_over():
    model = parallelize(net(lambda m: (named(m), marked(m))[0]), rank(2), Plan(TABLE, vocab_size=12))
    assert model.up.is_residual and model.up.scale == 3.0 and model.up.weight.no_decay
    assert isinstance(model.up, ColumnParallelLinear)


def test_a_refused_plan_changes_nothing():
    model = net(REFUSED["forward hook"][0])
    before, state = dict(model.named_modules()), {k: v.clone() for k, v in model.state_dict().items()}
    table = {"tok": Vocab(), "down": Row(), "head": TABLE["head"], "up": Column()}  # the bad row last
    with pytest.raises(ValueError, match="forward hook"):
        parallelize(model, rank(2), Plan(table, vocab_size=12))
    assert dict(model.named_modules()) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model(IDS).shape == (2, 10, 12)


def test_layers_that_their_parent_reads_without_calling():
    for parent, row in (
        (nn.MultiheadAttention(8, 2), "m.out_proj"),
        (nn.TransformerEncoderLayer(8, 2, 16), "m.linear2"),
    ):
        with pytest.raises(ValueError, match="reads the weights of its layers without calling them"):
            parallelize(nn.ModuleDict({"m": parent}), Mesh(), Plan({row: Row()}, vocab_size=1))


def test_what_is_wrapped_or_compiled_already():
    inner = torch.compile(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="its parent holds the compiled code"):
        parallelize(nn.ModuleDict({"m": inner}), Mesh(), Plan({"m._orig_mod": Column()}, vocab_size=1))
    wrapped = nn.DataParallel(nn.ModuleDict({"m": nn.Linear(4, 4)}))
    with pytest.raises(ValueError, match="wrapped in DataParallel already; parallelize first"):
        parallelize(wrapped, Mesh(), Plan({"module.m": Column()}, vocab_size=1))
