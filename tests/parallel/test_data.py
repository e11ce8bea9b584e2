"""Main gradients: against plain p.grad, closed numbers, and the sum over ranks written out."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import records


def chain(widths, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))).to(dtype)


def buffers_of(module, mesh=None, bucket_bytes=32 << 20):
    mesh = mesh or Mesh()
    return GradBuffers(dict(module.named_parameters()), records(module, mesh), mesh, bucket_bytes)


def one_weight(value=1.0, dtype=torch.float32):
    module = nn.Module()
    module.w = nn.Parameter(torch.tensor([value], dtype=dtype))
    return module


def test_frozen_parameters_have_no_slot_and_thawing_asks_for_a_rebuild():
    module = chain([4, 4, 4])
    module[0].weight.requires_grad_(False)
    buffers = buffers_of(module)
    with pytest.raises(ValueError, match="0.weight"):
        buffers.grad("0.weight")
    module[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="build new GradBuffers"):
        buffers.zero()


# ---- accumulation on one rank ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_rank_equals_plain_accumulation_bit_for_bit(dtype, microbatches):
    ours, plain = chain([9, 17, 5], dtype), chain([9, 17, 5], dtype)
    buffers = buffers_of(ours, bucket_bytes=512)
    for step in range(2):  # the second step must not see the first
        buffers.zero()
        plain.zero_grad()
        for i in range(microbatches):
            x = torch.randn(4, 9, dtype=dtype, generator=torch.Generator().manual_seed(10 * step + i))
            if i == microbatches - 1:
                buffers.expect()
            ours(x).square().sum().backward()
            plain(x).square().sum().backward()
            assert all(p.grad is None for p in ours.parameters())
        buffers.finish()
        for name, p in plain.named_parameters():
            assert torch.equal(buffers.grad(name), p.grad), name


def test_sum_of_512_bf16_gradients_of_one():
    """MB-04 c: 256 when the sum is kept in bf16."""
    module = one_weight(dtype=torch.bfloat16)
    buffers = buffers_of(module)
    for _ in range(512):
        module.w.sum().backward()
    buffers.finish()
    assert buffers.grad("w").dtype == torch.float32 and buffers.grad("w").item() == 512


def test_tied_parameter_of_one_stage_has_one_slot_and_is_folded_once():
    torch.manual_seed(0)
    embed, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    module = nn.Sequential(embed, head)
    buffers = buffers_of(module)
    folds = []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: folds.append(1))
    buffers.expect()
    ids = torch.tensor([[1, 2, 5]])
    module(ids).square().sum().backward()
    buffers.finish()
    assert list(buffers.slots) == ["0.weight"] and len(folds) == 1
    w = embed.weight.detach().double().requires_grad_()
    (w[ids] @ w.T).square().sum().backward()
    torch.testing.assert_close(buffers.grad("0.weight").double(), w.grad, rtol=1e-5, atol=1e-6)


def test_views_and_strides_of_gradients():
    """MB-23: transposed and expanded gradients, and a parameter that is not contiguous."""
    module = nn.Module()
    module.w = nn.Parameter(torch.arange(60.0).view(10, 6).t())
    module.b = nn.Parameter(torch.zeros(6, 10))
    buffers = buffers_of(module)
    upstream = torch.arange(60.0).view(10, 6).t()
    (module.w * upstream).sum().backward()
    module.b.sum().backward()
    buffers.finish()
    assert torch.equal(buffers.grad("w"), upstream) and torch.equal(buffers.grad("b"), torch.ones(6, 10))


def test_buffers_and_parameters_are_freed():
    """One pool of workers serves many layouts: what a task leaves behind stays until the pool ends."""
    module = chain([4, 4])
    buffers = buffers_of(module)
    module(torch.ones(1, 4)).sum().backward()
    buffers.finish()
    gone = weakref.ref(buffers), weakref.ref(module[0].weight)
    del buffers, module
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_closed_buffers_leave_gradients_to_autograd():
    module = chain([4, 4])
    buffers_of(module).close()
    module(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


# ---- readiness ----


def test_hooks_alone_never_launch_a_bucket():
    module = chain([4, 4, 4])
    buffers = buffers_of(module, bucket_bytes=1)
    module(torch.ones(1, 4)).sum().backward()
    assert buffers.launches == []
    buffers.expect()
    module(torch.ones(1, 4)).sum().backward()
    assert [n for n, _ in buffers.launches] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="after its bucket was reduced"):
        module(torch.ones(1, 4)).sum().backward()


def test_expecting_one_chunk_leaves_the_other():
    module = chain([4, 4, 4])
    buffers = buffers_of(module, bucket_bytes=1)
    buffers.expect(module[1].parameters())
    module(torch.ones(1, 4)).sum().backward()
    assert [n for n, _ in buffers.launches] == [0, 1]


def test_deferred_weight_gradients():
    """W long after B: through autograd restricted to the parameters, and handed over by hand."""
    module, plain = chain([4, 4, 4]), chain([4, 4, 4])
    buffers = buffers_of(module, bucket_bytes=1)
    x = torch.ones(1, 4, requires_grad=True)
    loss, reference = module(x).square().sum(), plain(x).square().sum()
    buffers.expect()
    torch.autograd.grad(loss, x, retain_graph=True)  # B
    assert buffers.launches == []
    torch.autograd.backward(loss, inputs=list(module[1].parameters()), retain_graph=True)  # W of the last layer
    assert [n for n, _ in buffers.launches] == [0, 1]
    grads = torch.autograd.grad(loss, list(module[0].parameters()))
    for p, grad in zip(module[0].parameters(), grads, strict=True):
        p.grad = grad
    buffers.ready(module[0].parameters())
    assert [n for n, _ in buffers.launches] == [0, 1, 2, 3]
    buffers.finish()
    reference.backward()
    for name, p in plain.named_parameters():
        assert torch.equal(buffers.grad(name), p.grad), name


def test_parameter_without_a_gradient_counts_as_zero_after_a_step_that_had_one():
    module = chain([4, 4, 4])
    buffers = buffers_of(module)
    module(torch.ones(1, 4)).sum().backward()
    buffers.finish()
    buffers.zero()
    module[0](torch.ones(1, 4)).sum().backward()
    buffers.finish()
    assert buffers.grad("1.weight").abs().sum() == 0 and buffers.grad("0.weight").abs().sum() > 0


# ---- several ranks ----


def bf16_sum(layout):
    mesh = Mesh.build(layout)
    module = one_weight(dtype=torch.bfloat16)
    buffers = buffers_of(module, mesh)
    (module.w * (256.0 if mesh.dp.index == 0 else 1.0)).sum().backward()
    buffers.finish()
    return buffers.grad("w").item()


def test_sum_over_ranks_is_not_kept_in_bf16(pool):
    """MB-04 d: gloo's bf16 all-reduce gives 260."""
    assert pool.run(bf16_sum, Layout(dp=4), world=4) == [259.0] * 4


TOKENS = {0: [[1.0] * 4, [11.0]], 1: [[5.0] * 2, [-3.0]]}  # MB-05: weights a of each micro-batch's tokens


def token_mean(layout, tokens):
    mesh = Mesh.build(layout)
    module = one_weight()
    buffers = buffers_of(module, mesh)
    valid = sum(len(part) for parts in tokens.values() for part in parts)
    losses = []
    for i, part in enumerate(tokens[mesh.dp.index]):
        if i == len(tokens[mesh.dp.index]) - 1:
            buffers.expect()
        loss = (module.w * torch.tensor(part)).sum() / max(valid, 1)
        loss.backward()
        losses.append(loss.item())
    buffers.finish()
    return buffers.grad("w").item(), sum(losses)


def test_mean_is_over_the_tokens_of_the_global_batch(pool):
    """MB-05: 3.5 is the mean of four means, 2.6667 the mean of the ranks' token means."""
    results = pool.run(token_mean, Layout(dp=2), TOKENS, world=2)
    assert [grad for grad, _ in results] == [2.75, 2.75]
    assert sum(loss for _, loss in results) == 2.75


def test_masked_microbatch_does_not_dilute_the_mean(pool):
    """MB-02 b: rank 1's second micro-batch has no valid token; then none has."""
    results = pool.run(token_mean, Layout(dp=2), {0: TOKENS[0], 1: [[5.0] * 2, []]}, world=2)
    assert [grad for grad, _ in results] == pytest.approx([25 / 7] * 2, rel=1e-6)
    results = pool.run(token_mean, Layout(dp=2), {0: [[], []], 1: [[], []]}, world=2)
    assert results == [(0.0, 0.0)] * 2


def traced_step():
    mesh = Mesh.build(Layout(dp=2))
    module = chain([128] * 9)
    buffers = buffers_of(module, mesh, bucket_bytes=1 << 16)
    x = torch.full((8, 128), 1.0 + mesh.rank)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(2):
            buffers.zero()
            buffers.expect()
            with record_function("backward"):
                module(x).square().sum().backward()
            buffers.finish()
    events = trace.events()
    backward = max((e for e in events if e.name == "backward"), key=lambda e: e.time_range.start)
    launched = [e for e in events if e.name.startswith("launch gradient bucket")]
    early = [e for e in launched if backward.time_range.start < e.time_range.start < backward.time_range.end]
    # autograd work after the launch: the layers in front of the bucket were still to come
    after = [e for e in events if e.name == "AddmmBackward0" and early and e.time_range.start > early[0].time_range.end]
    order = [n for n, _ in buffers.launches]
    return len(buffers.layout.buckets), len(early), len(after), order, buffers.wait_seconds


def test_trace_shows_buckets_launched_before_backward_ends(pool):
    for count, early, after, order, waited in pool.run(traced_step, world=2):
        assert count >= 8 and early == count and after > 0
        assert order == list(range(count)) and waited > 0


def uneven_backward(layout, mode):
    """Ranks whose backward differs: rank 0 leaves out the middle layer, and nobody may wait for ever."""
    mesh = Mesh.build(layout)
    module = chain([8] * 5)
    buffers = buffers_of(module, mesh, bucket_bytes=1)
    layers = [m for i, m in enumerate(module) if i != 2 or mesh.dp.index]
    if mode == "some expect" and mesh.dp.index == 0:
        buffers.expect()
    x = torch.full((2, 8), 1.0 + mesh.dp.index)
    nn.Sequential(*layers)(x).square().sum().backward()
    launched = len(buffers.launches)
    buffers.finish()
    return launched, {n: buffers.grad(n).clone() for n in buffers.slots}


@pytest.mark.parametrize("mode", ["some expect", "none expects"])
def test_order_of_buckets_does_not_depend_on_a_ranks_backward(pool, mode):
    (launched, first), (_, second) = pool.run(uneven_backward, Layout(dp=2), mode, world=2)
    assert launched == (2 if mode == "some expect" else 0)  # bias and weight of the last layer, then the hole
    expected = {}
    for rank in range(2):
        module = chain([8] * 5)
        layers = [m for i, m in enumerate(module) if i != 2 or rank]
        nn.Sequential(*layers)(torch.full((2, 8), 1.0 + rank)).square().sum().backward()
        for name, p in module.named_parameters():
            expected[name] = expected.get(name, 0) + (p.grad if p.grad is not None else 0)
    for name, grad in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], grad, rtol=1e-6, atol=1e-6)
