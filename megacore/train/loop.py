"""The training loop: data, step, metrics, evaluation, checkpoints. Every rank runs it; rank 0 alone writes what users
read.

State of a run = weights, optimizer, and two numbers: steps done and samples consumed. Data order, dropout and learning
rate are pure functions of these, so that a resumed run repeats the losses of one that was never stopped, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console

from megacore.comm.mesh import Mesh
from megacore.parallel.batch import MicroBatch
from megacore.train import checkpoint
from megacore.train.agreement import by_first, together
from megacore.train.config import Settings, describe
from megacore.train.corpus import Corpus
from megacore.train.data.order import consumed_after
from megacore.train.failure import StopRequest
from megacore.train.health import Health
from megacore.train.logical import LogicalTensor
from megacore.train.metrics import WINDOW, ProgressLine, Writers, number, read
from megacore.train.optim import MixedAdamW, learning_rate
from megacore.train.resume import changes, data_of, model_of, of_a_run
from megacore.train.timers import Timers


class Step(Protocol):
    """What the loop needs of megacore.train.step.TrainStep."""

    mesh: Mesh
    optimizer: MixedAdamW

    def step(self, microbatches: list[MicroBatch], valid: int, lr: float) -> Any: ...

    def evaluate(self, microbatches: list[MicroBatch], valid: int) -> float: ...

    def probe(self, microbatches: list[MicroBatch]) -> float: ...

    def logical(self) -> dict[str, LogicalTensor]: ...

    def loaded(self, steps: int) -> None: ...


PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}  # paths and messages, not rich's markup


@dataclass
class Outcome:
    """How the loop ended."""

    done: int  # steps of the whole run
    trained: int  # steps of this process
    tokens: int  # of this process
    seconds: float  # spent in these steps
    train_loss: float  # mean of the last WINDOW steps
    valid_loss: float | None
    stopped: bool  # by a signal, before the last step


class Loop:
    """`checkpoint` folder: RUN/checkpoints. Collective: every rank calls the same methods in the same order."""

    def __init__(self, settings: Settings, trainer: Step, corpus: Corpus, device: torch.device, console: Console):
        self.settings, self.trainer, self.corpus = settings.filled(trainer.mesh.world.size), trainer, corpus
        self.device, self.console, self.mesh = device, console, trainer.mesh
        self.out = Path(settings.run.out)
        self.timers = Timers()
        self.done = 0
        self.saved = -1  # the step of the newest checkpoint
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.health = Health(settings.run.max_skipped)
        self.valid: tuple[int, float] | None = None  # the newest evaluation: step, loss

    @property
    def writes(self) -> bool:
        return self.mesh.rank == 0

    # ---- checkpoints

    def resume(self) -> None:
        """Continue from the newest valid checkpoint, if there is one."""
        checkpoint.check_shared(self.out / "checkpoints", self.mesh.files)
        found = checkpoint.find(self.out / "checkpoints", group=self.mesh.files)
        if found is None:
            return
        with self.timers.measure("checkpoint"):
            checkpoint.load(found, self.trainer.logical(), group=self.mesh.files, model=model_of(self.settings))
            self.trainer.loaded(of_a_run(found)["optimizer_steps"])
        left = checkpoint.continue_from(found, group=self.mesh.files)
        self.done = self.saved = found.step
        if self.writes:
            self.console.print(f"resumed from {found.path} at step {found.step}", **PLAIN)
            for line in (*found.skipped, *left):
                self.console.print(f"checkpoint skipped: {line}", **PLAIN)
            for line in changes(found, self.settings):
                self.console.print(line, **PLAIN)

    def save(self) -> bool:
        """Save, unless the weights are good for nothing: such a checkpoint would be the one to go on from, and `keep`
        would delete a good one for it. Returns whether the newest checkpoint is of this step."""
        if self.saved == self.done:
            return True
        if self.health.batch is not None and not math.isfinite(loss := self.trainer.probe(self.health.batch)):
            self._note(f"step {self.done}: not saved: the loss of its weights is {loss}")
            return False
        extra = {
            "model": model_of(self.settings), "data": data_of(self.settings, self.corpus),
            "settings": describe(self.settings),
            "consumed": self.consumed, "optimizer_steps": self.trainer.optimizer.steps,
        }  # fmt: skip
        with self.timers.measure("checkpoint"):
            path = checkpoint.save(
                self.out / "checkpoints", self.done, self.trainer.logical(), extra,
                group=self.mesh.files, replicas=self.mesh.dp_cp, keep=self.settings.run.keep,
            )  # fmt: skip
        self.saved = self.done
        self._note(f"step {self.done}: saved {path}")
        return True

    # ---- training

    @property
    def consumed(self) -> int:
        """Samples consumed so far."""
        return consumed_after(self.done, self.settings.data.global_batch)

    def run(self, stop: StopRequest) -> Outcome:
        """Train up to the last step, or until the ranks agree that one was asked to stop."""
        run, last, first = self.settings.run, self.settings.last_step, self.done
        self.timers.begin()
        self.writers: Writers | None = None
        together(self.mesh.files, "cannot write the metrics", self._open_writers)
        if first:
            self._recall()
        if self.writes and (why := self._unvalidated()):
            self.console.print(f"no validation in this run: {why}", **PLAIN)
        self.line = ProgressLine(self.console, first, last, run.log_every) if self.writes else None
        stopped, spent = False, 0.0
        try:
            if self.line:
                self.line.__enter__()
            while self.done < last:
                stopped = self._agree(stop.asked)
                if stopped:
                    break
                spent += self._one_step()
                if run.eval_every and self.done % run.eval_every == 0 and self.done < last:
                    self.evaluate()
                if run.save_every and self.done % run.save_every == 0:
                    self.save()
            if stopped:
                self._note(f"step {self.done}: asked to stop; saving and leaving")
            else:
                self.evaluate()
            if not self.save():
                raise self.health.diverged(self.done, self.saved, self.out)
        finally:
            if self.line:
                self.line.__exit__(None, None, None)
            if self.writers:
                self.writers.close()
        trained = self.done - first
        tokens = trained * self.settings.data.global_batch * self.settings.model.seq_length
        mean = sum(self.losses) / len(self.losses) if self.losses else math.nan
        return Outcome(self.done, trained, tokens, spent, mean, self.valid[1] if self.valid else None, stopped)

    def _open_writers(self) -> None:
        if self.writes:
            self.writers = Writers(self.out, self.done, self.settings.run.tensorboard)

    def _one_step(self) -> float:
        began, s = time.perf_counter(), self.settings
        with self.timers.measure("data"):
            size, consumed = s.data.global_batch, self.consumed
            batch = self.corpus.batch(consumed, size, **self._rank(s.data.micro_batch), step=self.done)
            valid = self.corpus.counted(consumed, size)
        rate = learning_rate(
            self.done, peak=s.optim.lr, minimum=s.optim.min_lr, warmup=s.optim.warmup_steps, total=s.run.steps
        )
        result = self.trainer.step(batch, valid, rate)
        ended = self.health.saw(batch, result)
        self._account(result.seconds)
        self.done += 1
        self.losses.append(result.loss)
        seconds = time.perf_counter() - began
        if self.writes:
            tokens = size * s.model.seq_length
            values = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": rate}
            extra = {"tokens_per_s": tokens / seconds, "seconds": seconds, "consumed": self.consumed}
            skipped = {"skipped": result.skipped} if result.skipped else {}
            self.writers.write(self.done, {**values, **extra, **skipped})
            self.line.show(self.done, values, seconds, tokens)
            if result.skipped:
                self._note(f"step {self.done}: skipped, {result.skipped}")
        if ended:
            raise self.health.diverged(self.done, self.saved, self.out)
        return seconds

    def _account(self, seconds: Mapping[str, float]) -> None:
        """What a step did not spend waiting for others it spent computing."""
        waits = {part: spent for part, spent in seconds.items() if part != "total"}
        self.timers.add({**waits, "compute": seconds["total"] - sum(waits.values())})

    def _rank(self, micro_batch: int) -> dict[str, Any]:
        return {
            "dp_rank": self.mesh.dp.index, "dp_size": self.mesh.dp.size,
            "micro_batch": micro_batch, "device": self.device,
        }  # fmt: skip

    def _agree(self, asked: bool) -> bool:
        """True on every rank if any rank was asked to stop: a rank that left alone would leave the others waiting."""
        if self.mesh.world.size == 1:
            return asked
        flag = torch.tensor([int(asked)], device=self.device)
        with self.timers.measure("other"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.mesh.world.pg)
        return bool(flag.item())

    # ---- evaluation

    def evaluate(self) -> None:
        """Mean loss over `run.eval_steps` whole global batches of the validation samples, or over all of these where
        they are fewer than one batch: the same ones each time."""
        if self.corpus.valid is None or not self.settings.run.eval_steps or (self.valid and self.valid[0] == self.done):
            return
        with self.timers.measure("evaluation"):
            self.valid = (self.done, self._mean_loss(self.corpus.held_out()))
        if self.writes:
            self.writers.write(self.done, {"valid_loss": self.valid[1]})
        self._note(f"step {self.done}: validation loss {self.valid[1]:.4f}")

    def _unvalidated(self) -> str:
        """Why there will be no validation loss; empty where there will be one."""
        if not self.settings.run.eval_steps:
            return "run.eval_steps = 0"
        where = self.settings.data.dir
        return f"{where} has no valid.idx; prepare with a larger --valid-fraction" if self.corpus.valid is None else ""

    def _mean_loss(self, held_out: Corpus) -> float:
        size, samples = self.settings.data.global_batch, len(held_out.train)
        total, counted, consumed = 0.0, 0, 0
        for _ in range(self.settings.run.eval_steps):
            here = min(size, samples - consumed)
            if here < size and consumed:  # a rule without dp in it: the loss must not depend on the layout
                break
            valid = held_out.counted(consumed, here)
            batch = held_out.batch(consumed, here, **self._rank(self.settings.data.micro_batch), step=self.done)
            total += self.trainer.evaluate(batch, valid) * valid
            counted, consumed = counted + valid, consumed + here
        return total / counted if counted else 0.0

    # ---- what users read

    def _recall(self) -> None:
        """The last losses before the checkpoint, from the metrics file: the mean in the report spans a resume. Every
        rank is told what rank 0 read, for whether there is an evaluation at this step decides whether to evaluate."""

        def recent() -> tuple[list[float], tuple[int, float] | None]:
            rows = read(self.out / "metrics.jsonl")
            losses = [loss for row in rows if (loss := number(row, "loss")) is not None]
            valid = [(row["step"], loss) for row in rows if (loss := number(row, "valid_loss")) is not None]
            return losses[-WINDOW:], valid[-1] if valid else None

        losses, self.valid = by_first(self.mesh.files, "cannot read the metrics", recent)
        self.losses.extend(losses)

    def _note(self, text: str) -> None:
        if self.writes and getattr(self, "line", None):
            self.line.note(text)
