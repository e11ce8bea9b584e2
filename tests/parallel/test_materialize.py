"""MB-12: same seed, same weights, whatever the layout; and never more than one full parameter in memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.models import gpt
from megacore.parallel.materialize import materialize
from megacore.train.step import build_stage
from tests.toy import TOY


def shards(sizes, dtype):
    mesh = Mesh.build(Layout(**sizes))
    stage = build_stage(
        lambda: gpt.GPT(TOY), gpt.plan(TOY), mesh, seed=1234, init=gpt.initialise(TOY), dtype=dtype, device="cpu"
    )
    from megacore.parallel.record import records

    recs = records(stage.model, mesh)
    pieces = [
        (
            recs[n].canonical,
            box.full,
            p.detach()[tuple(slice(*r) for r in box.local)].clone(),
            box.first and recs[n].tie_first,
        )
        for n, p in stage.model.named_parameters()
        for box in recs[n].boxes
    ]
    mesh.destroy()
    return pieces


@pytest.mark.parametrize(
    "sizes", [dict(tp=2), dict(tp=4), dict(pp=2), dict(dp=2), dict(tp=2, pp=2, dp=2), dict(tp=3, pp=2)]
)
def test_every_piece_is_a_slice_of_the_serial_model(pool, sizes):
    with torch.device("meta"):
        plain = gpt.GPT(TOY)
    materialize(plain, Mesh(), gpt.initialise(TOY), seed=1234)
    want = dict(plain.named_parameters())
    seen = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in want.items()}
    for pieces in pool.run(shards, sizes, torch.float32, world=Layout(**sizes).world):
        for name, box, values, first in pieces:
            at = tuple(slice(*r) for r in box)
            assert torch.equal(values, want[name][at]), name
            seen[name][at] += int(first)
    dp = sizes.get("dp", 1)
    assert all(bool((count == dp).all()) for count in seen.values())


def test_precisions_start_from_the_same_numbers():
    with torch.device("meta"):
        wide, narrow = gpt.GPT(TOY), gpt.GPT(TOY)
    materialize(wide, Mesh(), gpt.initialise(TOY), seed=1, dtype=torch.float64)
    materialize(narrow, Mesh(), gpt.initialise(TOY), seed=1, dtype=torch.bfloat16)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_blocks_and_seeds_differ():
    with torch.device("meta"):
        a, b = gpt.GPT(TOY), gpt.GPT(TOY)
    materialize(a, Mesh(), gpt.initialise(TOY), seed=1)
    materialize(b, Mesh(), gpt.initialise(TOY), seed=2)
    assert not torch.equal(a.blocks[0].mlp.fc1.weight, a.blocks[1].mlp.fc1.weight)
    assert not torch.equal(a.blocks[0].mlp.fc1.weight, b.blocks[0].mlp.fc1.weight)
    assert a.head.weight is a.embed.tok.weight


def test_one_full_parameter_at_a_time():
    """Full tensors are counted as they are drawn: when the next one is asked for, the one before is gone."""
    config = gpt.GPTConfig(layers=3, hidden=64, heads=4, vocab_size=512, seq_length=16)
    alive, most = [], []

    def init(name, full, generator):
        gc.collect()
        alive.append(weakref.ref(full.untyped_storage()))
        full.normal_(generator=generator)
        most.append(sum(ref() is not None for ref in alive))

    layout = Layout(tp=4)
    from megacore.comm.mesh import Group

    mesh = Mesh(layout=layout, tp=Group((0, 1, 2, 3), 1))  # no communicator: materialising needs none
    stage = build_stage(
        lambda: gpt.GPT(config), gpt.plan(config), mesh, seed=0, init=init, dtype=torch.float32, device="cpu"
    )
    assert len(most) == len(list(stage.model.parameters())) and max(most) == 1
    shard = dict(stage.model.named_parameters())["embed.tok.weight"]
    assert shard.untyped_storage().nbytes() == 128 * 64 * 4  # a view would keep the full tensor alive


def test_a_buffer_without_initialiser_is_refused():
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="buffer 'running_mean' is on the meta device"):
        materialize(model, Mesh(), lambda *a: None, seed=0)
