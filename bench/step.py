"""Forward and backward of a whole GPT at tp 2: ours and the rivals in turn, in one run of the same two gloo processes.

All have the same weights, the same tokens, an untied head, and one thread a rank; loss and the gradient of the position
table are compared before anything is timed. A round's time is that of the slower rank.
Limit: the matrix products of the step (causal attention counted as half) at the peak that both ranks reach together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import harness, limits
from bench.harness import Options, Timed
from bench.peers import dtensor, megatron
from bench.report import Row, row
from megacore.comm.mesh import Layout, Mesh
from megacore.comm.workers import WorkerPool
from megacore.models import gpt
from megacore.parallel.loss import vocab_parallel_cross_entropy
from megacore.parallel.plan import parallelize

TP = 2
SIZES = {  # name -> (config, batch, share of the asked rounds)
    "gpt-4x256": (gpt.GPTConfig(4, 256, 8, 1024, 256, activation="erf", tied=False), 4, 1.0),
    "gpt-4x768": (gpt.GPTConfig(4, 768, 12, 50304, 512, activation="erf", tied=False), 2, 0.35),
}
QUICK = {"gpt-2x32": (gpt.GPTConfig(2, 32, 4, 96, 16, activation="erf", tied=False), 2, 0.2)}
TOLERANCE = 1e-4  # fp32, against each other; relative to the largest element


def weights(config: gpt.GPTConfig) -> dict[str, Tensor]:
    """Full weights under the plain model's names: norms near 1, the rest small, no element 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in _on_meta(config).state_dict().items()}
    around = {name: 1.0 if "norm" in name and name.endswith("weight") else 0.0 for name in shapes}
    return {n: torch.randn(shape, generator=generator).mul_(0.02).add_(around[n]) for n, shape in shapes.items()}


def tokens(config: gpt.GPTConfig, batch: int) -> tuple[Tensor, Tensor]:
    """ids and targets [B, S]."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(config.vocab_size, (batch, config.seq_length + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _on_meta(config: gpt.GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return gpt.GPT(config)


def ours(config: gpt.GPTConfig, state: Mapping[str, Tensor], world: int) -> tuple[Callable, nn.Module, Tensor]:
    """(step(ids, targets) -> loss after backward, the model, its position table)."""
    mesh = Mesh.build(Layout(tp=world))
    model = _on_meta(config)
    model.load_state_dict(state, assign=True)
    model = parallelize(model, mesh, gpt.plan(config))

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        logits = model(ids)
        loss = vocab_parallel_cross_entropy(
            logits, targets, vocab_size=config.vocab_size, group=mesh.tp, reduction="mean", inplace_backward=True
        )
        loss.backward()
        return loss.detach()

    return step, model, model.get_parameter("embed.pos.weight")


def flops(config: gpt.GPTConfig, batch: int) -> float:
    """Of the matrix products of forward and backward, over all ranks: 6 a weight and token, and causal attention."""
    tokens = batch * config.seq_length
    matrices = config.layers * (4 * config.hidden + 2 * config.ffn_size) * config.hidden
    attention = config.layers * config.seq_length * config.hidden  # two products, halved by the causal mask
    return 6.0 * tokens * (matrices + config.hidden * config.vocab_size + attention)


def _contest(config: gpt.GPTConfig, batch: int, names: tuple[str, ...], rounds: int) -> tuple[dict, float, dict]:
    """On each rank: (seconds of each contestant in each round, peak FLOP/s of this rank, losses)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = weights(config)
    made = {"ours": ours(config, state, world)}
    if "torch-dtensor" in names:
        made["torch-dtensor"] = dtensor.build(config, state, world)
    if "megatron-core" in names:
        made["megatron-core"] = megatron.build(config, state, world, rank)
    del state
    ids, targets = tokens(config, batch)

    def run(name: str) -> Tensor:
        step, model, _ = made[name]
        model.zero_grad(set_to_none=True)
        return step(ids, targets)

    losses = {name: float(run(name)) for name in made}
    _compare(losses, {name: table.grad.clone() for name, (_, _, table) in made.items()})
    dist.barrier()
    peak = limits.measure().flops
    started = {name: lambda name=name: run(name) for name in made}
    taken = harness.interleave(started, rounds, lambda _: dist.barrier(), warmup=1)
    if "megatron-core" in made:
        megatron.destroy()
    return taken, peak, losses


def _compare(losses: Mapping[str, float], gradients: Mapping[str, Tensor]) -> None:
    for name, loss in losses.items():
        apart = abs(loss - losses["ours"]) / abs(losses["ours"])
        scale = gradients["ours"].abs().max()
        turned = float((gradients[name] - gradients["ours"]).abs().max() / scale)
        if not max(apart, turned) <= TOLERANCE:
            raise AssertionError(
                f"{name} computes something else: loss by {apart:.1e}, gradient by {turned:.1e}; not timed"
            )


def rows(options: Options) -> Iterator[Row]:
    names = [n for n in ("torch-dtensor", "megatron-core") if n in options.rivals]
    missing = {}
    if find_spec("megatron") is None and "megatron-core" in names:
        names.remove("megatron-core")
        missing["megatron-core"] = "megatron-core is not installed"
    if options.device != "cpu" or options.impl:
        return
    with WorkerPool(TP) as pool:
        for model, (config, batch, share) in (QUICK if options.quick else SIZES).items():
            shape = f"{batch}x{config.seq_length}x{config.hidden}x{config.vocab_size}"
            case = {"model": model, "shape": shape, "act": config.activation, "dtype": "fp32", "dir": "fwd+bwd"}
            case |= {"threads": 1, "tp": TP}
            if not options.wants("step", case):
                continue
            rounds = max(3, round(options.rounds * share))
            answers = pool.run(_contest, config, batch, tuple(names), rounds, timeout=1800)
            taken = {n: [max(each) for each in zip(*(a[0][n] for a in answers), strict=True)] for n in answers[0][0]}
            limit = 1e3 * flops(config, batch) / sum(peak for _, peak, _ in answers)
            yield row("step", case, Timed(taken, missing), limit)
