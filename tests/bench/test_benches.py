"""Each benchmark runs at its smallest size, verifies itself and gives rows; the rivals compute the same function."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from bench import harness, step
from megacore.models import gpt

QUICK = harness.Options(rivals=("torch-eager",), rounds=2, quick=True)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(harness, "measure_limits", lambda *_, **__: harness.Limits(1e11, 1e10))


@pytest.mark.parametrize(("op", "rows"), [("linear_gelu", 4), ("cross_entropy", 3), ("dropout", 2)])
def test_operator_benches(op, rows, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # minutes, and no rival here
    found = list(import_module(f"bench.{op}").rows(QUICK))
    assert len(found) == rows
    for row in found:
        assert row.bench == op and row.ours_ms > 0 and row.rivals["torch-eager"] > 0 and row.limit_ms > 0


def serial_loss(config, state, ids, targets):
    """One process, the plain model and plain torch."""
    model = gpt.GPT(config)
    model.load_state_dict(state)
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).item()


def test_step_contestants_agree_with_one_process(pool):
    (config, batch), *_ = ((c, b) for c, b, _ in step.QUICK.values())
    names = ("torch-dtensor",)  # megatron-core takes most of a minute to import, and is compared whenever it is timed
    (taken, peak, losses), other = pool.run(step._contest, config, batch, names, 2, world=2)
    assert set(taken) == set(losses) == {"ours", *names} and peak > 0
    assert other[2] == pytest.approx(losses)
    ids, targets = step.tokens(config, batch)
    wanted = serial_loss(config, step.weights(config), ids, targets)
    assert losses == pytest.approx(dict.fromkeys(losses, wanted), rel=1e-6)


def test_a_rival_that_computes_something_else_is_not_timed():
    same = {"ours": torch.tensor([1.0, 2.0]), "torch-dtensor": torch.tensor([1.0, 2.0])}
    step._compare({"ours": 3.0, "torch-dtensor": 3.0}, same)
    with pytest.raises(AssertionError, match="torch-dtensor computes something else"):
        step._compare({"ours": 3.0, "torch-dtensor": 3.001}, same)
    with pytest.raises(AssertionError, match="torch-dtensor computes something else"):
        step._compare({"ours": 3.0, "torch-dtensor": 3.0}, same | {"torch-dtensor": torch.tensor([2.0, 4.0])})
