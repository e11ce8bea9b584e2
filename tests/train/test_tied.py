"""MB-07: the tied embedding and head are one parameter, whatever stages hold its copies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.models import gpt
from megacore.parallel.materialize import materialize
from megacore.train.config import OptimSettings
from megacore.train.step import TrainStep
from tests.toy import TOY, batch, formula, rows

OPTIM = OptimSettings(lr=1e-2, clip=1.0, weight_decay=0.1)
NAME = "embed.tok.weight"


def tied_copies(sizes):
    """For each point in time, this rank's copies of the tied weight with their boxes; and the norms of the steps."""
    mesh = Mesh.build(Layout(**sizes))
    init = formula(TOY)
    step = TrainStep(
        lambda: gpt.GPT(TOY), gpt.plan(TOY), mesh, precision="fp64", optim=OPTIM, init=init, bucket_bytes=4096
    )
    names = [n for n, rec in step.recs.items() if rec.canonical == NAME]
    held, norms = [], []

    def look():
        held.append([(step.recs[n].boxes[0].full, step.params[n].detach().clone()) for n in names])

    look()
    share = 4 // mesh.dp.size
    for number in range(5):
        whole = batch(4, step=number)
        start = mesh.dp.index * share
        mine = [rows(whole, start + i, start + i + 1, i) for i in range(share)]
        norms.append(step.step(mine, whole.valid, OPTIM.lr).grad_norm)
        look()
    mesh.destroy()
    return held, norms


def serial():
    with torch.device("meta"):
        model = gpt.GPT(TOY)
    materialize(model, Mesh(), formula(TOY), seed=0, dtype=torch.float64)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    held, norms = [model.head.weight.detach().clone()], []
    for number in range(5):
        whole = batch(4, step=number)
        adam.zero_grad()
        F.cross_entropy(model(whole.ids).flatten(0, 1), whole.targets.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)))
        adam.step()
        held.append(model.head.weight.detach().clone())
    return held, norms


@pytest.mark.parametrize(
    "sizes", [dict(), dict(pp=2), dict(pp=4), dict(tp=2, pp=2), dict(pp=2, dp=2), dict(tp=2, pp=2, dp=2)]
)
def test_copies_stay_one_parameter(pool, sizes):
    want, norms = serial()
    answers = pool.run(tied_copies, sizes, world=Layout(**sizes).world)
    pp = sizes.get("pp", 1)
    ends = 1 if pp == 1 else 2  # stages that hold a copy
    assert sum(len(held[0]) for held, _ in answers) == Layout(**sizes).world // pp * ends
    for time in range(6):
        seen = {}
        for held, _ in answers:
            for box, values in held[time]:
                assert torch.equal(values, seen.setdefault(box, values)), (time, box)  # copies are the same bits
                serial_box = want[time][tuple(slice(*r) for r in box)]
                torch.testing.assert_close(values, serial_box, rtol=1e-10, atol=1e-12)
    for _, got in answers:
        assert max(abs(a - b) / b for a, b in zip(got, norms, strict=True)) < 1e-12  # one copy counted
