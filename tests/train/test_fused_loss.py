"""The trainer's loss computes the logits itself: same numbers as with logits, and who holds what meanwhile."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megacore.comm.mesh import Layout, Mesh
from megacore.models import gpt
from megacore.parallel.batch import MicroBatch
from megacore.parallel.head import Unprojected
from megacore.parallel.plan import Plan
from megacore.parallel.styles import Head
from megacore.train.config import OptimSettings
from megacore.train.step import TrainStep
from tests.toy import batch, formula, rows

VOCAB50 = gpt.GPTConfig(layers=2, hidden=16, heads=4, ffn=32, vocab_size=50, seq_length=8)
UNTIED = gpt.GPTConfig(layers=2, hidden=16, heads=4, ffn=32, vocab_size=50, seq_length=8, tied=False)
MASKS = ((0, 7), (1, 1), (2, 0), (3, 5))


def build(config, sizes, multiple=1, schedule="1f1b", fused=True):
    mesh = Mesh.build(Layout(**sizes))
    return TrainStep(
        lambda: gpt.GPT(config), gpt.plan(config, multiple), mesh, precision="fp64", optim=OptimSettings(lr=1e-2),
        init=formula(config), schedule=schedule, fused_loss=fused,
    )  # fmt: skip


def operators(trace):
    names = {e.key.removeprefix("megacore::"): e.count for e in trace.key_averages() if "cross_entropy" in e.key}
    return {name: names.get(name, 0) for name in ("cross_entropy", "linear_cross_entropy", "linear_cross_entropy_bwd")}


def one_step(config, sizes, multiple, schedule, fused):
    """(evaluation, loss, gradients of this rank, the operators of the step, those of the evaluation)."""
    step = build(config, sizes, multiple, schedule, fused)
    whole, seen = batch(4, config, masked=MASKS), {}
    share = [rows(whole, i, i + 1, i) for i in range(4)]
    with profile(activities=[ProfilerActivity.CPU]) as evaluation:
        value = step.evaluate(share, whole.valid)
    with profile(activities=[ProfilerActivity.CPU]) as training:
        result = step.step(
            share, whole.valid, 1e-2, lambda buffers: seen.update({n: buffers.grad(n).clone() for n in buffers.slots})
        )
    step.mesh.destroy()
    return value, result.loss, seen, operators(training), operators(evaluation)


@pytest.mark.parametrize("config", [VOCAB50, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("sizes", "multiple", "schedule"),
    [
        ({}, 1, "1f1b"),
        ({}, 1, "gpipe"),
        ({"tp": 2}, 1, "1f1b"),
        ({"tp": 4}, 8, "1f1b"),
        ({"tp": 2, "pp": 2}, 1, "1f1b"),
        ({"tp": 2, "pp": 2}, 16, "gpipe"),
    ],
)
def test_the_step_is_the_same_without_logits(pool, config, sizes, multiple, schedule):
    world = Layout(**sizes).world
    fused, plain = (pool.run(one_step, config, sizes, multiple, schedule, f, world=world) for f in (True, False))
    last = range(world - sizes.get("tp", 1), world)
    for rank, (ours, theirs) in enumerate(zip(fused, plain, strict=True)):
        assert abs(ours[0] - theirs[0]) < 1e-13 and abs(ours[1] - theirs[1]) < 1e-13
        assert ours[0] == ours[1] == fused[0][1], "evaluation, training and all ranks see the same bits"
        assert ours[2].keys() == theirs[2].keys()
        for name, gradient in theirs[2].items():
            torch.testing.assert_close(ours[2][name], gradient, rtol=1e-12, atol=1e-15, msg=name)
        here = 4 * (rank in last)
        # a gradient of the whole head for each of four waiting micro-batches would be worse than their logits
        again = here if schedule == "gpipe" else 0
        made = {"cross_entropy": 0, "linear_cross_entropy": here, "linear_cross_entropy_bwd": again}
        assert ours[3] == made and ours[4] == made | {"linear_cross_entropy_bwd": 0}
        assert theirs[3]["cross_entropy"] == here and theirs[3]["linear_cross_entropy"] == 0


def test_the_model_gives_logits_to_everybody_else():
    step = build(VOCAB50, {})
    whole = batch(2, VOCAB50)
    assert isinstance(step.stage({}, whole)["logits"], Unprojected)
    logits = step.model(whole.ids)
    assert logits.shape == (2, 8, 50)
    step.stage.heads[0].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("hook")))
    with pytest.raises(KeyError):
        step.stage({}, whole)
    assert step.stage.heads[0].projects, "an error leaves the head as it was"


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.a, self.b = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, ids):
        return self.a(self.tok(ids)) + self.b(self.tok(ids))


def test_two_heads_are_refused_where_the_plan_gives_their_logits_up():
    table = {"a": Head(), "b": Head()}
    with pytest.raises(ValueError, match=r"gives_up_logits=True in a plan with 2 Head\(\) modules"):
        TrainStep(TwoHeads, Plan(table, 8, gives_up_logits=True), Mesh())
    for options in ({}, {"gives_up_logits": True}):
        step = TrainStep(TwoHeads, Plan(table, 8, **options), Mesh(), fused_loss=not options)
        whole = MicroBatch.of(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))
        assert not step.fused_loss and step.step([whole], 2, 1e-3).loss > 0


def test_bytes_of_logits():
    config = gpt.GPTConfig(layers=1, hidden=2, heads=1, vocab_size=50304, seq_length=8)
    step = TrainStep(lambda: gpt.GPT(config), gpt.plan(config), Mesh(), init=formula(config))
    assert step.logits_bytes(1024) == (1024 * 50304 * 4, 128 * 50304 * 4)
    assert step.logits_bytes(8) == (8 * 50304 * 4,) * 2, "one chunk"
    plain = TrainStep(lambda: gpt.GPT(config), gpt.plan(config), Mesh(), init=formula(config), fused_loss=False)
    assert plain.logits_bytes(1024) == (1024 * 50304 * 4,) * 2
