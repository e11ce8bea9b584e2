"""MB-46: a stage may begin with an operation that works in place, as a layer in one process may; under every schedule,
a split backward among them. And replicas without a micro-batch, and losses that work in place under W."""

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.plan import Link, Plan
from megacore.pipeline import Action
from megacore.train.config import OptimSettings
from megacore.train.step import TrainStep
from megacore.verify import verify
from tests.toy import TOY, batch, rows

VOCAB = TOY.vocab_size


def relu(x):
    return torch.relu_(x)


def add(x):
    x += 1.5
    return x


def part(x):
    x[..., :3] = 0.25
    x[..., 3:6].mul_(2)
    return x


def twice(x):
    kept = x * 2  # needs nothing of x itself
    x.sub_(0.5)
    x = x.tanh_()
    return x + kept


def bits(x):
    x.masked_fill_(x > 0.5, 0.0)
    return torch.nn.functional.dropout(x, 0.0, inplace=True)


FIRST = {f.__name__: f for f in (relu, add, part, twice, bits)}


class Blocks(nn.Module):
    def __init__(self, first, frozen=False):
        super().__init__()
        self.first = FIRST[first]
        self.tok, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.side = nn.Linear(12, 12)
        if frozen:
            self.tok.requires_grad_(False)
            self.side.requires_grad_(False)

    def enter(self, ids):
        x = self.tok(ids)
        return x * 1.0, self.side(x)

    def block(self, i, x, side):
        x = self.blocks[i](self.first(x))
        side += x  # a second tensor, written to as well
        return x, side

    def forward(self, ids):
        x, side = self.enter(ids)
        for i in range(3):
            x, side = self.block(i, x, side)
        return self.head(self.first(x) + side)


def links(_):
    def step(i):
        return lambda m, t, _: dict(zip(("x", "side"), m.block(i, t["x"], t["side"]), strict=True))

    def embed(m, _, b):
        return dict(zip(("x", "side"), m.enter(b.ids), strict=True))

    last = Link(("head",), lambda m, t, _: {"logits": m.head(m.first(t["x"]) + t["side"])})
    return [Link(("tok", "side"), embed), *(Link((f"blocks.{i}",), step(i)) for i in range(3)), last]


def plan(_=None):
    return Plan({}, VOCAB, links)


class Make:
    """A factory that crosses to workers."""

    def __init__(self, first, frozen=False):
        self.first, self.frozen, self.__name__ = first, frozen, f"Blocks({first})"

    def __call__(self):
        return Blocks(self.first, self.frozen)


@pytest.mark.parametrize("first", FIRST)
def test_a_stage_may_write_into_what_it_is_given(pool, first):
    report = verify(Make(first), plan, "pp2,pp5", pool=pool, schedules=("1f1b", "gpipe"))
    assert report.count("passed") == 4, [row.where for row in report.rows]


def test_behind_a_frozen_stage(pool):
    report = verify(Make("relu", frozen=True), plan, "pp2,pp3", pool=pool)
    assert report.count("passed") == 2, [row.where for row in report.rows]


def split(rank, stages, microbatches):
    """Every forward, every input gradient, every weight gradient."""
    order = range(microbatches)
    return [Action(kind, 0, i) for kind in "FBW" for i in order]


def _gradients(first, schedule, gives_up, stages):
    torch.manual_seed(1)
    mesh = Mesh.build(Layout(pp=stages))
    given = Plan({}, VOCAB, links, gives_up_logits=gives_up)
    step = TrainStep(Make(first), given, mesh, precision="fp64", fused_loss=False, optim=OptimSettings(clip=0.0))
    if schedule is not None:
        step.executor.schedule = schedule
    whole, found = batch(4, masked=((0, 3),)), {}

    def keep(buffers):
        found.update({n: buffers.grad(n).clone() for n in buffers.slots})

    result = step.step([rows(whole, i, i + 1, i) for i in range(4)], whole.valid, 1e-3, keep)
    mesh.destroy()
    return result.loss, found


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("first", ["relu", "twice"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_split_backward_gives_the_same_gradients(pool, first, gives_up, stages):
    """W walks the graph a second time: neither a stage nor the loss may have used it up."""
    want = pool.run(_gradients, first, None, False, 1, world=1)[0]
    ranks = pool.run(_gradients, first, split, gives_up, stages, world=stages)
    found = {name: grad for _, grads in ranks for name, grad in grads.items()}
    assert sorted(found) == sorted(want[1]) and abs(ranks[0][0] - want[0]) < 1e-13
    for name, grad in want[1].items():
        assert torch.allclose(found[name], grad, rtol=1e-12, atol=1e-15), name


def _uneven(sizes, given):
    """Gradients where data-parallel rank i gets the samples given[i]; None: one process, all of them."""
    torch.manual_seed(1)
    mesh = Mesh.build(Layout(**sizes))
    step = TrainStep(Make("relu"), plan(), mesh, precision="fp64", optim=OptimSettings(clip=0.0))
    whole, found = batch(4), {}
    mine = [rows(whole, i, i + 1, n) for n, i in enumerate(given[mesh.dp.index])]

    def keep(buffers):
        found.update({n: buffers.grad(n).clone() for n in buffers.slots})

    losses = [step.step(mine, whole.valid if sum(map(len, given)) else 0, 1e-3, keep).loss, step.evaluate(mine, None)]
    mesh.destroy()
    return losses, found


@pytest.mark.parametrize("pp", [1, 2])
def test_a_replica_without_a_micro_batch_adds_nothing_and_holds_nobody_up(pool, pp):
    (want, grads), *_ = pool.run(_uneven, {}, [[0, 1, 2, 3]], world=1)
    for losses, found in pool.run(_uneven, {"dp": 2, "pp": pp}, [[0, 1, 2, 3], []], world=2 * pp):
        assert losses == pytest.approx(want, rel=1e-12)
        for name, grad in found.items():
            assert torch.allclose(grad, grads[name], rtol=1e-12, atol=1e-15), name
    for losses, _ in pool.run(_uneven, {"dp": 2}, [[], []], world=2):
        assert losses == [0.0, 0.0]
