"""Small chains of layers to cut into stages, and the plain serial run of each: torch's autograd, no executor."""

import copy
import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# B batch, S sequence, D = 8 features, L layers
D = 8


@dataclass(frozen=True)
class MB:
    ids: Tensor  # [B, S] int64
    index: int

    @property
    def signature(self):
        return tuple(self.ids.shape)


def microbatches(m: int, seed: int = 0) -> list[MB]:
    """Of two shapes, so that one step mixes signatures."""
    g = torch.Generator().manual_seed(seed)
    return [MB(torch.randint(0, 11, (2, 3 if i % 3 else 5), generator=g), i) for i in range(m)]


class Layer(nn.Module):
    """Uses and hands on every tensor of the set: a gradient that is left out, doubled or mixed up shows."""

    def __init__(self, index: int, last: bool):
        super().__init__()
        self.embed = nn.Embedding(11, D) if index == 0 else None
        self.linear = nn.Linear(D, D)
        self.head = nn.Linear(D, 11) if last else None

    def forward(self, tensors: dict[str, Tensor], mb: MB) -> dict[str, Tensor]:
        if self.embed is not None:
            x = self.embed(mb.ids)
            tensors = {"hidden": x, "skip": x * 2, "ids": mb.ids + 1, "scale": mb.ids.double() / 10}
        x = tensors["hidden"] + torch.tanh(self.linear(tensors["hidden"])) * tensors["scale"][..., None]
        if self.head is None:
            return {**tensors, "hidden": x}
        return {"logits": self.head(x + tensors["skip"] * tensors["ids"][..., None])}


class Adder(nn.Module):
    """Layer i adds 1 to component i of a zero hidden state of 32."""

    def __init__(self, index: int):
        super().__init__()
        self.one = nn.Parameter(torch.eye(32)[index])
        self.first = index == 0

    def forward(self, tensors: dict[str, Tensor], mb: MB) -> dict[str, Tensor]:
        x = torch.zeros(*mb.ids.shape, 32, dtype=self.one.dtype) if self.first else tensors["hidden"]
        return {"hidden": x + self.one}


def layers(n: int, seed: int = 1) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(Layer(i, i == n - 1) for i in range(n)).double()


def adders(n: int) -> nn.ModuleList:
    return nn.ModuleList(Adder(i) for i in range(n)).double()


class Stage:
    """Some layers of a chain, as the executor sees them."""

    def __init__(self, chain: nn.ModuleList, cut: range, sleep: random.Random | None = None):
        self.module = nn.ModuleList(copy.deepcopy(chain[i]) for i in cut)
        self.cut, self.sleep = cut, sleep

    def forward(self, tensors: dict[str, Tensor], mb: MB) -> dict[str, Tensor]:
        if self.sleep:
            time.sleep(self.sleep.uniform(0, 0.05))
        for layer in self.module:
            tensors = layer(tensors, mb)
        return tensors

    def difference(self, chain: nn.ModuleList) -> list[str]:
        """Parameters whose gradient is not the serial one, bit for bit; None counts as zero."""
        wrong = []
        for at, layer in zip(self.cut, self.module, strict=True):
            for (name, p), q in zip(layer.named_parameters(), chain[at].parameters(), strict=True):
                got, want = (torch.zeros_like(t) if t.grad is None else t.grad for t in (p, q))
                if not torch.equal(got, want) or (not q.requires_grad and p.grad is not None):
                    wrong.append(f"{at}.{name}: {(got - want).abs().max():.1e}")
        return wrong


def loss(outputs: dict[str, Tensor], mb: MB) -> Tensor:
    """Differs from micro-batch to micro-batch, so that one taken for another shows."""
    y = next(iter(outputs.values()))
    return ((y - 0.1 * mb.index) ** 2 * torch.arange(1, y.shape[-1] + 1)).sum() / 7


def serial(chain, batches: list[MB], objective=loss) -> list[Tensor]:
    """Losses; gradients are left in the parameters of the chain, which is anything whose items map (tensors, mb)."""
    if isinstance(chain, nn.Module):
        chain.zero_grad()
    losses = []
    for mb in batches:
        tensors: dict[str, Tensor] = {}
        for layer in chain:
            tensors = layer.forward(tensors, mb)
        value = objective(tensors, mb)
        losses.append(value.detach())
        if value.requires_grad:
            value.backward()
    return losses
