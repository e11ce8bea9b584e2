"""Faults of one rank, planted in a job before it starts: `install(name, rank)` in each process of the job."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

STEP = 3  # the step in which a fault strikes, from 0


def install(name: str, rank: int) -> None:
    if name:
        FAULTS[name](rank)


def _in_batch(victim: int, act, step: int = STEP):
    """`act(batch)` on one rank when it fetches the micro-batches of a training step."""

    def plant(rank: int) -> None:
        from megacore.train.corpus import Corpus

        plain = Corpus.batch

        def batch(self, consumed, size, **options):
            found = plain(self, consumed, size, **options)
            if rank == victim and self.valid is not None and options["step"] == step:
                return act(found)
            return found

        Corpus.batch = batch

    return plant


def _sample_7(_):
    raise ValueError("sample 7")


def _end(_):
    raise StopIteration("no more samples")


def _die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def _ask_to_stop(found):
    os.kill(os.getpid(), signal.SIGTERM)
    return found


def _bad_id(found):
    found[0].ids[0, 0] = 10**6
    return found


def _cannot_write(rank: int) -> None:
    from megacore.train import commit

    def begin(directory, step):
        raise PermissionError(13, "Permission denied", str(directory))

    if rank == 0:
        commit.begin = begin


def _sees_no_checkpoint(rank: int) -> None:
    from megacore.train import checkpoint

    def read_metadata(path):
        raise FileNotFoundError(2, "No such file or directory", str(path / "metadata.json"))

    if rank == 3:
        checkpoint.read_metadata = read_metadata


def _broken_loss(rank: int) -> None:
    from megacore.train.step import TrainStep

    plain, calls = TrainStep._loss, [0]

    def loss(self, *arguments, **named):
        calls[0] += 1
        healthy = plain(self, *arguments, **named)

        def broken(outputs, batch):  # called on the last stage only
            raise ZeroDivisionError("the loss function broke")

        return broken if calls[0] > STEP else healthy

    TrainStep._loss = loss


def _stuck_peer(rank: int) -> None:
    """Rank 1 fails while rank 2 computes without end and meets no collective: only the watcher can stop it."""

    def hang(found):
        while True:
            torch.ones(10).sum()

    _in_batch(1, _sample_7)(rank)
    _in_batch(2, hang)(rank)


def _stop(_):
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(_):
    while True:
        time.sleep(0.01)


def _words(_):
    raise RuntimeError("the feature store's socket timed out (gloo, nccl): Connection reset by peer")


class _Unprintable(ValueError):
    def __str__(self):
        raise KeyError("no text")


def _raise_unprintable(_):
    raise _Unprintable


def _thread(found):
    def prefetch():
        raise OSError("the reader's disk has gone")

    threading.Thread(target=prefetch, name="prefetch").start()
    return found


def _differs(victim: int, *options: str):
    """One rank is started with other options than the rest."""

    def plant(rank: int) -> None:
        from megacore import cli

        plain = cli._parse_train
        if rank == victim:
            cli._parse_train = lambda argv: plain([*argv, *options])

    return plant


def _given(victim: int, change):
    """One rank is started with other settings or data: `change(settings, corpus, fresh)` on what it has read."""

    def plant(rank: int) -> None:
        from megacore.train import job

        plain_check, plain_facts = job.check_files, job.facts

        def check_files(settings, fresh):
            settings, corpus = plain_check(settings, fresh)
            return (change["settings"](settings), corpus) if "settings" in change else (settings, corpus)

        def facts(settings, corpus, device, fresh):
            return {**plain_facts(settings, corpus, device, fresh), **change.get("facts", {})}

        if rank == victim:
            job.check_files, job.facts = check_files, facts

    return plant


def _slow_report(rank: int) -> None:
    from megacore.train import job

    job._add_sample = lambda *_: time.sleep(8)


def _slow_save(rank: int) -> None:
    from megacore.train import commit

    plain = commit.commit

    def slow(*arguments):
        time.sleep(6)
        return plain(*arguments)

    if rank == 0:
        commit.commit = slow


def _set(section: str, **values):
    from dataclasses import replace

    return lambda settings: replace(settings, **{section: replace(getattr(settings, section), **values)})


FAULTS = {
    "other rate": _given(1, {"settings": _set("optim", lr=0.5)}),
    "other layout": _given(3, {"settings": _set("parallel", tp=1, dp=4)}),
    "other tokens": _given(2, {"facts": {"data.dir train.bin": "80 bytes, 00"}}),
    "other flag": _given(2, {"facts": {"--fresh": True}}),
    "dataset raises": _in_batch(1, _sample_7),
    "iterator ends early": _in_batch(2, _end),
    "folder cannot be written": _cannot_write,
    "checkpoint not seen": _sees_no_checkpoint,
    "loss raises": _broken_loss,
    "bad id": _in_batch(0, _bad_id),
    "killed": _in_batch(1, _die, step=5),
    "asked to stop": _in_batch(2, _ask_to_stop, step=5),
    "stuck peer": _stuck_peer,
    "stopped": _in_batch(1, _stop, step=5),
    "hung": _in_batch(2, _hang, step=5),
    "words": _in_batch(1, _words),
    "unprintable": _in_batch(1, _raise_unprintable),
    "thread": _in_batch(1, _thread, step=2),
    "wrong layout": _differs(1, "--parallel.tp=3"),
    "slow report": _slow_report,
    "slow save": _slow_save,
}
