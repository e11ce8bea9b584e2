"""AdamW on flat slices, against torch.optim.AdamW and clip_grad_norm_ on a plain serial model."""

import math

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.norm import global_norm
from megacore.parallel.record import Box, ParamRecord, records
from megacore.train.optim import STATE, MixedAdamW, learning_rate
from megacore.train.precision import PRECISIONS, precision

HYPER = {"betas": (0.9, 0.95), "eps": 1e-8}


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(13, 37), nn.GELU(), nn.LayerNorm(37), nn.Linear(37, 7)).to(dtype)


def optimizer_of(module, mesh=None, decay=0.1, bucket_bytes=4096):
    mesh = mesh or Mesh()
    params, recs = dict(module.named_parameters()), records(module, mesh)
    buffers = GradBuffers(params, recs, mesh, bucket_bytes)
    return buffers, recs, MixedAdamW(params, recs, buffers, mesh, lr=1e-2, weight_decay=decay, **HYPER)


def plain_adamw(module, decay=0.1):
    groups = [
        {"params": [p for p in module.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **HYPER)


def batch(step, dtype, rows=4):
    return torch.randn(rows, 13, dtype=dtype, generator=torch.Generator().manual_seed(step))


def train_step(module, buffers, recs, optimizer, step, dtype, clip, lr=None):
    buffers.zero()
    buffers.expect()
    module(batch(step, dtype)).square().sum().backward()
    buffers.finish()
    norm, _ = global_norm(buffers, recs, Mesh())
    return optimizer.step(rate(step) if lr is None else lr, norm, clip)


def rate(step):
    return learning_rate(step, peak=1e-2, minimum=1e-3, warmup=3, total=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [0.0, 1.0, 1e9])
def test_steps_equal_torch(dtype, clip):
    """Bit for bit without effective clipping; with it the norms differ in their last bit (order of the sum)."""
    ours, plain = network(dtype), network(dtype)
    buffers, recs, optimizer = optimizer_of(ours)
    reference = plain_adamw(plain)
    for step in range(6):
        info = train_step(ours, buffers, recs, optimizer, step, dtype, clip)
        reference.zero_grad()
        plain(batch(step, dtype)).square().sum().backward()
        for group in reference.param_groups:
            group["lr"] = rate(step)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        reference.step()
        assert info.norm == pytest.approx(norm.item(), rel=1e-6 if dtype == torch.float32 else 1e-14)
        assert (info.scale < 1) == (clip == 1.0) and not info.skipped
    assert optimizer.steps == 6
    for name, p in plain.named_parameters():
        got = dict(ours.named_parameters())[name]
        if clip != 1.0:
            assert torch.equal(got, p), name
        rtol = 1e-14 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(got, p, rtol=rtol, atol=rtol)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state(name)[key], reference.state[p][key], rtol=rtol, atol=rtol)


def test_clip_coefficient_is_torchs():
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, dtype=torch.float64))})
    buffers, _, optimizer = optimizer_of(module)
    buffers.finish()
    buffers.grad("w").fill_(5.0)  # norm 10
    assert optimizer.step(0.1, 10.0, clip=1.0).scale == 1.0 / (10.0 + 1e-6)
    assert torch.equal(buffers.grad("w"), torch.full((4,), 5.0, dtype=torch.float64) * (1.0 / (10.0 + 1e-6)))
    with pytest.raises(ValueError, match="clip=-1 is negative"):
        optimizer.step(0.1, 10.0, clip=-1)


def test_parameters_of_the_main_dtype_are_views_of_the_masters():
    module = network()
    wanted = {n: p.detach().clone() for n, p in module.named_parameters()}
    _, _, optimizer = optimizer_of(module)
    for name, p in module.named_parameters():
        assert torch.equal(p, wanted[name]) and p.is_contiguous()
        assert p.data_ptr() == optimizer.state(name)["master"].data_ptr()
        assert p.data_ptr() % 64 == 0


def test_bf16_parameters_follow_fp32_masters():
    """The reference written out: fp32 AdamW on the bf16 model's gradients, parameters rounded after each step."""
    ours, plain = network(torch.bfloat16), network(torch.bfloat16)
    buffers, recs, optimizer = optimizer_of(ours)
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    groups = [{"params": [m for m in masters if (m.ndim >= 2) == d], "weight_decay": 0.1 * d} for d in (True, False)]
    reference = torch.optim.AdamW(groups, **HYPER)
    for step in range(4):  # lr is below bf16's spacing at 1: only the masters of the norm's weights can move
        train_step(ours, buffers, recs, optimizer, step, torch.bfloat16, 0.0, lr=1e-4)
        plain(batch(step, torch.bfloat16)).square().sum().backward()
        for group in reference.param_groups:
            group["lr"] = 1e-4
        for p, m in zip(plain.parameters(), masters, strict=True):
            m.grad = p.grad.float()
            p.grad = None
        reference.step()
        for p, m in zip(plain.parameters(), masters, strict=True):
            p.data.copy_(m)
    for (name, p), q, m in zip(ours.named_parameters(), plain.parameters(), masters, strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, q)
        assert torch.equal(optimizer.state(name)["master"], m)
    norm_weight = optimizer.state("2.weight")["master"]
    assert norm_weight.ne(1).any() and ours[2].weight.eq(1).all()


def test_mixed_dtypes_keep_their_own_buffers():
    ones = {"a": (15, torch.bfloat16), "b": (7, torch.float32), "c": (2, torch.float64)}
    module = nn.ParameterDict({n: nn.Parameter(torch.ones(size, dtype=dtype)) for n, (size, dtype) in ones.items()})
    buffers, recs, optimizer = optimizer_of(module, decay=0.0)
    sum(p.double().sum() for p in module.values()).backward()
    buffers.finish()
    info = optimizer.step(0.5, global_norm(buffers, recs, Mesh())[0])
    assert info.norm == pytest.approx(math.sqrt(15 + 7 + 2), rel=1e-14)
    for p in module.values():  # the first AdamW step moves by lr whatever the gradient
        torch.testing.assert_close(p.double(), torch.full_like(p, 0.5).double(), rtol=1e-2, atol=0)
    assert [optimizer.state(n)["master"].dtype for n in "abc"] == [torch.float32, torch.float32, torch.float64]


def snapshot(module, optimizer):
    states = {n: {k: v.clone() for k, v in optimizer.state(n).items()} for n, _ in module.named_parameters()}
    return {n: p.detach().clone() for n, p in module.named_parameters()}, states, optimizer.steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "valid"), [(math.inf, 8), (math.nan, 8), (0.0, 0)])
def test_skipped_step_changes_nothing(dtype, norm, valid):
    """MB-02 b: with no valid token there is no weight decay either, and bias correction does not advance."""
    module = network(dtype)
    buffers, recs, optimizer = optimizer_of(module)
    train_step(module, buffers, recs, optimizer, 0, dtype, 1.0)
    before = snapshot(module, optimizer)
    buffers.zero()
    buffers.finish()
    assert optimizer.step(1e-2, norm, clip=1.0, num_valid=valid).skipped
    after = snapshot(module, optimizer)
    assert before[2] == after[2] == 1
    for name, p in before[0].items():
        assert torch.equal(p, after[0][name])
        assert all(torch.equal(before[1][name][k], after[1][name][k]) for k in STATE)


def test_zero_gradient_with_valid_tokens_still_decays():
    module = network()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    buffers, _, optimizer = optimizer_of(module)
    buffers.finish()
    assert not optimizer.step(1e-2, 0.0, clip=1.0, num_valid=3).skipped
    for name, p in module.named_parameters():
        wanted = before[name] * (1 - 1e-2 * 0.1) if p.ndim >= 2 else before[name]
        assert torch.equal(p, wanted)


def test_frozen_parameters_stay():
    module = network()
    module[0].requires_grad_(False)
    before = module[0].weight.clone()
    buffers, recs, optimizer = optimizer_of(module)
    train_step(module, buffers, recs, optimizer, 0, torch.float32, 1.0)
    assert torch.equal(module[0].weight, before) and "0.weight" not in buffers.slots
    with pytest.raises(ValueError, match="0.weight"):
        optimizer.state("0.weight")


def test_decay_is_decided_on_the_full_shape_and_by_the_callers_rule():
    mesh = Mesh()
    params = {"flat": nn.Parameter(torch.ones(6)), "free": nn.Parameter(torch.ones(2, 3))}
    boxes = (Box(((0, 2), (0, 3)), ((0, 6),)),)  # a matrix that this rank holds as a vector
    recs = {"flat": ParamRecord("flat", (2, 3), (6,), boxes), "free": ParamRecord("free", (2, 3), (2, 3), ())}
    for rule, decayed in ((None, {"flat", "free"}), (lambda n, r: n == "free", {"free"})):
        for p in params.values():
            p.data.fill_(1.0)
        buffers = GradBuffers(params, recs, mesh)
        chosen = {"decay": rule} if rule else {}
        optimizer = MixedAdamW(params, recs, buffers, mesh, lr=0.1, weight_decay=0.5, **chosen)
        buffers.finish()
        optimizer.step(0.1, 0.0)
        assert {n for n, p in params.items() if p.detach().ne(1).any()} == decayed
        buffers.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dtype):
    whole = network(dtype)
    buffers, recs, optimizer = optimizer_of(whole)
    for step in range(2):
        train_step(whole, buffers, recs, optimizer, step, dtype, 1.0)
    _, states, steps = snapshot(whole, optimizer)
    for step in range(2, 5):
        train_step(whole, buffers, recs, optimizer, step, dtype, 1.0)
    resumed = network(dtype)
    with torch.no_grad():
        for p in resumed.parameters():
            p.zero_()  # whatever the weights were: the masters bring them
    buffers, recs, optimizer = optimizer_of(resumed)
    optimizer.load(states, steps)
    for step in range(2, 5):
        train_step(resumed, buffers, recs, optimizer, step, dtype, 1.0)
    assert optimizer.steps == 5
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match="lacks 0.bias"):
        optimizer.load({n: s for n, s in states.items() if n != "0.bias"}, 2)


def data_parallel(layout, steps):
    mesh = Mesh.build(layout)
    module = network(torch.float64)
    buffers, recs, optimizer = optimizer_of(module, mesh, bucket_bytes=512)
    norms = []
    for step in range(steps):
        rows = batch(step, torch.float64, rows=8).chunk(layout.dp)[mesh.dp.index]
        buffers.zero()
        buffers.expect()
        (module(rows).square().sum() / 56).backward()
        buffers.finish()
        norms.append(optimizer.step(rate(step), global_norm(buffers, recs, mesh)[0], clip=0.05).norm)
    return norms, {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("dp", [2, 4])
def test_data_parallel_steps_equal_serial_torch(pool, dp):
    plain = network(torch.float64)
    reference, norms = plain_adamw(plain), []
    for step in range(3):
        reference.zero_grad()
        plain(batch(step, torch.float64, rows=8)).square().mean().backward()
        for group in reference.param_groups:
            group["lr"] = rate(step)
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        reference.step()
    results = pool.run(data_parallel, Layout(dp=dp), 3, world=dp)
    for got, weights in results:
        assert got == pytest.approx(norms, rel=1e-12)
        for name, p in plain.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-12, atol=1e-12)
            assert torch.equal(weights[name], results[0][1][name])


def test_learning_rate_follows_the_closed_formula():
    rates = [learning_rate(s, peak=1.0, minimum=0.1, warmup=4, total=12) for s in range(15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[8] == pytest.approx(0.55) and rates[12:] == [0.1] * 3
    assert rates[6] == pytest.approx(0.1 + 0.45 * (1 + math.sqrt(0.5)))
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))
    assert learning_rate(0, peak=1.0, minimum=0.0, warmup=0, total=10) == 1.0
    with pytest.raises(ValueError, match="warmup=5"):
        learning_rate(0, peak=1.0, minimum=0.0, warmup=5, total=4)
    with pytest.raises(ValueError, match="minimum=2"):
        learning_rate(0, peak=1.0, minimum=2, warmup=0, total=4)


def test_precision_names():
    got = {n: (p.parameters, p.main, p.masters) for n, p in PRECISIONS.items()}
    assert got == {
        "fp64": (torch.float64, torch.float64, False),
        "fp32": (torch.float32, torch.float32, False),
        "bf16": (torch.bfloat16, torch.float32, True),
    }
    with pytest.raises(ValueError, match="precision='fp8' is unknown; choose one of fp64, fp32, bf16"):
        precision("fp8")
