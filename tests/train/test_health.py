"""A run that diverges ends, says so, and keeps what was good."""

import math
import random

import pytest
import torch
from rich.console import Console

from megacore.train import checkpoint
from megacore.train.config import DataSettings, ModelSettings, OptimSettings, RunSettings, Settings
from megacore.train.corpus import Corpus
from megacore.train.data.prepare import prepare
from megacore.train.failure import StopRequest
from megacore.train.health import DivergedError, Health, all_finite
from megacore.train.loop import Loop
from megacore.train.metrics import read
from megacore.train.step import StepResult
from tests.train.jobs import JobServer
from tests.train.numbered import Numbered
from tests.train.test_job import TOML
from tests.train.test_loop import Recorder

BAD = StepResult(math.inf, math.inf, "gradients are not finite", {"total": 0.0})


class Scripted(Recorder):
    """Gives no finite numbers in the steps (from 0) of `bad`."""

    def __init__(self, bad, weights=None, stop=None):
        super().__init__()
        self.bad, self.number, self.weights, self.stop = set(bad), 0, weights or {}, stop

    def step(self, microbatches, valid, lr):
        at, self.number = self.number, self.number + 1
        if self.stop is not None and at == self.stop[1]:
            self.stop[0].asked = True
        good = super().step(microbatches, valid, lr)
        return BAD if at in self.bad else good

    def logical(self):
        found = super().logical()
        found["model/w"].local.fill_(self.weights.get(self.number, float(self.number)))
        return found


def run(folder, bad, valid=None, first=0, weights=None, stop_in=None, **change):
    settings = Settings(
        model=ModelSettings(seq_length=3, vocab_size=100),
        data=DataSettings(global_batch=2, micro_batch=2),
        optim=OptimSettings(warmup_steps=0),
        run=RunSettings(out=str(folder), **({"steps": 20, "save_every": 5, "tensorboard": False} | change)),
    )
    with StopRequest() as stop:
        trainer = Scripted(bad, weights, None if stop_in is None else (stop, stop_in))
        loop = Loop(settings, trainer, Corpus(Numbered(50), valid), torch.device("cpu"), Console(quiet=True))
        loop.resume()
        trainer.number = loop.done
        return loop.run(stop)


def names(folder):
    return sorted(p.name.removeprefix("step-000000") for p in (folder / "checkpoints").iterdir())


def test_skipped_steps_in_a_row_end_the_run(tmp_path):
    with pytest.raises(DivergedError) as error:
        run(tmp_path, range(12, 99), steps=100, max_skipped=4)
    text = str(error.value)
    assert "the last 4 steps, 13 to 16, gave no finite numbers (gradients are not finite)" in text
    assert "the newest good checkpoint is step 10" in text and "optim.lr" in text and "\n" not in text
    assert names(tmp_path) == ["05", "10"]  # nothing at 15
    assert len([r for r in read(tmp_path / "metrics.jsonl") if "loss" in r]) == 16


def test_a_few_skipped_steps_end_nothing(tmp_path):
    assert run(tmp_path, [3, 4, 6, 7, 8, 12, 13], max_skipped=4).done == 20
    assert names(tmp_path) == ["15", "20"]
    assert checkpoint.find(tmp_path / "checkpoints").step == 20


def test_a_run_that_ends_among_skipped_steps_has_not_succeeded(tmp_path):
    with pytest.raises(DivergedError, match=r"the last 3 steps, 18 to 20, .*the newest good checkpoint is step 15"):
        run(tmp_path, [17, 18, 19])
    assert names(tmp_path) == ["10", "15"]


def test_asked_to_stop_among_skipped_steps_saves_nothing(tmp_path):
    with pytest.raises(DivergedError, match="newest good checkpoint is step 10"):
        run(tmp_path, [12, 13, 14], stop_in=13)
    assert names(tmp_path) == ["05", "10"]


@pytest.mark.parametrize("keep", [1, 2])
def test_what_the_last_update_ruined_takes_no_good_ones_place(tmp_path, keep):
    """Step 10 is saved after a fine step; its weights turn out to be ruined in the next."""
    with pytest.raises(DivergedError, match="the newest good checkpoint is step 5"):
        run(tmp_path, range(10, 99), keep=keep, max_skipped=3)
    assert names(tmp_path) == ["05", "10.skipped"]


def test_the_checkpoint_that_a_start_came_from_stays(tmp_path):
    run(tmp_path, [], stop_at=10)
    for _ in range(2):  # again and again
        with pytest.raises(DivergedError, match="the newest good checkpoint is step 10"):
            run(tmp_path, range(10, 99), max_skipped=3)
        assert names(tmp_path) == ["05", "10"]
    assert run(tmp_path, []).done == 20


def test_nothing_good_was_saved(tmp_path):
    with pytest.raises(DivergedError, match="no good checkpoint was saved"):
        run(tmp_path, range(99), max_skipped=3)
    assert names(tmp_path) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    with pytest.raises(DivergedError, match="step 20 gave no finite numbers .weights or moments are not finite"):
        run(tmp_path, [], weights={20: value})
    assert names(tmp_path) == ["10", "15"]


def test_keep_1_leaves_one_as_soon_as_it_is_proven(tmp_path):
    run(tmp_path, [], keep=1, stop_at=13)
    assert names(tmp_path) == ["10", "13"]  # no step and no evaluation has seen the weights of step 13
    run(tmp_path, [], keep=1, stop_at=14, save_every=0)
    run(tmp_path / "b", [], keep=1, valid=Numbered(9))
    assert names(tmp_path / "b") == ["20"]


def test_counting():
    health = Health(2)
    health.saw(0, 1.0, 1.0)
    assert (health.bad, health.proven) == (0, 0)
    health.saw(1, 0.0, 0.0, why="no valid token in the global batch")  # proves nothing, and is nothing bad
    assert (health.bad, health.proven) == (0, 0)
    health.saw(2, math.nan, 1.0)
    health.saw(3, 1.0, math.inf, why="gradients are not finite")
    assert health.over and health.proven == 0
    health.saw(4, 1.0, 1.0)
    assert not health.over and health.proven == 4


def finite_on(place):
    from megacore.comm.mesh import Layout, Mesh

    mesh = Mesh.build(Layout(dp=2))
    held = [torch.zeros(0), torch.ones(3, 2), torch.arange(4), torch.ones(2, dtype=torch.bfloat16)]
    if mesh.rank == 1 and place:
        held[1][2, 1] = place
    return all_finite(held, mesh.world, torch.device("cpu"))


@pytest.mark.parametrize("place", [0.0, math.nan, -math.inf])
def test_one_ranks_infinity_is_seen_by_all(pool, place):
    assert pool.run(finite_on, place, world=2) == [place == 0.0] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_good_run_survives_an_absurd_rate(tmp_path, precision):
    """A good run to 4, then optim.lr=1e20 to 8; the whole job, two ranks."""
    draw = random.Random(0)
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(" ".join(draw.choice(["alpha", "beta"]) for _ in range(60)))
    prepare([tmp_path], tmp_path / "data", vocab_size=280, valid_fraction=0.2)
    config = tmp_path / "run.toml"
    config.write_text(TOML.format(data=tmp_path / "data", out=tmp_path / "run"))
    jobs = JobServer(tmp_path)
    try:
        common = ["train", str(config), "--parallel.tp=2", "--run.save-every=1", f"--run.precision={precision}"]
        good = jobs.run(2, *common, "--run.stop-at=4")
        assert good.codes == [0, 0], good.output
        bad = jobs.run(2, *common, "--optim.lr=1e20", "--run.max-skipped=3")
        assert all(code not in (0, -9) for code in bad.codes) and "the run diverged" in bad.said[0], bad.output
        assert "Traceback" not in bad.output and "newest good checkpoint is step 4" in bad.said[0], bad.output
        again = jobs.run(2, *common)
        assert again.codes == [0, 0] and "at step 4" in again.said[0] and "step 8/8" in again.said[0], again.output
    finally:
        jobs.close()
