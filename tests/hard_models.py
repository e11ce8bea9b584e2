"""Models that verify must tell from wrong ones, or say in one line why it cannot judge them."""

from dataclasses import replace

import torch
from torch import nn

from tests import user_model
from tests.user_model import Tiny


def plan(model):
    """Without stages: some of these have modules that user_model's chain does not know."""
    return replace(user_model.plan(model), chain=None)


class SingleOnly(nn.Module):
    def forward(self, x):
        if x.dtype == torch.float64:
            raise NotImplementedError("\"picky_cpu\" not implemented for 'Double'\nsecond line")
        return x.tanh()


class NoDouble(Tiny):
    def __init__(self):
        super().__init__()
        self.act, self.drop = SingleOnly(), nn.Dropout(0.0)

    def body(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Narrow(nn.Module):
    def forward(self, x):
        return x.float().tanh().to(x.dtype)


class CastsInside(NoDouble):
    def __init__(self):
        super().__init__()
        self.act = Narrow()


class Constants(NoDouble):
    """Computes a table in fp32, which no activation enters: no reason to refuse."""

    def __init__(self):
        super().__init__()
        self.act = nn.Identity()

    def body(self, x):
        return super().body(x + torch.arange(x.shape[1], dtype=torch.float32).sin().to(x.dtype)[:, None])


class Broken(NoDouble):
    def __init__(self):
        super().__init__()
        self.act = nn.Linear(3, 3)


class OwnDropout(Tiny):
    """Its Dropout has no row."""


def unkeyed(_):
    whole = plan(_)
    return replace(whole, table={k: v for k, v in whole.table.items() if k != "drop"})


class Batchy(NoDouble):
    def __init__(self):
        super().__init__()
        self.act, self.bn = nn.Identity(), nn.BatchNorm1d(12)

    def body(self, x):
        return super().body(self.bn(x.transpose(1, 2)).transpose(1, 2))


def factory_that_raises():
    raise KeyError("no such file\nand more")


class Pair(Tiny):
    def forward(self, ids):
        return (super().forward(ids), None)


def _in_a_worker():
    return torch.distributed.is_initialized()


def scaled_gradient():
    """In the workers the gradient of one weight is off by a millionth; forward is right."""
    model = Tiny()
    if _in_a_worker():
        model.norm.weight.register_hook(lambda g: g * (1 + 1e-6))
    return model


def wrong_update():
    """In the workers AdamW's rate is off by a millionth: weights are off by 1e-9, gradients are right."""
    from megacore.train.optim import MixedAdamW

    if _in_a_worker() and not hasattr(MixedAdamW, "spoilt"):
        right, MixedAdamW.spoilt = MixedAdamW.step, True
        MixedAdamW.step = lambda self, lr, *rest, **named: right(self, lr * (1 + 1e-6), *rest, **named)
    return Tiny()


def wrong_later():
    """In the workers the second update is wrong, the first is right."""
    from megacore.train.optim import MixedAdamW

    if _in_a_worker() and not hasattr(MixedAdamW, "spoilt"):
        right, MixedAdamW.spoilt = MixedAdamW.step, True

        def step(self, lr, *rest, **named):
            return right(self, lr * (1 + 1e-6 * (self.steps == 1)), *rest, **named)

        MixedAdamW.step = step
    return Tiny()


def drifting_copy():
    """On rank 1 one whole weight moves by itself, after the gradients were right."""
    from megacore.train.optim import MixedAdamW

    if _in_a_worker() and torch.distributed.get_rank() == 1 and not hasattr(MixedAdamW, "spoilt"):
        right, MixedAdamW.spoilt = MixedAdamW.step, True

        def step(self, *rest, **named):
            info = right(self, *rest, **named)
            self.buffers.params["norm.bias"].data.add_(1e-15)
            return info

        MixedAdamW.step = step
    return Tiny()
