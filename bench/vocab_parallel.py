"""cross_entropy of logits split over two gloo ranks, against Megatron-Core's vocab_parallel_cross_entropy.
logits [R, V/2] on each rank, target [R] -> [R]

Both write over the logits (Megatron's in forward, ours in backward, as asked), so each run gets new ones, untimed.
A round's time is that of its slower rank. Limit: three passes over a rank's share at the speed of the fastest sweep,
which both run at once in each round; the exchange is not in it. Collectives are counted by the names that the backend
gives the profiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench import harness, limits, memory, operators
from bench.harness import Missing, Options, Timed
from bench.operators import Judge
from bench.peers import megatron
from bench.report import Row, row
from megacore.comm.mesh import Layout, Mesh
from megacore.comm.workers import WorkerPool

TP = 2


def rows(options: Options) -> Iterator[Row]:
    count, vocab = (16, 1000) if options.quick else (1024, 50304)
    case = {"dtype": "fp32", "shape": f"{count}x{vocab}", "dir": "fwd+bwd", "threads": 1, "inplace": True, "tp": TP}
    if options.device != "cpu" or options.impl or not options.wants("vocab_parallel", case):
        return
    with WorkerPool(TP) as pool:
        answers = pool.run(_contest, count, vocab, options.rivals, options.rounds, timeout=900)
    (taken, missing, extra, collectives), *_ = answers
    for name, why in missing.items():
        operators.say_once(f"- vocab_parallel: {name}: {why}")
    slower = {name: [max(each) for each in zip(*(a[0][name] for a in answers), strict=True)] for name in taken}
    share = 4 * count * vocab // TP
    more = {"extra_bytes": extra, "extra_of": share, "collectives": collectives}
    yield row("vocab_parallel", case, Timed(slower, missing), **more)


def _shard(count: int, vocab: int, rank: int) -> tuple[tuple[Tensor, Tensor], Tensor, list[Tensor], list[Tensor]]:
    """((this rank's logits, target), dy, plain torch's loss and gradient of this shard, the same in fp64)"""
    torch.manual_seed(0)
    logits, target, dy = torch.randn(count, vocab), torch.randint(vocab, (count,)), 0.5 + torch.rand(count)
    width = vocab // TP
    columns = slice(rank * width, (rank + 1) * width)
    found = []
    for dtype in (torch.float32, torch.float64):
        full = logits.to(dtype).requires_grad_()
        loss = F.cross_entropy(full, target, reduction="none")
        (gradient,) = torch.autograd.grad(loss, [full], dy.to(dtype))
        found.append([loss.detach(), gradient[:, columns].clone()])
    return (logits[:, columns].clone().requires_grad_(), target), dy, *found


def _contest(count: int, vocab: int, rivals: tuple[str, ...], rounds: int) -> tuple[dict, dict, int, int]:
    """On each rank: (seconds of each contestant and of the limit in each round, why rivals are missing, extra bytes of
    ours, collectives of ours)."""
    rank = dist.get_rank()
    mesh = Mesh.build(Layout(tp=TP))
    inputs, dy, torchs, exact = _shard(count, vocab, rank)
    mine, start = operators.ours_named("cross_entropy"), rank * (vocab // TP)

    def ours(logits, target):
        return mine(
            logits, target, vocab_size=vocab, vocab_start=start, group=mesh.tp, reduction="none", inplace_backward=True
        )

    made, missing = {"ours": ours}, {}
    if "megatron-core" in rivals:
        try:
            made["megatron-core"] = megatron.vocab_parallel_loss(TP)
        except Missing as reason:
            missing["megatron-core"] = str(reason)
    judge = Judge("vocab_parallel", inputs, dy, torchs, exact)
    for name, f in made.items():
        judge.check(name, f, 2.0 if name == "ours" else operators.RIVAL_FACTOR)
    own = {name: operators.copies(inputs) for name in made}
    flush = harness.cache_flush()

    def between(name: str) -> None:
        if name in own:
            own[name][0].data.copy_(inputs[0].data)
        flush()
        dist.barrier()

    def run(name: str) -> list[Tensor]:
        return operators.outcome(made[name], own[name], dy)

    dist.barrier()
    sweep = limits.best(list(limits.sweeps(inputs[0].nbytes, "cpu")), "cpu")  # while the other rank sweeps, too
    started = {name: lambda name=name: run(name) for name in made} | {"limit": sweep.run}
    taken = harness.interleave(started, rounds, between)
    taken["limit"] = limits.Limit(0.0, 3.0 * inputs[0].nbytes, sweep).seconds(taken["limit"])
    between("ours")
    collectives = count_collectives(lambda: run("ours"))
    extra = memory.peak_extra(lambda: run("ours"), own["ours"])
    if "megatron-core" in made:
        megatron.destroy()
    return taken, missing, extra, collectives


def count_collectives(run) -> int:
    """Exchanges that gloo carries out, forward and backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        run()
    return sum(e.count for e in trace.key_averages() if e.key.startswith("gloo:"))
