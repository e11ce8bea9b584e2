"""The training step at several layouts: MB-02 (b), MB-05, MB-07, MB-11 (a, b), and exact resume in memory."""

import math

import pytest
import torch
import torch.nn.functional as F

from megacore.comm.mesh import Layout, Mesh
from megacore.models import gpt
from megacore.parallel.batch import IGNORE
from megacore.parallel.materialize import materialize
from megacore.train import checkpoint
from megacore.train.config import OptimSettings
from megacore.train.step import TrainStep
from tests.toy import TOY, batch, formula, rows

OPTIM = OptimSettings(lr=1e-2, clip=1.0, weight_decay=0.1)
MASKS = ((0, 7), (1, 1), (2, 2), (3, 5))  # valid tokens of the four micro-batches of MB-05


def build(config, sizes, precision="fp64", init=None):
    mesh = Mesh.build(Layout(**sizes))
    plan = gpt.plan(config, sizes.get("multiple", 1))
    return TrainStep(
        lambda: gpt.GPT(config),
        plan,
        mesh,
        precision=precision,
        optim=OPTIM,
        init=init or formula(config),
        bucket_bytes=4096,
    )


def share(whole, mesh):
    """Contiguous samples of this data-parallel rank, one a micro-batch."""
    n = whole.ids.shape[0] // mesh.dp.size
    return [rows(whole, mesh.dp.index * n + i, mesh.dp.index * n + i + 1, i) for i in range(n)]


def gradients_of(config, sizes, masked):
    step = build(config, sizes)
    whole, seen = batch(4, config, masked=masked), {}

    def keep(buffers):
        for name, rec in step.recs.items():
            full = torch.zeros(rec.shape, dtype=torch.float64)
            rec.add_into_full(buffers.grad(name), full, rec.counted() if step.mesh.dp_cp.index == 0 else ())
            seen[rec.canonical] = full + seen.get(rec.canonical, 0)

    before = {n: p.detach().clone() for n, p in step.params.items()}
    result = step.step(share(whole, step.mesh), whole.valid, OPTIM.lr, keep)
    moved = any(not torch.equal(before[n], p) for n, p in step.params.items())
    step.mesh.destroy()
    return result.loss, result.grad_norm, seen, moved, result.skipped


def serial(config, masked):
    with torch.device("meta"):
        model = gpt.GPT(config)
    materialize(model, Mesh(), formula(config), seed=0, dtype=torch.float64)
    whole = batch(4, config, masked=masked)
    total = F.cross_entropy(
        model(whole.ids).flatten(0, 1), whole.targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = total / max(whole.valid, 1)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "sizes", [dict(), dict(dp=2), dict(pp=2), dict(tp=2), dict(dp=2, pp=2), dict(dp=2, tp=2), dict(dp=4)]
)
@pytest.mark.parametrize("masked", [MASKS, ((0, 8), (1, 8), (2, 8), (3, 0))], ids=["MB-05", "MB-02b"])
def test_the_mean_is_over_tokens(pool, sizes, masked):
    loss, grads = serial(TOY, masked)
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    answers = pool.run(gradients_of, TOY, sizes, masked, world=Layout(**sizes).world)
    for got_loss, got_norm, _, moved, _ in answers:
        assert abs(got_loss - loss) < 1e-13 and abs(got_norm - norm) < 1e-12 and moved
    for name, g in grads.items():
        got = sum(seen[name] for _, _, seen, _, _ in answers if name in seen)
        torch.testing.assert_close(got, g, rtol=1e-11, atol=1e-14, msg=name)


@pytest.mark.parametrize("sizes", [dict(dp=2), dict(tp=2, pp=2)])
def test_nothing_to_learn_from_changes_nothing(pool, sizes):
    masked = tuple((i, 0) for i in range(4))
    for loss, norm, _, moved, skipped in pool.run(gradients_of, TOY, sizes, masked, world=Layout(**sizes).world):
        assert loss == 0.0 and norm == 0.0 and not moved and "no valid token" in skipped


VOCAB50 = gpt.GPTConfig(layers=2, hidden=16, heads=4, ffn=32, vocab_size=50, seq_length=8, tied=False)


def uniform_loss(tp, multiple):
    base = formula(VOCAB50)

    def init(name, full, generator):
        base(name, full, generator)
        if name.startswith("head"):
            full.zero_()

    step = build(VOCAB50, dict(tp=tp), init=init) if multiple == 1 else None
    if step is None:
        mesh = Mesh.build(Layout(tp=tp))
        step = TrainStep(
            lambda: gpt.GPT(VOCAB50), gpt.plan(VOCAB50, multiple), mesh, precision="fp64", optim=OPTIM, init=init
        )
    whole = batch(2, VOCAB50)
    loss = step.evaluate([whole], whole.valid)
    step.mesh.destroy()
    return loss


@pytest.mark.parametrize("tp, multiple", [(1, 1), (2, 1), (4, 1), (2, 8), (4, 8), (4, 16)])
def test_padding_never_takes_probability(pool, tp, multiple):
    for loss in pool.run(uniform_loss, tp, multiple, world=tp):
        assert abs(loss - math.log(50)) < 1e-12  # 3.912023, not ln 52, 56 or 64


def losses(config, sizes, first, last, directory=None, save_at=None, precision="fp64"):
    """Losses of the steps first..last; resumed from `directory` unless first is 0."""
    mesh = Mesh.build(Layout(**{k: v for k, v in sizes.items() if k != "multiple"}))
    plan = gpt.plan(config, sizes.get("multiple", 1))
    step = TrainStep(
        lambda: gpt.GPT(config), plan, mesh, precision=precision, optim=OPTIM, init=formula(config), seed=3
    )
    if first:
        found = checkpoint.find(directory, group=mesh.world)
        checkpoint.load(found, step.logical(), group=mesh.world)
        step.loaded(found.extra["steps"])
    seen = []
    for number in range(first, last):
        whole = batch(4, config, step=number, masked=MASKS)
        seen.append(step.step(share(whole, mesh), whole.valid, OPTIM.lr).loss)
        if number + 1 == save_at:
            extra = {"steps": step.optimizer.steps}
            checkpoint.save(directory, save_at, step.logical(), extra, group=mesh.world, replicas=mesh.dp_cp)
    mesh.destroy()
    return seen


def test_a_vocabulary_that_does_not_divide_survives_a_change_of_tp(pool, tmp_path):
    tied = gpt.GPTConfig(layers=2, hidden=16, heads=4, ffn=32, vocab_size=50, seq_length=8)
    want = pool.run(losses, tied, dict(), 0, 6, world=1)[0]
    for sizes in (dict(tp=2), dict(tp=4), dict(tp=4, multiple=8)):
        for got in pool.run(losses, tied, sizes, 0, 6, world=sizes["tp"]):
            assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-12
    pool.run(losses, tied, dict(tp=4, multiple=8), 0, 3, str(tmp_path), 3, world=4)
    stored = checkpoint.find(tmp_path).shapes
    assert stored["model/embed.tok.weight"] == (50, 16) and "model/head.weight" not in stored  # true rows, once
    for got in pool.run(losses, tied, dict(tp=2), 3, 6, str(tmp_path), world=2):
        assert max(abs(a - b) for a, b in zip(got, want[3:], strict=True)) < 1e-12


DROPPED = gpt.GPTConfig(layers=4, hidden=16, heads=4, ffn=32, vocab_size=48, seq_length=8, dropout=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_losses_are_the_same_bits(pool, tmp_path, precision):
    sizes = dict(tp=2, pp=2)
    whole = pool.run(losses, DROPPED, sizes, 0, 6, str(tmp_path), 3, precision, world=4)
    again = pool.run(losses, DROPPED, sizes, 3, 6, str(tmp_path), None, precision, world=4)
    assert [run[3:] for run in whole] == again and len(set(map(tuple, whole))) == 1


def test_resumed_in_another_layout_losses_agree(pool, tmp_path):
    want = pool.run(losses, DROPPED, dict(tp=2, pp=2, dp=2), 0, 6, str(tmp_path), 3, "fp32", world=8)[0]
    for sizes in (dict(), dict(tp=4, dp=2), dict(pp=4), dict(dp=4), dict(tp=3, pp=2)):
        for got in pool.run(losses, DROPPED, sizes, 3, 6, str(tmp_path), None, "fp32", world=Layout(**sizes).world):
            assert max(abs(a - b) / b for a, b in zip(got, want[3:], strict=True)) < 1e-6, sizes


def _wrong_count(sizes, told):
    """MB-43: (what each way of telling the number said, whether anything moved, the loss of a right step)."""
    step = build(TOY, sizes)
    whole = batch(4, TOY, masked=())
    mine, before = share(whole, step.mesh), {n: p.detach().clone() for n, p in step.params.items()}
    said = []
    for call in (lambda v: step.step(mine, v, OPTIM.lr), lambda v: step.evaluate(mine, v)):
        try:
            call(told(whole.valid, step.mesh.rank))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    moved = any(not torch.equal(before[n], p) for n, p in step.params.items())
    counted, evaluated = step.step(mine, None, OPTIM.lr).loss, step.evaluate(mine, None)
    step.mesh.destroy()
    return said, moved, counted, evaluated


def _twice(valid, rank):
    return 2 * valid


def _one_rank(valid, rank):
    return valid + (rank == 1)


def _cancelling(valid, rank):
    return valid + {0: 1, 1: -1}.get(rank, 0)


@pytest.mark.parametrize("told", [_twice, _one_rank, _cancelling], ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=str)
def test_a_wrong_number_of_targets_is_refused_on_every_rank_before_anything_moves(pool, sizes, told):
    for said, moved, counted, evaluated in pool.run(_wrong_count, sizes, told, world=2):
        assert not moved and len(said) == 2
        for line in said:
            assert "valid=" in line and "counted targets" in line and "\n" not in line
        assert math.isfinite(counted) and math.isfinite(evaluated)


@pytest.mark.parametrize("valid", [-5, 1.5, True, float("nan")])
def test_a_number_of_targets_that_is_none_is_refused(valid):
    step, whole = build(TOY, {}), batch(4, TOY, masked=())
    with pytest.raises(ValueError, match="valid="):
        step.step(share(whole, step.mesh), valid, OPTIM.lr)


def test_the_step_counts_by_itself():
    whole = batch(4, TOY)
    losses = [build(TOY, {}).step(share(whole, Mesh()), told, OPTIM.lr).loss for told in (None, whole.valid)]
    assert losses[0] == losses[1]
