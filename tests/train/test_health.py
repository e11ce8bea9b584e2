"""A diverged run keeps what it had: it ends with a code that is not 0, saves no ruin and deletes no good checkpoint."""

import math

import pytest

from megacore.train.health import Health
from megacore.train.step import StepResult
from tests.train.test_job import config, data, jobs, losses, options  # noqa: F401  fixtures


def result(norm=1.0, skipped=""):
    return StepResult(1.0, norm, skipped, {})


def test_only_steps_in_a_row_without_finite_gradients_count():
    health, bad = Health(3), result(math.nan, "gradients are not finite")
    assert [health.saw([], r) for r in (bad, bad, result(), bad, bad, bad)] == [False] * 5 + [True]
    health = Health(1)
    assert not health.saw([], result(0.0, "no valid token in the global batch"))
    health = Health(0)
    assert not any(health.saw([], bad) for _ in range(100))


@pytest.mark.parametrize("save_every", ["1", "2", "0"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_good_run_goes_on_after_a_rate_that_ruined_it(jobs, config, tmp_path, precision, save_every):  # noqa: F811
    layout = options(("tp=2",), precision=precision, save_every=save_every)
    first = jobs.run(2, "train", config, *layout, "--run.stop-at=4")
    assert first.codes == [0] * 2, first.output
    good = losses(tmp_path / "run")
    ruined = jobs.run(2, "train", config, *layout, "--run.steps=20", "--optim.lr=1e20")
    assert ruined.codes == [1] * 2 and "the run has diverged" in ruined.said[0], ruined.output
    assert "Traceback" not in ruined.output and not ruined.said[1], ruined.output
    folder = tmp_path / "run/checkpoints"
    assert "step-00000004" in [p.name for p in folder.iterdir()], "the last good checkpoint"
    assert max(p.name for p in folder.iterdir()) == "step-00000004", "a ruin was saved"
    again = jobs.run(2, "train", config, *layout, "--run.steps=8")
    assert again.codes == [0] * 2 and "at step 4" in again.said[0], again.output
    after = losses(tmp_path / "run")
    assert {s: after[s] for s in good} == good and all(math.isfinite(x) and x < 10 for x in after.values())


def test_a_limit_ends_it_early(jobs, config, tmp_path):  # noqa: F811
    ended = jobs.run(1, "train", config, "--nproc=1", "--run.steps=50", "--optim.lr=1e20", "--run.max-skipped=3")
    assert ended.codes == [1] and "the last 3 steps had no finite gradients" in ended.output, ended.output
    assert len(losses(tmp_path / "run")) < 10 and "there is no checkpoint" in ended.output
