"""The global gradient norm counts each element of the model once: closed numbers and torch's own clip_grad_norm_."""

import math

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.norm import global_norm
from megacore.parallel.record import Box, ParamRecord, records
from megacore.train.optim import MixedAdamW

TIE = "embed.weight"
# MB-09: sums of squares by stage. Sharded: each of two tensor ranks holds half. All vectors have 4 full elements.
SQUARES = (
    {"sharded": 16.0, "replicated": 9.0, "tied": 19.0},
    {"sharded": 36.0, "replicated": 20.0, "tied": 19.0},
)


def record(name, kind, mesh):
    at = mesh.tp.index
    if kind == "sharded":
        boxes = (Box(((2 * at, 2 * at + 2),), ((0, 2),)),)
        return ParamRecord(name, (4,), (2,), boxes)
    boxes = (Box(((0, 4),), ((0, 4),), first=at == 0),)
    tied = kind == "tied"
    return ParamRecord(name, (4,), (4,), boxes, tie=TIE if tied else None, tie_first=mesh.is_first_stage or not tied)


def by_hand(layout, poison=None):
    """Gradients set by hand as finish() leaves them; `poison`: (rank, parameter kind, value of its last element)."""
    mesh = Mesh.build(layout)
    module = nn.ParameterDict()
    for kind in SQUARES[mesh.stage]:
        module[kind] = nn.Parameter(torch.zeros(2 if kind == "sharded" else 4))
    recs = {kind: record(kind, kind, mesh) for kind in module}
    buffers = GradBuffers(dict(module.named_parameters()), recs, mesh)
    buffers.finish()
    for kind, total in SQUARES[mesh.stage].items():
        buffers.grad(kind).fill_(math.sqrt(total / 4))
    before = {kind: buffers.grad(kind).clone() for kind in module}
    if poison and poison[0] == mesh.rank:
        buffers.grad(poison[1])[-1] = poison[2]
    optimizer = MixedAdamW(dict(module.named_parameters()), recs, buffers, mesh, lr=0.1)
    norm, finite = global_norm(buffers, recs, mesh)
    info = optimizer.step(0.1, norm, clip=1.0)
    ratio = max((buffers.grad(k) / before[k] - 0.1).abs().max().item() for k in module)
    moved = any(p.detach().abs().sum() > 0 or optimizer.state(k)["exp_avg"].any() for k, p in module.items())
    return norm.item(), finite, ratio, moved, info.skipped, optimizer.steps


@pytest.mark.parametrize("dp", [1, 2])
def test_replicated_and_tied_parameters_are_counted_once(pool, dp):
    """MB-09. 11.3578: replicated twice; 10.9087: tied twice; 6.6332 and 8.6603: a norm for each stage."""
    results = pool.run(by_hand, Layout(tp=2, pp=2, dp=dp), world=4 * dp)
    assert {r[0] for r in results} == {results[0][0]}  # the same bits everywhere
    for norm, finite, ratio, moved, skipped, steps in results:
        assert norm == pytest.approx(10.0, rel=1e-7) and finite and moved and not skipped and steps == 1
        assert ratio < 1e-7  # multiplied by 1 / (10 + 1e-6)


# counted elements, and copies that are not counted: a replica on the second tensor rank, a tied copy on the last stage
POISON = ((3, "sharded", math.inf), (0, "replicated", math.nan), (1, "replicated", -math.inf), (2, "tied", math.nan))


@pytest.mark.parametrize("poison", POISON)
def test_one_bad_element_skips_the_step_on_every_rank(pool, poison):
    for norm, finite, _, moved, skipped, steps in pool.run(by_hand, Layout(tp=2, pp=2), poison, world=4):
        assert not finite and not math.isfinite(norm)
        assert skipped == "gradients are not finite" and not moved and steps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_equals_torch(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5)).to(dtype)
    recs = records(module, Mesh())
    buffers = GradBuffers(dict(module.named_parameters()), recs, Mesh())
    module(torch.ones(3, 33, dtype=dtype)).square().sum().backward()
    buffers.finish()
    norm, finite = global_norm(buffers, recs, Mesh())
    wanted = torch.linalg.vector_norm(torch.cat([buffers.grad(n).double().flatten() for n in recs]))
    assert finite and norm.dtype == torch.float64
    torch.testing.assert_close(norm, wanted, rtol=1e-14, atol=0)


def test_squares_are_summed_in_fp64():
    """2^20 ones beside 1e6: an fp32 sum of squares, 1e12 + 1 + 1 + ..., never moves."""
    module = nn.ParameterDict({"big": nn.Parameter(torch.zeros(1)), "ones": nn.Parameter(torch.zeros(1 << 20))})
    recs = records(module, Mesh())
    buffers = GradBuffers(dict(module.named_parameters()), recs, Mesh())
    buffers.finish()
    buffers.grad("big").fill_(1e6)
    buffers.grad("ones").fill_(1.0)
    assert global_norm(buffers, recs, Mesh())[0].item() == pytest.approx(math.sqrt(1e12 + (1 << 20)), rel=1e-14)


def test_a_rank_without_trainable_parameters_has_norm_zero():
    norm, finite = global_norm(GradBuffers({}, {}, Mesh()), {}, Mesh())
    assert norm.item() == 0 and finite
