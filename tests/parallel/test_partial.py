"""Whole parameters among split columns: with their style they are those of one process; without it they are refused by
name. In a plain loop with torch's optimizer, no buffers of ours."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F

from megacore.comm.mesh import Group, Layout, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.drift import WholeGradients
from megacore.parallel.loss import vocab_parallel_cross_entropy
from megacore.parallel.norm import global_norm
from megacore.parallel.partial import Partial, PerHead, Split, Together, Whole
from megacore.parallel.plan import parallelize
from megacore.parallel.record import records
from megacore.parallel.styles import Shares
from tests.parallel import partial_models
from tests.parallel.partial_models import MENDED, VOCAB, build

IDS = (torch.arange(30) * 7 % VOCAB).view(3, 10)
TARGETS = (torch.arange(30) * 11 % VOCAB).view(3, 10)


def train(model, loss_of, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def serial(kind):
    model = build(kind)
    losses, gradients = train(model, lambda m: F.cross_entropy(m(IDS).flatten(0, 1), TARGETS.flatten()))
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def on_ranks(kind, tp, rows=None, steps=3):
    mesh = Mesh.build(Layout(tp=tp))
    torch.distributed.barrier()  # a rank that refuses at once must not leave while the other still connects
    try:
        model = build(kind)
        parallelize(model, mesh, partial_models.plan(MENDED[kind] if rows is None else rows))
        model = copy.deepcopy(model)  # what a style did outlives a copy

        def loss_of(m):
            return vocab_parallel_cross_entropy(m(IDS), TARGETS, vocab_size=VOCAB, group=mesh.tp, reduction="mean")

        losses, gradients = train(model, loss_of, steps)
        recs = records(model, mesh)
        norm = counted_norm(model, recs, mesh, gradients)
    except ValueError as error:
        mesh.destroy()
        return str(error)
    held = []
    for name, param in model.named_parameters():
        for box in recs[name].boxes:
            at = tuple(slice(*r) for r in box.local)
            held.append((name, box, gradients[name][at].clone(), param.detach()[at].clone()))
    mesh.destroy()
    return losses, held, norm


def counted_norm(model, recs, mesh, gradients):
    buffers = GradBuffers(dict(model.named_parameters()), recs, mesh)
    buffers.zero()
    for name, gradient in gradients.items():
        buffers.add(name, gradient)
    buffers.finish()
    WholeGradients(buffers, recs, mesh).check()
    return float(global_norm(buffers, recs, mesh)[0])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", MENDED)
def test_with_its_style_it_is_that_of_one_process(pool, kind, tp):
    losses, gradients, weights = serial(kind)
    answers = pool.run(on_ranks, kind, tp, world=tp)
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    copies = {}
    for answer in answers:
        assert not isinstance(answer, str), answer
        torch.testing.assert_close(answer[0], losses, rtol=1e-12, atol=0)
        assert answer[2] == pytest.approx(float(norm), rel=1e-12)  # each element counted once
        for name, box, gradient, weight in answer[1]:
            at = tuple(slice(*r) for r in box.full)
            torch.testing.assert_close(gradient, gradients[name][at], rtol=1e-11, atol=1e-13, msg=name)
            torch.testing.assert_close(weight, weights[name][at], rtol=1e-11, atol=1e-13, msg=name)
            assert torch.equal(weight, copies.setdefault((name, box.full), weight)), name  # the same bits
    seen = {(name, box.full) for _, held, _ in answers for name, box, _, _ in held if box.first}
    assert {name for name, _ in seen} == set(weights)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("head_norm", "attn.over_[qk].weight is whole on every rank but acts on a rank's own columns"),
        ("full_norm", "attn.q_norm takes its statistics over all 24 columns of q_proj"),
        ("slopes", r"attn.slopes is whole and has one element for each of the 6 heads of attn.*PerHead\('slopes'"),
        ("table", r"attn.table.weight is whole and has one element for each of the 6 heads.*dim=1"),
        ("temperature", r"attn.temperature is whole.*'attn': Partial\('temperature'\)"),
        ("prelu", r"mlp.act.weight is whole .*'mlp.act': Partial\('weight'\)"),
        ("gate", r"mlp.gate is whole .*'mlp': Partial\('gate'\)"),
        ("columns", r"mlp.gate is whole and has one element for each of the 20 columns of mlp.*Split\('gate'"),
        ("router", r"the output of mlp.router is whole and meets .*'mlp.router': CopyTo\(\)"),
        ("layer_norm", "mlp.inner takes its statistics over 20 features and got 10"),
        ("logit_scale", r"logit_scale is whole .* before the loss.*'': Partial\('logit_scale'\)"),
    ],
)
def test_without_it_every_rank_refuses_and_names_it(pool, kind, words):
    answers = pool.run(on_ranks, kind, 2, {}, world=2)
    for answer in answers:
        assert isinstance(answer, str), "trained in silence"
        assert "\n" not in answer
        assert re.search(words, answer), answer
    assert len(set(answers)) == 1


def drifting(kind, steps):
    """A whole parameter that its author vouches for, wrongly."""
    shares = Shares(6, 6, {"heads": ("q", 1)})
    return on_ranks(kind, 2, {"attn": Together(shares, Whole("temperature"))}, steps)


def test_gradients_that_differ_are_found_where_no_look_sees_them(pool):
    for answer in pool.run(drifting, "temperature", 1, world=2):
        assert "attn.temperature is whole on every rank, but its gradient differs" in answer
    for answer in pool.run(drifting, "temperature", 2, world=2):  # a loop without that check: at the next forward
        assert "attn.temperature (1 of 7 replicated parameters) differs" in answer and "Partial() row" in answer


@pytest.mark.parametrize(
    "style, words",
    [
        (Partial("slope"), "'slope' is no parameter of Mlp"),
        (Split("norm.weight"), "LayerNorm needs all columns for its statistics"),
        (Split("gate", dim=1), "no dim=1"),
        (PerHead("gate", heads=7), "dim 0 of size 20 does not divide by its 7 heads"),
    ],
)
def test_a_style_that_does_not_fit_says_so(style, words):
    mesh = Mesh(layout=Layout(tp=2), tp=Group((0, 1), 0))
    with pytest.raises(ValueError, match=words) as caught:
        parallelize(build("columns"), mesh, partial_models.plan({"mlp": style}))
    assert str(caught.value).startswith("plan row 'mlp': ") and "\n" not in str(caught.value)
