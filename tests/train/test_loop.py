"""The loop with a stand-in for the model: what it reads, when, and what evaluation must not touch (MB-20)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megacore.comm.mesh import Mesh
from megacore.train.config import DataSettings, ModelSettings, OptimSettings, RunSettings, Settings
from megacore.train.corpus import Corpus
from megacore.train.failure import StopRequest
from megacore.train.logical import LogicalTensor
from megacore.train.loop import Loop
from megacore.train.step import StepResult
from megacore.train.timers import Timers
from tests.train.numbered import Numbered


class Recorder:
    """In place of TrainStep: writes down what it is given. The loss of a sample is its index."""

    def __init__(self, mesh=None):
        self.mesh, self.optimizer, self.trained, self.evaluated = mesh or Mesh(), SimpleNamespace(steps=0), [], []

    def step(self, microbatches, valid, lr):
        self.trained.append([int(b.ids[i, 0]) for b in microbatches for i in range(len(b.ids))])
        return StepResult(1.0, 1.0, "", {"total": 0.0})

    def evaluate(self, microbatches, valid):
        ids = [int(b.ids[i, 0]) for b in microbatches for i in range(len(b.ids))]
        self.evaluated.append(ids)
        return sum(ids) * 3 / valid

    def probe(self, microbatches):
        return 1.0

    def logical(self):
        return {"model/w": LogicalTensor.whole("w", torch.zeros(1))}

    def loaded(self, steps):
        pass


def run(folder, corpus, **change):
    settings = Settings(
        model=ModelSettings(seq_length=3, vocab_size=100),
        data=DataSettings(global_batch=4, micro_batch=2),
        optim=OptimSettings(warmup_steps=0),
        run=replace(RunSettings(out=str(folder), steps=8, eval_steps=2, tensorboard=False), **change),
    )
    loop = Loop(settings, Recorder(), corpus, torch.device("cpu"), Console(quiet=True))
    loop.resume()
    with StopRequest() as stop:
        outcome = loop.run(stop)
    return loop.trainer, outcome


def test_evaluation_reads_the_same_samples_and_leaves_training_alone(tmp_path):
    corpus = Corpus(Numbered(10), Numbered(9), seed=5)
    with_eval, outcome = run(tmp_path / "a", corpus, eval_every=2)
    without, _ = run(tmp_path / "b", Corpus(Numbered(10), None, seed=5))
    assert with_eval.trained == without.trained and len(with_eval.trained) == 8
    rounds = [with_eval.evaluated[i : i + 2] for i in range(0, len(with_eval.evaluated), 2)]
    assert len(rounds) == 4 and all(r == rounds[0] for r in rounds)  # after steps 2, 4, 6 and 8
    read = [i for batch in rounds[0] for i in batch]
    assert len(set(read)) == 8 and outcome.valid_loss == pytest.approx(sum(read) / 8)


def test_a_resumed_run_reads_on_where_the_first_one_stopped(tmp_path):
    corpus = Corpus(Numbered(10), Numbered(9), seed=5)
    whole, _ = run(tmp_path / "a", corpus)
    first, _ = run(tmp_path / "b", corpus, stop_at=3)
    rest, outcome = run(tmp_path / "b", corpus)
    assert first.trained + rest.trained == whole.trained and (outcome.done, outcome.trained) == (8, 5)


@pytest.mark.parametrize("samples, read", [(3, 3), (4, 4), (5, 4), (7, 4), (9, 8)])
def test_the_validation_samples_do_not_depend_on_the_layout(tmp_path, samples, read):
    """A rest that fills no global batch is left out whatever dp is, unless it is all there is."""
    recorder, _ = run(tmp_path, Corpus(Numbered(4), Numbered(samples)))
    assert sum(map(len, recorder.evaluated)) == read


def test_the_clock_starts_with_training():
    timers = Timers()
    timers.add({"checkpoint": 2.0})  # loaded before training
    timers.started -= 100.0  # as if the start had taken long
    timers.begin()
    split = timers.split()
    assert split["checkpoint"] == 2.0 and split["other"] < 1.0
