"""linear_cross_entropy on 2, 3 and 4 ranks (gloo): known values, serial fp64, one exchange a chunk, refusals."""

import pytest
import torch
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

from megacore.comm.collectives import split_range
from megacore.comm.mesh import Layout, Mesh
from megacore.ops import linear_cross_entropy, use
from tests.ops.cross_entropy_cases import CASES
from tests.ops.linear_cross_entropy_cases import gradients, inputs, torchs

OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"ignore_index": 0}]
REDUCTIONS = ["none", "sum", "mean"]
CHUNKS = (1, 4, None)
VOCAB = 50


def tensor_group(world):
    return Mesh.build(Layout(tp=world)).tp


def shard(t, start, stop):
    """Rows [start, stop) of all, with rows of NaN past the last one."""
    padding = t.new_full((stop - max(start, min(stop, len(t))), *t.shape[1:]), torch.nan)
    return torch.cat([t[start:stop], padding]).requires_grad_()


def run_ours(world, reduction, padded, impl):
    """Of each set of options and chunk: loss, this rank's dx, dweight, dbias."""
    group, found = tensor_group(world), []
    x, weight, bias, y = inputs(9, 7, VOCAB, torch.float64)
    start, stop = split_range(padded, world, group.index)
    for options in OPTIONS:
        for chunk in CHUNKS:
            leaves = x.detach().requires_grad_(), shard(weight, start, stop), shard(bias, start, stop)
            y_ = y.where(y != -100, options.get("ignore_index", -100))
            how = {"reduction": reduction, "scale": 0.5, "chunk_rows": chunk, "vocab_size": VOCAB, **options}
            with use(impl, "linear_cross_entropy"):
                loss = linear_cross_entropy(*leaves[:2], y_, bias=leaves[2], vocab_start=start, group=group, **how)
            found.append(gradients(loss, leaves))
    return found


@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("padded", [VOCAB, 64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("world", [2, 3])
def test_is_the_serial_loss(pool, world, reduction, padded, impl):
    if padded != VOCAB and impl == "reference":
        pytest.skip("it is cross_entropy's, and 0 * NaN of the padding is in F.linear's gradient")
    x, weight, bias, y = inputs(9, 7, VOCAB, torch.float64)
    by_rank = pool.run(run_ours, world, reduction, padded, impl, world=world)
    cases = [options for options in OPTIONS for _ in CHUNKS]
    for options, *ranks in zip(cases, *by_rank, strict=True):
        y_ = y.where(y != -100, options.get("ignore_index", -100))
        loss, dx, dweight, dbias = torchs(x, weight, bias, y_, reduction=reduction, scale=0.5, **options)
        for got, *_ in ranks:
            assert torch.equal(got, ranks[0][0]), "the ranks disagree"
        exact = {"rtol": 1e-12, "atol": 1e-13}
        torch.testing.assert_close(ranks[0][0], loss, **exact)
        torch.testing.assert_close(sum(part for _, part, _, _ in ranks), dx, **exact)
        for which, want in ((2, dweight), (3, dbias)):
            whole = torch.cat([r[which] for r in ranks])
            torch.testing.assert_close(whole[:VOCAB], want, **exact)
            assert not whole[VOCAB:].any(), "padding has a gradient"


def known(world):
    group, found = tensor_group(world), []
    for case in (c for c in CASES if world in c.ranks and torch.isfinite(c.logits).all()):
        columns, start = case.shard(group.index, world)
        rows = len(case.target)
        weight = columns.nan_to_num(5.0).t().contiguous().requires_grad_()
        weights = torch.ones(rows) if case.weights is None else case.weights
        how = {"vocab_size": case.vocab_size, "reduction": "none", "chunk_rows": 2, **case.options}
        x = torch.eye(rows, dtype=weight.dtype)
        loss = linear_cross_entropy(x, weight, case.target, vocab_start=start, group=group, **how)
        (loss * weights).sum().backward()
        found.append((loss.detach(), weight.grad.t()))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_known_values(pool, world):
    """MB-01 to 04 and 11: x is the identity, the logits are weight^T."""
    by_rank = pool.run(known, world, world=world)
    cases = [c for c in CASES if world in c.ranks and torch.isfinite(c.logits).all()]
    for case, *ranks in zip(cases, *by_rank, strict=True):
        for loss, _ in ranks:
            assert torch.equal(loss, ranks[0][0]), f"{case.name}: the ranks disagree"
        case.check(ranks[0][0], torch.cat([gradient for _, gradient in ranks], 1))


def uneven_default(world):
    """The widths of the ranks lie on both sides of 4 MiB: did a rank's own width decide, the chunks would differ."""
    group = tensor_group(world)
    rows, vocab = 256, 8193
    start, stop = split_range(vocab, world, group.index)
    x, weight, _, y = inputs(rows, 2, vocab)
    mine = weight[start:stop].clone().requires_grad_()
    assert world == 2 and (stop - start) * rows * 4 == (4 << 20) + (1024 if group.index == 0 else 0)
    loss = linear_cross_entropy(x, mine, y, vocab_size=vocab, vocab_start=start, group=group)
    loss.backward()
    return loss.detach(), mine.grad


def test_uneven_ranks_take_the_same_chunks(pool):
    x, weight, _, y = inputs(256, 2, 8193)
    want = torchs(x, weight, None, y)
    ranks = pool.run(uneven_default, 2, world=2)
    assert torch.equal(ranks[0][0], ranks[1][0])
    torch.testing.assert_close(ranks[0][0], want[0])
    torch.testing.assert_close(torch.cat([g for _, g in ranks]), want[2], rtol=1e-4, atol=1e-7)


def count_exchanges(world, reduction):
    group = tensor_group(world)
    x, weight, _, y = inputs(9, 7, VOCAB)
    start, stop = split_range(VOCAB, world, group.index)
    x.requires_grad_()
    mine, counts = weight[start:stop].clone().requires_grad_(), []
    how = {"vocab_size": VOCAB, "vocab_start": start, "group": group, "reduction": reduction, "chunk_rows": 4}
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        loss = linear_cross_entropy(x, mine, y, **how).sum()
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        loss.backward(retain_graph=True)
        loss.backward()
    for trace in (forward, backward):
        counts.append(sum(e.count for e in trace.key_averages() if e.key.startswith("gloo:")))
    return counts


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_one_exchange_a_chunk_and_none_in_backward(pool, reduction):
    assert pool.run(count_exchanges, 3, reduction, world=3) == [[3, 0]] * 3


def refused(world, case):
    group = tensor_group(world)
    x, weight, _, y = inputs(9, 7, VOCAB, ignored=False)
    start, stop = split_range(VOCAB, world, group.index)
    mine = weight if case == "gathered" else weight[start:stop]
    y[7] = VOCAB if case == "id" else y[7]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        try:
            linear_cross_entropy(x, mine, y, vocab_size=VOCAB, vocab_start=start, group=group, chunk_rows=2)
            said = ""
        except ValueError as error:
            said = str(error)
    return said, sum(e.count for e in trace.key_averages() if e.key.startswith("gloo:"))


def test_refusals_come_on_every_rank(pool):
    """MB-03 (d), MB-11 (d): a wrong id before any exchange, gathered weights after the first."""
    wanted = "linear_cross_entropy: target[7] is 50; wanted an id in [0, 50) or ignore_index=-100"
    assert pool.run(refused, 2, "id", world=2) == [(wanted, 0)] * 2
    for said, exchanges in pool.run(refused, 2, "gathered", world=2):
        assert said.startswith("linear_cross_entropy: weight is split over the ranks as columns [0, 50) [25, 50)")
        assert "not gathered weight" in said and exchanges == 1


def obeys_torch(world):
    group = tensor_group(world)
    x, weight, bias, y = inputs(6, 7, VOCAB)
    start, stop = split_range(VOCAB, world, group.index)
    leaves = [t.clone().requires_grad_() for t in (x, weight[start:stop], bias[start:stop])]
    how = (y, start, VOCAB, group.name, -100, 0.1, 1e-3, "mean", 0.5, 4, True, True, True, "cpp")
    opcheck(torch.ops.megacore.linear_cross_entropy.default, (*leaves, *how))

    def f(x, weight, bias):
        how = {"vocab_size": VOCAB, "vocab_start": start, "group": group, "label_smoothing": 0.1, "chunk_rows": 4}
        return linear_cross_entropy(x, weight, y, bias=bias, **how)

    runs = (f, torch.compile(f, fullgraph=True, backend="aot_eager"))
    found = [torch.autograd.grad(run(*leaves), leaves) for run in runs]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_opcheck_and_compilation(pool):
    assert pool.run(obeys_torch, 2, world=2, timeout=280) == [True, True]
