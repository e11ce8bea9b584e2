"""cross_entropy on 2, 3 and 4 ranks (gloo): the known values, one collective forward and none in backward, refusals."""

import pytest
import torch
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

from megacore.comm.collectives import split_range
from megacore.comm.mesh import Layout, Mesh
from megacore.ops import cross_entropy, use
from tests.ops.cross_entropy_cases import CASES, plain_gradient

EXCHANGES = ("all_gather", "allgather", "all_reduce", "allreduce", "reduce_scatter", "broadcast", "gather", "send")


def tensor_group(world):
    return Mesh.build(Layout(tp=world)).tp


def run_cases(world, impl):
    """Loss and gradient of this rank's shard for every case that this many ranks serve."""
    group, found = tensor_group(world), []
    for case in (c for c in CASES if world in c.ranks):
        x, start = case.shard(group.index, world)
        weights = torch.ones(len(case.target)) if case.weights is None else case.weights
        x.requires_grad_()
        with use(impl, "cross_entropy"):
            loss = cross_entropy(
                x, case.target, vocab_size=case.vocab_size, vocab_start=start, group=group, **case.options
            )
        (loss * weights).sum().backward()
        found.append((loss.detach(), x.grad))
    return found


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_known_values(pool, world, impl):
    by_rank = pool.run(run_cases, world, impl, world=world)
    for case, *ranks in zip([c for c in CASES if world in c.ranks], *by_rank, strict=True):
        whole = torch.cat([gradient for _, gradient in ranks], 1)
        for loss, _ in ranks:
            assert torch.equal(loss, ranks[0][0]), f"{case.name}: the ranks disagree"
        case.check(ranks[0][0], whole)
        assert not whole[:, case.vocab_size :].any(), f"{case.name}: padding columns have a gradient"


def batch(vocab=50, rows=6):
    g = torch.Generator().manual_seed(3)
    return torch.randn(rows, vocab, generator=g), torch.randint(0, vocab, (rows,), generator=g)


def count_exchanges(world):
    group = tensor_group(world)
    x, y = batch()
    start, stop = split_range(50, world, group.index)
    mine = x[:, start:stop].clone().requires_grad_()
    counts = []
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = cross_entropy(mine, y, vocab_size=50, vocab_start=start, group=group)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.sum().backward()
    for trace in (forward, backward):
        names = {e.key: e.count for e in trace.key_averages()}
        counts.append({k: n for k, n in names.items() if any(word in k for word in EXCHANGES)})
    return counts


def test_one_exchange_forward_and_none_in_backward(pool):
    for forward, backward in pool.run(count_exchanges, 3, world=3):
        gloo = {name: count for name, count in forward.items() if name.startswith("gloo:")}
        assert sum(gloo.values()) == 1, forward
        assert forward["_c10d_functional::all_gather_into_tensor"] == 1
        assert not backward


def gathered_logits(world, start_of):
    """MB-03 (d): each rank passes all of the row."""
    group = tensor_group(world)
    row = torch.tensor([[1, -1, 0.5, 2]])
    try:
        loss = cross_entropy(row, torch.tensor([3]), vocab_size=4, vocab_start=start_of[group.index], group=group)
        return loss.item()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("starts", [(0, 0), (0, 2)])
def test_gathered_logits_are_refused_on_every_rank(pool, starts):
    for said in pool.run(gathered_logits, 2, starts, world=2):
        assert isinstance(said, str), f"loss {said} (1.188329 is the right 0.495182 + ln 2)"
        assert said.startswith("cross_entropy: logits is split over the ranks as columns [0, 4)")
        assert "vocab_size=4" in said and "not gathered logits" in said


def test_gathered_logits_on_one_rank_are_right(pool):
    """All columns on rank 0 and only padding on rank 1 is a shard like another."""
    for loss in pool.run(gathered_logits, 2, (0, 4), world=2):
        assert abs(loss - 0.495182) < 1e-6


def bad_id(world, bad):
    group = tensor_group(world)
    x, y = batch()
    y[4] = bad
    start, stop = split_range(50, world, group.index)
    try:
        cross_entropy(x[:, start:stop], y, vocab_size=50, vocab_start=start, group=group)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("bad", [50, -1])
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(pool, bad):
    """MB-11 (d). It says so before any exchange."""
    wanted = f"cross_entropy: target[4] is {bad}; wanted an id in [0, 50) or ignore_index=-100"
    assert pool.run(bad_id, 2, bad, world=2) == [wanted] * 2


def obeys_torch(world, impl):
    group = tensor_group(world)
    x, y = batch()
    start, stop = split_range(50, world, group.index)
    mine = x[:, start:stop].clone().requires_grad_()
    args = (y, start, 50, group.name, -100, 0.1, 1e-3, False, impl)
    opcheck(torch.ops.megacore.cross_entropy.default, (mine, *args))

    def f(t):
        how = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"}
        return cross_entropy(t, y, vocab_size=50, vocab_start=start, group=group, **how)

    found = [
        torch.autograd.grad(run(mine), mine)[0] for run in (f, torch.compile(f, fullgraph=True, backend="aot_eager"))
    ]
    return torch.equal(*found), found[0]


def test_opcheck_and_compilation(pool):
    results = pool.run(obeys_torch, 2, "cpp", world=2, timeout=280)
    assert [same for same, _ in results] == [True, True]
    x, y = batch()
    want = plain_gradient(x.double(), y, torch.ones(6), label_smoothing=0.1, z_loss=1e-3)[1]
    torch.testing.assert_close(torch.cat([g for _, g in results], 1), want.float())


def fp64_and_in_place(world):
    """fp64 to 1e-12; and the gradient over the logits with the bits of the one beside them."""
    group = tensor_group(world)
    x, y = batch(vocab=1031)
    start, stop = split_range(1031, world, group.index)
    found = []
    for inplace in (False, True):
        mine = x[:, start:stop].double().requires_grad_()
        loss = cross_entropy(
            mine, y, vocab_size=1031, vocab_start=start, group=group, label_smoothing=0.1, inplace_backward=inplace
        )
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), mine)[0]))
        assert (found[-1][1].data_ptr() == mine.data_ptr()) == inplace
    return found


def test_fp64(pool):
    x, y = batch(vocab=1031)
    loss, gradient = plain_gradient(x.double(), y, torch.ones(6), label_smoothing=0.1)
    for got in zip(*pool.run(fp64_and_in_place, 4, world=4), strict=True):  # not in place, in place
        torch.testing.assert_close(torch.cat([g for _, g in got], 1), gradient, rtol=0, atol=1e-14)
        for ours, _ in got:
            torch.testing.assert_close(ours, loss, rtol=0, atol=1e-13)
