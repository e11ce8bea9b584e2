"""Weights that are written after the optimizer was built: they are the ones that train, at every precision."""

import math

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.models import gpt
from megacore.train.rounded import not_rounded
from megacore.train.step import TrainStep
from tests.toy import TOY, batch, formula
from tests.train.test_optim import HYPER, network, optimizer_of, train_step
from tests.train.test_optim import batch as inputs


def load(module, values):
    module.load_state_dict(values)


def copy(module, values):
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(values[name])


def copy_data(module, values):
    for name, p in module.named_parameters():
        p.data.copy_(values[name])


def replace_data(module, values):
    for name, p in module.named_parameters():
        p.data = values[name].clone()


def replace_by_a_view(module, values):
    for name, p in module.named_parameters():
        p.data = a_view(values[name])


def a_view(values):
    """Neither contiguous nor at the start of its memory."""
    return torch.stack([values, values], dim=-1)[..., 1]


WRITES = [load, copy, copy_data, replace_data, replace_by_a_view]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("skip", [False, True], ids=["stepped", "skipped"])
def test_weights_written_later_are_the_ones_that_train(dtype, write, skip):
    """Against torch.optim.AdamW on masters that the test writes itself; moments stay as they were."""
    module, plain = network(dtype), network(dtype)
    buffers, recs, optimizer = optimizer_of(module)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {n: p.detach().to(wide).requires_grad_() for n, p in plain.named_parameters()}
    groups = [{"params": [m for m in masters.values() if (m.ndim >= 2) == d], "weight_decay": 0.1 * d} for d in (1, 0)]
    reference = torch.optim.AdamW(groups, lr=1e-2, **HYPER)
    new = {
        n: (torch.randn(p.shape, generator=torch.Generator().manual_seed(9)) * 3).to(dtype) for n, p in masters.items()
    }
    for step in range(4):
        if step == 2:
            write(module, new)
            for n, m in masters.items():
                low_bits = m.detach().to(dtype) == new[n]  # a master that rounds to the new weight is that weight
                m.data.copy_(torch.where(low_bits & (wide != dtype), m.detach(), new[n].to(wide)))
            if skip:
                assert optimizer.step(1e-2, math.inf).skipped
                assert all(torch.equal(p, new[n]) for n, p in module.named_parameters())
        train_step(module, buffers, recs, optimizer, step, dtype, 0.0, lr=1e-2)
        viewed = step == 2 and write is replace_by_a_view and not skip  # a library's bits may depend on how weights lie
        for n, p in plain.named_parameters():
            p.data = a_view(masters[n].detach().to(dtype)) if viewed else masters[n].detach().to(dtype)
        plain(inputs(step, dtype)).square().sum().backward()
        for n, p in plain.named_parameters():
            masters[n].grad, p.grad = p.grad.to(wide), None
        reference.step()
    for n, p in module.named_parameters():
        assert torch.equal(optimizer.state(n)["master"], masters[n]), n
        assert torch.equal(p, masters[n].to(dtype)) and p.dtype == dtype and (p.is_contiguous() or dtype != wide)


def test_what_is_swapped_in_and_back_costs_no_bit():
    """An average for an evaluation: the masters keep what bf16 cannot hold."""
    module = network(torch.bfloat16)
    buffers, recs, optimizer = optimizer_of(module)
    train_step(module, buffers, recs, optimizer, 0, torch.bfloat16, 0.0, lr=1e-3)
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    masters = {n: optimizer.state(n)["master"].clone() for n in kept}
    assert any((m != m.bfloat16().float()).any() for m in masters.values())
    copy(module, {n: torch.zeros_like(p) for n, p in kept.items()})
    copy(module, kept)
    assert optimizer.refresh() == []
    assert all(torch.equal(optimizer.state(n)["master"], m) for n, m in masters.items())
    with torch.no_grad():
        module[0].weight[5] = 0.0  # a padding row, say: its neighbours keep their low bits
    assert optimizer.refresh() == ["0.weight"]
    masters["0.weight"][5] = 0.0
    assert all(torch.equal(optimizer.state(n)["master"], m) for n, m in masters.items())
    assert optimizer.refresh() == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.to(torch.float16), "torch.float16 now, torch.float32 when the optimizer was built"),
        (lambda p: p[:3].clone(), r"\(3, 13\) now, \(37, 13\) when the optimizer was built"),
    ],
)
def test_weights_of_another_kind_are_refused_by_name(change, says):
    module = network()
    _, _, optimizer = optimizer_of(module)
    module[0].weight.data = change(module[0].weight.data)
    before = module[0].bias.detach().clone()
    with pytest.raises(ValueError, match=f"0.weight is {says}"):
        optimizer.step(1e-2, 1.0)
    assert torch.equal(module[0].bias, before) and optimizer.steps == 0


@pytest.mark.parametrize("size", [0, 1, 3, 4, 65536, 65537, 200_003])
def test_a_single_bit_is_seen_wherever_it_is(size):
    wide = torch.randn(size)
    narrow = torch.cat([torch.zeros(1, dtype=torch.bfloat16), wide.bfloat16()])[1:]  # not on eight bytes
    for given in (narrow, narrow.clone()):
        assert not_rounded({"w": (given, wide)}) == []
        for at in {0, size // 2, size - 1} if size else ():
            changed = given.clone() if given.storage_offset() == 0 else torch.cat([given[:1], given])[1:]
            changed.view(torch.int16)[at] ^= 1
            assert not_rounded({"v": (given, wide), "w": (changed, wide)}) == ["w"]


def trained(layout, precision, action):
    """Weights of every rank after two steps, with `action` between the two."""
    mesh = Mesh.build(layout)
    step = TrainStep(lambda: gpt.GPT(TOY), gpt.plan(TOY), mesh, precision=precision, init=formula(TOY))
    said = []
    for number in range(2):
        whole = batch(4, step=number)
        mine = [whole] if mesh.dp.size == 1 else [step_rows(whole, mesh.dp.index)]
        try:
            step.step(mine, whole.valid, 1e-2)
        except ValueError as error:
            said.append(str(error))
        if number == 0:
            action(step)
    mesh.destroy()
    return {n: p.detach().clone() for n, p in step.params.items()}, said


def step_rows(whole, index):
    from tests.toy import rows

    return rows(whole, 2 * index, 2 * index + 2)


def halve_in_place(step):
    with torch.no_grad():
        for p in step.params.values():
            p.mul_(0.5)


def halve_data(step):
    for p in step.params.values():
        p.data = p.data * 0.5


def halve_through_state_dict(step):
    step.model.load_state_dict({n: p.detach() * 0.5 for n, p in step.model.state_dict().items()})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_every_way_of_writing_trains_the_same_at_tp2_dp2(pool, precision):
    layout = Layout(tp=2, dp=2)
    ways = [halve_in_place, halve_data, halve_through_state_dict]
    first, *others = [pool.run(trained, layout, precision, way, world=4) for way in ways]
    for ranks in others:
        for (got, said), (want, _) in zip(ranks, first, strict=True):
            assert said == [] and all(torch.equal(got[n], want[n]) for n in want)


def replace_parameter(step):
    block = step.model.get_submodule("blocks.1")
    norm = next(m for m in block.modules() if isinstance(getattr(m, "weight", None), nn.Parameter))
    norm.weight = nn.Parameter(norm.weight.detach().clone())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_that_was_replaced_is_named_on_every_rank(pool, precision):
    """The optimizer holds the old one: the new one would never move."""
    for _, said in pool.run(trained, Layout(tp=2), precision, replace_parameter, world=2):
        assert len(said) == 1 and said[0].startswith("blocks.1.") and "is another Parameter" in said[0]
        assert "\n" not in said[0]
