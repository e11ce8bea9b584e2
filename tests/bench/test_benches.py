"""Each benchmark runs at its smallest size, verifies itself and gives rows; the rivals compute the same function."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from bench import harness, limits, operators, step, vocab_parallel
from bench.__main__ import BENCHES
from megacore.models import gpt
from megacore.ops.dispatch import SERVED

QUICK = harness.Options(rivals=("torch-eager",), rounds=2, quick=True, only=({"dtype": "fp32"},))


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(limits, "measure", lambda *_, **__: limits.Limits(1e11, 1e10))


@pytest.mark.parametrize("op", [op for op in BENCHES if op not in ("vocab_parallel", "step")])
def test_operator_benches(op):
    if op not in SERVED:
        pytest.skip(f"this build has no {op}")
    module = import_module(f"bench.{op}")
    found = list(module.rows(QUICK))
    cases = [case for case in module.cases(QUICK) if case["dtype"] == "fp32"]
    assert cases and len(found) >= len(cases)
    for row in found:
        assert row.bench == op and row.ours_ms > 0 and row.rivals["torch-eager"] > 0 and row.limit_ms > 0
        assert row.ratio("torch-eager") > 0 and row.extra_bytes is not None and row.rounds == 2


def test_every_bench_has_its_cases_for_a_gpu():
    for op in BENCHES:
        module = import_module(f"bench.{op}")
        if hasattr(module, "cases"):
            for quick in (False, True):
                assert module.cases(harness.Options(device="cuda", quick=quick))


def test_an_operator_that_this_build_lacks_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(import_module("bench.linear"), "ours_named", lambda name: operators.ours_named("no_such_op"))
    assert not list(import_module("bench.linear").rows(QUICK))
    assert capsys.readouterr().err == "- linear: megacore.ops has no no_such_op in this build\n"


def test_vocab_parallel_is_verified_and_counts_one_exchange(pool):
    taken, missing, extra, collectives = pool.run(vocab_parallel._contest, 6, 50, ("gloo",), 2, world=2)[0]
    assert set(taken) == {"ours", "limit"} and len(taken["ours"]) == 2 and not missing
    assert collectives == 1 and extra >= 0


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
