"""MB-45: what a module has that is no parameter. Dtypes under a run, checkpoints, replicas, stages."""

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.module_buffers import cast, persistent
from megacore.parallel.plan import Link, Plan
from megacore.train import checkpoint
from megacore.train.step import TrainStep
from megacore.verify import verify
from tests.toy import TOY, batch, rows

VOCAB = TOY.vocab_size


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(4096.0), 1e4 ** (-torch.arange(6.0) / 6))
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x):
        return x * self.angles[: x.shape[-2]].repeat(1, 2).cos().to(x.dtype)


class Counting(nn.Module):
    """Two blocks that share a rotary table; a counter and a running mean that each forward in training moves."""

    def __init__(self):
        super().__init__()
        self.tok, self.rotary = nn.Embedding(VOCAB, 12), Rotary()
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, VOCAB)
        self.register_buffer("mask", torch.ones(12, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(12))

    def first(self, ids):
        x = self.tok(ids)
        if self.training:
            self.seen += 1
            self.mean = self.mean.lerp(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        return x + torch.where(self.mask, self.one(self.rotary(x)), 0)

    def second(self, x):
        return x + self.two(self.rotary(x))

    def forward(self, ids):
        return self.head(self.second(self.first(ids)))


def links(_):
    return [
        Link(("tok", "one", "rotary", "mask", "seen", "mean"), lambda m, _, b: {"x": m.first(b.ids)}),
        Link(("two", "rotary"), lambda m, t, _: {"x": m.second(t["x"])}),
        Link(("head",), lambda m, t, _: {"logits": m.head(t["x"])}),
    ]


def plan(_=None):
    return Plan({}, VOCAB, links)


def build():
    torch.manual_seed(0)
    return Counting()


def test_a_cast_keeps_what_would_be_lost():
    model, table = build(), Rotary().angles
    weight = model.one.weight
    cast(model, torch.bfloat16, "cpu")
    assert model.one.weight is weight and weight.dtype == torch.bfloat16
    assert model.rotary.angles.dtype == torch.float32 and model.rotary.angles.equal(table)
    assert (model.mask.dtype, model.seen.dtype, model.mean.dtype) == (torch.bool, torch.int64, torch.float32)
    cast(model, torch.float64, "cpu")
    assert model.rotary.angles.dtype == torch.float64 and model.rotary.angles.float().equal(table)
    assert sorted(persistent(model)) == ["mask", "mean", "seen"]


def _run(folder, sizes, precision, steps):
    """Steps from a checkpoint, if there is one, and a save; what this rank then holds."""
    mesh = Mesh.build(Layout(**sizes))
    step = TrainStep(build, plan(), mesh, precision=precision)
    found = checkpoint.find(folder, group=mesh.world)
    if found:
        checkpoint.load(found, step.logical(), group=mesh.world)
        step.loaded(found.extra["steps"])
    before = {name: b.clone() for name, b in step.model.named_buffers()}
    for number in range(steps):
        whole = batch(4, step=number)
        n = 4 // mesh.dp.size
        start = n * mesh.dp.index
        step.step([rows(whole, start + i, start + i + 1, i) for i in range(n)], None, 1e-3)
    checkpoint.save(folder, 7, step.logical(), {"steps": 7}, group=mesh.world, replicas=mesh.dp_cp)
    after = {name: b.clone() for name, b in step.model.named_buffers()}
    mesh.destroy()
    return before, after


LAYOUTS = [{"dp": 2}, {"pp": 2}, {"tp": 1, "pp": 2, "dp": 2}]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_tables_keep_their_bits_and_counters_are_saved_and_the_same_everywhere(pool, tmp_path, sizes, precision):
    world, table = Layout(**sizes).world, Rotary().angles
    runs = [pool.run(_run, tmp_path, sizes, precision, steps, world=world) for steps in (2, 0)]
    for ranks in runs:
        for _, after in ranks:
            for name, value in after.items():
                if name == "rotary.angles":
                    assert value.dtype == torch.float32 and value.equal(table)
        for name in ("seen", "mean"):
            copies = [after[name] for _, after in ranks if name in after]
            assert copies and all(copy.equal(copies[0]) for copy in copies), name
    forwards = 2 * 4 // sizes.get("dp", 1)
    saved, loaded = ([after for _, after in ranks if "seen" in after][0] for ranks in runs)
    assert int(saved["seen"]) == int(loaded["seen"]) == forwards
    assert saved["mean"].equal(loaded["mean"]) and saved["mean"].any()
    if "dp" in sizes:
        alone = pool.run(_run, tmp_path / "other layout", {}, precision, 0, world=1)
        assert int(alone[0][1]["seen"]) == 0  # a new run counts from the start
        other = pool.run(_run, tmp_path, {}, precision, 0, world=1)  # and a run at another layout goes on
        assert int(other[0][1]["seen"]) == forwards and other[0][1]["mean"].equal(saved["mean"])


def test_a_table_that_two_stages_list_is_on_both(pool):
    report = verify(build, plan, "pp2,pp3,pp2-dp2", pool=pool, schedules=("1f1b", "gpipe"))
    assert report.passed and report.count("passed") == 6, [row.where for row in report.rows]
