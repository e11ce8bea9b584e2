"""What the tests of styles share: a small net by formula, meshes without processes, and a run at a layout against the
unsplit model."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Group, Layout, Mesh
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.record import records
from megacore.parallel.styles import Column, Head, Row, Vocab
from tests.parallel.gradients import fill

IDS = torch.arange(20).view(2, 10) * 5 % 12
TABLE = {"tok": Vocab(), "up": Column(), "down": Row(), "head": Head()}


class Net(nn.Module):
    """tok -> x + down(gelu(up(x))) -> head; 12 words, 8 features, 12 inside."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(12, 8)
        self.up, self.act, self.down = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        return self.head(x + self.drop(self.down(self.act(self.up(x)))))


def net(change=None):
    """The net with its weights by formula, in fp64; `change` changes it in place, or gives another."""
    model = fill(Net().double())
    return model if change is None else change(model) or model


def rank(tp, index=0):
    """A mesh as one rank of `tp` sees it, for what does not communicate."""
    return replace(Mesh(), tp=Group(tuple(range(tp)), index))


def summed(model, ids=IDS):
    """A loss that weights each logit differently, so that no gradient is lost in a sum."""
    y = model(ids)
    width = y.shape[-1]
    return y, lambda start: (y * torch.sin(1.0 + torch.arange(start, start + width, dtype=y.dtype))).sum()


def at(tp, change, table):
    """One rank's logits and the full gradients that it counts; runs in the pool."""
    mesh = Mesh.build(Layout(tp=tp))
    model = parallelize(net(change), mesh, Plan(table, vocab_size=12))
    y, loss = summed(model)
    head = model.get_submodule("head")
    loss(head.pieces[mesh.tp.index][0][0][0]).backward()
    recs, grads = records(model, mesh), {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads[name] = torch.zeros(recs[name].shape, dtype=p.dtype)
            recs[name].add_into_full(p.grad, grads[name], recs[name].counted())
    marks = {n: vars(p) for n, p in model.named_parameters()}
    trains = {n: p.requires_grad for n, p in model.named_parameters()}
    mesh.destroy()
    return y.detach(), grads, marks, trains


def same_as_unsplit(pool, tp, change, table):
    """The logits, gradients and marks of every parameter at `tp` are those of the unsplit model."""
    plain = net(change)
    y, loss = summed(plain)
    loss(0).backward()
    answers = pool.run(at, tp, change, table, world=tp)
    torch.testing.assert_close(torch.cat([a[0] for a in answers], -1), y, rtol=1e-12, atol=1e-13)
    for name, p in plain.named_parameters():
        for _, grads, marks, trains in answers:
            assert trains[name] == p.requires_grad and marks[name] == vars(p), name
            assert (name in grads) == (p.grad is not None), name
        if p.grad is not None:
            total = sum(grads[name] for _, grads, _, _ in answers)
            torch.testing.assert_close(total, p.grad, rtol=1e-12, atol=1e-13, msg=name)


def refused(words, table, tp=2, change=None, **settings):
    for index in range(tp):
        model = net(change)
        before = dict(model.named_modules(remove_duplicate=False))
        with pytest.raises(ValueError, match=words) as caught:
            parallelize(model, rank(tp, index), Plan(table, **{"vocab_size": 12} | settings))
        assert "\n" not in str(caught.value)
        assert dict(model.named_modules(remove_duplicate=False)) == before


@dataclass(frozen=True)
class Whole:
    """A style of a user's own: the module stays, or another takes its place."""

    made: nn.Module | None = None

    def apply(self, module, site):
        return self.made or module
