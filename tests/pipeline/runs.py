"""What the workers of the pool run: each function compares this rank with the serial run and returns what differs."""

import random
import weakref

import pytest
import torch
import torch.distributed as dist

from megacore.comm.mesh import Layout, Mesh
from megacore.pipeline import SCHEDULES, Action, Executor, partition, simulate
from tests.pipeline.chain import Stage, adders, layers, loss, microbatches, serial


def pipeline(stages):
    return Mesh.build(Layout(pp=stages))


def stages_of(chain, mesh, chunks=1, sleep=None):
    cuts = partition([1.0] * len(chain), mesh.pp.size * chunks)
    return [Stage(chain, cuts[c * mesh.pp.size + mesh.stage], sleep) for c in range(chunks)]


def executor_of(chain, mesh, schedule, chunks=1, sleep=None):
    return Executor(stages_of(chain, mesh, chunks, sleep), mesh.pp, mesh.pp_up, schedule)


def same(got, want):
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def differences(executor, chain, batches, mesh, objective=loss):
    """One evaluation and one step against serial, bit for bit."""
    want = serial(chain, batches, objective)
    expected = want if mesh.is_last_stage else []
    parameters = [p for stage in executor.chunks for p in stage.module.parameters()]
    for p in parameters:
        p.grad = None
    wrong = []

    def without_graph(outputs, mb):
        assert not torch.is_grad_enabled()
        return objective(outputs, mb)

    evaluated = executor.evaluate(batches, without_graph)
    if not same(evaluated, expected) or any(p.grad is not None for p in parameters):
        wrong.append(f"evaluate: {evaluated} for {expected}")
    losses = executor.step(batches, objective)
    if not same(losses, expected) or any(value.requires_grad for value in losses):
        wrong.append(f"losses: {losses} for {expected}")
    return wrong + [name for stage in executor.chunks for name in stage.difference(chain)]


def sweep(stages, schedules, depths, counts, naps=False):
    """MB-16. One executor serves every number of micro-batches, as training and evaluation do."""
    mesh, wrong, ran = pipeline(stages), [], 0
    for name in schedules:
        for depth in depths:
            if depth < stages:
                with pytest.raises(ValueError, match=f"stages={stages}"):
                    partition([1.0] * depth, stages)
                continue
            for make in (layers, adders):
                chain = make(depth)
                executor = executor_of(chain, mesh, SCHEDULES[name], sleep=random.Random(mesh.rank) if naps else None)
                for m in counts:
                    found = differences(executor, chain, microbatches(m), mesh, components if make is adders else loss)
                    wrong += [f"{name} {make.__name__} depth {depth} m {m}: {text}" for text in found]
                    ran += 1
    return wrong, ran


def components(outputs, mb):
    """Components 0..L-1 of the output are exactly 1, the others 0."""
    x = outputs["hidden"]
    assert set(x.unique().tolist()) <= {0.0, 1.0}, x
    return loss(outputs, mb) + x.sum()


def written(schedule, stages, chunks, m, depth=7):
    """A schedule written by hand, two steps."""
    mesh, chain = pipeline(stages), layers(depth)
    executor = executor_of(chain, mesh, lambda rank, p, m: schedule[rank], chunks)
    return [text for _ in range(2) for text in differences(executor, chain, microbatches(m), mesh)]


def frozen(stages, pattern, schedule="1f1b"):
    """`pattern` says which of 6 layers are frozen."""
    mesh, chain = pipeline(stages), layers(6)
    for layer, still in zip(chain, pattern, strict=True):
        layer.requires_grad_(not still)
    return differences(executor_of(chain, mesh, SCHEDULES[schedule]), chain, microbatches(4), mesh)


def thawed():
    mesh, chain = pipeline(2), layers(4)
    chain[0].requires_grad_(False)
    chain[1].requires_grad_(False)
    executor = executor_of(chain, mesh, SCHEDULES["1f1b"])
    wrong = differences(executor, chain, microbatches(3), mesh)
    for layer in (*chain, *executor.chunks[0].module):
        layer.requires_grad_(True)
    executor.forget()
    return wrong + differences(executor, chain, microbatches(3), mesh)


class Passing(Stage):
    """Hands on, beside the layers' own: a tensor that needs a gradient and that no later stage uses, one that is a
    strided view, and an empty one. (It arrives contiguous; the sum of a strided tensor has another order.)"""

    def forward(self, tensors, mb):
        tensors = dict(tensors)
        tensors.pop("unused", None)
        turned, _ = tensors.pop("turned", None), tensors.pop("empty", None)
        out = super().forward(tensors, mb)
        name = "hidden" if "hidden" in out else "logits"
        x = out[name] if turned is None else out[name] + turned.contiguous().sum()
        extra = {"unused": x * 3, "turned": x.transpose(0, 1)[..., ::2], "empty": x[:0]} if name == "hidden" else {}
        return {**out, name: x, **extra}


def passing(schedule):
    """Against the same stages called one after another, where an unused tensor simply ends."""
    mesh, chain, batches = pipeline(3), layers(6), microbatches(3)
    cuts = partition([1.0] * 6, 3)
    whole = [Passing(chain, cut) for cut in cuts]
    want = serial(whole, batches)
    stage = Passing(chain, cuts[mesh.stage])
    got = Executor([stage], mesh.pp, mesh.pp_up, lambda rank, p, m: schedule[rank]).step(batches, loss)
    assert same(got, want if mesh.is_last_stage else [])
    pairs = zip(stage.module.named_parameters(), whole[mesh.stage].module.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(p.grad, q.grad)]


def chunked_gpipe(chunks):
    """Every micro-batch through chunk after chunk, and back."""

    def schedule(rank, p, m):
        forward = [Action("F", c, i) for c in range(chunks) for i in range(m)]
        return forward + [Action("B", c, i) for c in reversed(range(chunks)) for i in range(m)]

    return schedule


class Watched(Stage):
    """Counts how many of the received inputs are still alive."""

    def forward(self, tensors, mb):
        self.seen = [*getattr(self, "seen", []), *(weakref.ref(t) for n, t in tensors.items() if n == "hidden")]
        self.peak = max(getattr(self, "peak", 0), sum(ref() is not None for ref in self.seen))
        return super().forward(tensors, mb)


def live(schedule, stages, m):
    """(inputs alive at once, what the simulator says, alive after the step)."""
    mesh, chain = pipeline(stages), layers(stages)
    stage = Watched(chain, range(mesh.stage, mesh.stage + 1))
    executor = Executor([stage], mesh.pp, mesh.pp_up, SCHEDULES[schedule])
    executor.step(microbatches(m), loss)
    report = simulate([SCHEDULES[schedule](r, stages, m) for r in range(stages)])
    return stage.peak, report.peak_live[mesh.stage], sum(ref() is not None for ref in stage.seen)


def waits(seconds):
    """Rank 1 waits for a slow rank 0, and says so."""
    mesh, chain = pipeline(2), layers(2)
    executor = executor_of(chain, mesh, SCHEDULES["gpipe"])
    if mesh.rank == 0:
        executor.chunks[0].sleep = Constant(seconds)
    dist.barrier()
    executor.evaluate(microbatches(1), loss)
    return executor.wait_seconds


class Constant:
    def __init__(self, seconds):
        self.seconds = seconds

    def uniform(self, low, high):
        return self.seconds
