"""MB-14 (a), (d), (f) and the head-split masks of (c), through the modules that models use."""

import pytest
import torch

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.batch import MicroBatch
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.random import Dropout, Streams, name_dropouts, parameter_generator
from megacore.parallel.styles import HeadDropout


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.streams = Streams(5)
        self.hidden, self.heads = Dropout(0.5, self.streams), Dropout(0.5, self.streams)
        name_dropouts(self)


def masks():
    mesh = Mesh.build(Layout(tp=2, dp=2))
    model = Two()
    parallelize(model, mesh, Plan({"heads": HeadDropout(4, 4)}, vocab_size=1), model.streams)
    batch = MicroBatch.of(
        torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 2, dtype=torch.long), first_sample=4 * mesh.dp.index
    )
    with model.streams.at(batch):
        hidden = model.hidden(torch.ones(4, 2, 64))
        again = model.hidden(torch.ones(4, 2, 64))
        heads = model.heads(torch.ones(4, 2, 2, 64))  # [B, local heads, S, S keys]: 64 keys for the statistics
        x = torch.ones(4, 2, 64, requires_grad=True)
        y = model.hidden(x)
        y.sum().backward()
        state = torch.get_rng_state()
        model.eval()
        quiet = model.hidden(x)
    out = hidden, again, heads, torch.equal(x.grad, y), quiet is x and torch.equal(state, torch.get_rng_state())
    mesh.destroy()
    return out


def test_masks_agree_and_differ_where_they_must(pool):
    answers = pool.run(masks, world=4)
    hidden = [a[0] for a in answers]
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[2], hidden[3])  # equal over tp
    assert 0.4 < (hidden[0] == hidden[2]).float().mean() < 0.6  # different over dp
    heads = [a[2] for a in answers]
    assert 0.4 < (heads[0] == heads[1]).float().mean() < 0.6  # split heads have masks of their own
    for first, again, _, redrawn, quiet in answers:
        assert torch.equal(first, again)  # the same step and module: recomputation sees the same mask
        assert redrawn and quiet
    whole = Two()
    batch = MicroBatch.of(torch.zeros(8, 2, dtype=torch.long), torch.zeros(8, 2, dtype=torch.long))
    with whole.streams.at(batch):
        assert torch.equal(whole.hidden(torch.ones(8, 2, 64)), torch.cat([hidden[0], hidden[2]]))
        serial = whole.heads(torch.ones(8, 4, 2, 64))
    assert torch.equal(serial, torch.cat([torch.cat(heads[:2], 1), torch.cat(heads[2:], 1)]))


def test_modules_and_steps_have_masks_of_their_own():
    model = Two()
    x, ids = torch.ones(2, 4, 64), torch.zeros(2, 4, dtype=torch.long)
    found = []
    for step in (0, 1):
        with model.streams.at(MicroBatch.of(ids, ids, step=step)):
            found += [model.hidden(x), model.heads(x)]
    for i in range(4):
        for j in range(i):
            assert 0.4 < (found[i] == found[j]).float().mean() < 0.6


def test_training_without_a_micro_batch_says_how_to_give_one():
    with pytest.raises(ValueError, match="dropout 'hidden' in training has no micro-batch; run"):
        Two().hidden(torch.ones(1, 1, 4))
    with pytest.raises(ValueError, match="p=1.0 is outside"):
        Dropout(1.0, Streams())


def test_parameter_streams_are_keyed_by_seed_and_name():
    draws = [
        torch.randn(4, generator=parameter_generator(s, n)).tolist()
        for s, n in [(0, "a"), (0, "a"), (0, "b"), (1, "a")]
    ]
    assert draws[0] == draws[1] and len({tuple(d) for d in draws}) == 3
