"""One training step at any layout: what `megacore train` repeats and `megacore verify` compares with a serial run.

loss = sum over the valid tokens of the global batch of -log p(target) / number of those tokens, counted beforehand:
whatever the micro-batches, data parallelism or stages are, every token weighs the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from megacore.comm.collectives import all_reduce_
from megacore.comm.mesh import Mesh
from megacore.ops.linear_cross_entropy import chunk_rows_for
from megacore.parallel.batch import MicroBatch
from megacore.parallel.data import GradBuffers
from megacore.parallel.drift import WholeGradients
from megacore.parallel.embedding import vocab_range
from megacore.parallel.head import Unprojected, heads_of
from megacore.parallel.loss import head_cross_entropy, vocab_parallel_cross_entropy
from megacore.parallel.materialize import Init, materialize
from megacore.parallel.module_buffers import Replicas, cast, persistent
from megacore.parallel.norm import global_norm
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.random import Streams
from megacore.parallel.record import ParamRecord, records, whole
from megacore.parallel.stage import Stage, chain_of, cut
from megacore.parallel.styles import Head
from megacore.pipeline import SCHEDULES, Executor, partition, simulate
from megacore.train.config import OptimSettings
from megacore.train.logical import LogicalTensor, describe
from megacore.train.optim import MixedAdamW
from megacore.train.precision import precision as named_precision


@dataclass(frozen=True)
class StepResult:
    """The same on every rank, but for `seconds`: this rank's time in `step`, and how long it waited for others."""

    loss: float
    grad_norm: float
    skipped: str  # why no update was made, or empty
    seconds: dict[str, float]  # total, and of it the waits: see TrainStep._waits


def build_stage(
    build: Callable[[], nn.Module],
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    init: Init | None,
    dtype: torch.dtype,
    device: torch.device | str,
    fused_loss: bool = False,
) -> Stage:
    """This rank's stage, with its weights. `build` makes the plain model: on the meta device whenever `init` is given,
    so that no rank ever holds it whole; otherwise with weights, the same on every rank. fused_loss: the last stage
    gives the logits' factors. Raises ValueError, before any communication, for a layout that the model or its plan
    cannot serve."""
    if mesh.tp.size > 1 and not plan.table:
        raise ValueError(f"tp={mesh.tp.size} needs a plan table for this model; give a plan, or tp=1")
    if mesh.tp.size > 1 and not any(isinstance(style, Head) for style in plan.table.values()):
        raise ValueError(
            f"tp={mesh.tp.size} needs a Head() row in the plan, for the layer that gives the logits; add it"
        )
    if mesh.pp.size > 1 and plan.chain is None:
        raise ValueError(f"pp={mesh.pp.size} needs a plan with a chain of links; give one, or pp=1")
    with torch.device("meta" if init is not None else device):
        model = build()
    streams = getattr(model, "streams", None) or Streams(seed)
    parallelize(model, mesh, plan, streams)
    heads = len(heads_of(model))
    if fused_loss and heads != 1:
        raise ValueError(
            f"gives_up_logits=True in a plan with {heads} Head() modules: the loss can take the place of one; "
            "set it to False, or fused_loss=False"
        )
    links = chain_of(model, plan)
    keep = partition([link.cost for link in links], mesh.pp.size)
    stage = cut(model, links, keep, mesh.pp.index, streams, fused_loss)
    if init is not None:
        materialize(stage.model, mesh, init, seed=seed, dtype=dtype, device=device)
    cast(stage, dtype, device)
    return stage


class TrainStep:
    """A model at a layout, with its gradient buffers, optimizer and pipeline.

    `step(microbatches, valid, lr)` is one optimizer step on this rank's micro-batches; `valid` is the number of counted
    targets of the whole global batch. All ranks of a pipeline get the same micro-batches. Collective over the mesh.
    fused_loss: where the plan gives up its logits, the loss computes them itself, a chunk at a time, and never holds
    them all.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        plan: Plan,
        mesh: Mesh,
        *,
        seed: int = 0,
        precision: str = "fp32",
        schedule: str = "1f1b",
        optim: OptimSettings | None = None,
        init: Init | None = None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 32 << 20,
        fused_loss: bool = True,
    ):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
        self.mesh, self.plan, self.optim, self.device = mesh, plan, optim or OptimSettings(), torch.device(device)
        self.dtype = dtype = named_precision(precision).parameters
        self.fused_loss = fused_loss and plan.gives_up_logits
        self.stage = build_stage(
            build, plan, mesh, seed=seed, init=init, dtype=dtype, device=device, fused_loss=self.fused_loss
        )
        self.model = self.stage.model
        self.params = dict(self.model.named_parameters())
        self.recs = records(self.model, mesh)
        self.buffers = GradBuffers(self.params, self.recs, mesh, bucket_bytes)
        self._whole = WholeGradients(self.buffers, self.recs, mesh)
        o = self.optim
        self.optimizer = MixedAdamW(
            self.params, self.recs, self.buffers, mesh, o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay
        )
        self._lives: dict[int, int] = {}
        self.replicas = Replicas(self.model, mesh.dp_cp)
        self.executor = Executor([self.stage], mesh.pp, mesh.pp_up, SCHEDULES[schedule], device)

    def step(
        self,
        microbatches: Sequence[MicroBatch],
        valid: int | None,
        lr: float,
        inspect: Callable[[GradBuffers], None] | None = None,
    ) -> StepResult:
        """Forward, backward, reduction, clipping and AdamW. A batch without valid tokens has loss 0 and changes
        nothing. valid: None to have it counted here, for one small all-reduce more; a number that is not the count is
        refused, on every rank, before anything is changed (ValueError).
        `inspect` is shown the finished gradients before they are clipped."""
        start, before = perf_counter(), self._waits()
        valid = self._counted(microbatches, valid)
        self.stage.train()
        self.buffers.zero()
        count = len(microbatches)
        loss_of = self._loss(valid, self._live(count), in_place=not (count and self.executor.splits(count)))
        losses = []
        if microbatches:  # a replica may have no sample of a small batch: it adds zeros
            losses = self.executor.step(microbatches, loss_of, on_last=lambda _: self.buffers.expect())
        self.buffers.finish()
        if inspect is not None:
            inspect(self.buffers)
        self._whole.check()
        norm, _ = global_norm(self.buffers, self.recs, self.mesh)
        loss = self._over_world(losses, microbatches, valid)
        info = self.optimizer.step(lr, norm, self.optim.clip, num_valid=valid)
        seconds = {"total": perf_counter() - start} | {k: now - before[k] for k, now in self._waits().items()}
        return StepResult(loss, info.norm, info.skipped, seconds)

    def _waits(self) -> dict[str, float]:
        """Seconds that this rank has waited for others so far: tensor-parallel peers, stages, replicas.

        A stage that is done early waits for the others in the norm's all-reduce, so that counts as pipeline. The one
        exchange inside the loss operator is not seen here: it counts as compute.
        """
        return {
            "tensor": self.mesh.tp.waited[0],
            "pipeline": self.executor.wait_seconds + self.mesh.model.waited[0],
            "data_parallel": self.buffers.wait_seconds + self.mesh.world.waited[0],
        }

    def evaluate(self, microbatches: Sequence[MicroBatch], valid: int | None) -> float:
        """The loss of a global batch, in eval mode and without gradients; the same on every rank. `valid` as in
        `step`."""
        valid = self._counted(microbatches, valid)
        self.stage.eval()
        return self._over_world(self.executor.evaluate(microbatches, self._loss(valid)), microbatches, valid)

    def probe(self, microbatches: Sequence[MicroBatch]) -> float:
        """Loss of the first micro-batch of every replica, as `evaluate` gives it: are the weights still good for
        anything? Cost: a forward of one micro-batch."""
        return self.evaluate(microbatches[:1], None)

    def _live(self, microbatches: int) -> int:
        """How many losses of the last stage wait for their backward at once: 1 with 1f1b, all with gpipe."""
        if microbatches not in self._lives:
            p = self.mesh.pp.size
            lists = [self.executor.schedule(rank, p, microbatches) for rank in range(p)]
            self._lives[microbatches] = simulate(lists, microbatches=microbatches).peak_live[-1] if microbatches else 0
        return self._lives[microbatches]

    def _loss(
        self, valid: int, live: int = 1, in_place: bool = True
    ) -> Callable[[dict[str, Tensor | Unprojected], MicroBatch], Tensor]:
        """sum / valid, of the whole global batch: a mean of means weighs short micro-batches too much."""
        plan, scale, in_place = self.plan, 1 / max(valid, 1), in_place and self.plan.gives_up_logits
        shared = {"vocab_size": plan.vocab_size, "group": self.mesh.tp, "multiple": plan.vocab_multiple}

        def loss(outputs: dict[str, Tensor | Unprojected], batch: MicroBatch) -> Tensor:
            logits = outputs["logits"]
            if not isinstance(logits, Unprojected):
                return scale * vocab_parallel_cross_entropy(
                    logits, batch.targets, **shared, reduction="sum", inplace_backward=in_place
                )
            if live <= 1:
                return head_cross_entropy(logits, batch.targets, **shared, reduction="sum", scale=scale)
            # a reduced loss would keep the gradient of the whole head until its backward, and so would each that waits
            return scale * head_cross_entropy(logits, batch.targets, **shared, reduction="none").sum()

        return loss

    def logits_bytes(self, tokens: int) -> tuple[int, int]:
        """(all logits of a micro-batch of `tokens` on a rank of the last stage, the most of them that it holds)."""
        plan, t = self.plan, self.mesh.tp.size
        _, _, columns = vocab_range(plan.vocab_size, t, 0, plan.vocab_multiple)
        row = columns * self.dtype.itemsize
        held = chunk_rows_for(tokens, -(-plan.vocab_size // t), self.dtype, self.device.type)
        return tokens * row, (min(held, tokens) if self.fused_loss else tokens) * row

    def _counted(self, microbatches: Sequence[MicroBatch], valid: int | None) -> int:
        """`valid`, or the global count where it is None."""
        if valid is None:
            count = torch.tensor(self._mine(microbatches), dtype=torch.int64, device=self.device)
            return int(all_reduce_(count, self.mesh.world).item())
        if isinstance(valid, bool) or valid % 1 != 0 or valid < 0:  # NaN % 1 is no 0 either
            raise ValueError(f"valid={valid!r} is no number of targets; give the global batch's count, or None")
        return int(valid)

    def _mine(self, microbatches: Sequence[MicroBatch]) -> int:
        """Counted targets, once a replica: all ranks of a tp x pp block are given the same micro-batches."""
        return sum(batch.valid for batch in microbatches) if self.mesh.model.index == 0 else 0

    def _over_world(self, losses: Sequence[Tensor], microbatches: Sequence[MicroBatch], valid: int) -> float:
        """Sum of the micro-batches' losses over data-parallel ranks, told to every rank; tp ranks hold the same bits.

        With it go the targets that were counted and what each rank was told of them. The mean of squares is the square
        of the mean only where all are equal, so that every rank sees a wrong number of any (squares of the low bits:
        their sum is exact in fp64)."""
        total, low = torch.zeros(6, dtype=torch.float64, device=self.device), float(valid % 2**20)
        if losses and self.mesh.tp.index == 0:
            total[0] += torch.stack([value.double() for value in losses]).sum()
        mine = [float(self.replicas.changed()), float(self._mine(microbatches)), float(valid), low, low * low]
        total[1:] = torch.tensor(mine, dtype=torch.float64)
        loss, changed, counted, *told = all_reduce_(total, self.mesh.world).tolist()
        low = counted % 2**20
        if told != [self.mesh.world.size * value for value in (counted, low, low * low)]:
            raise ValueError(
                f"valid={valid} on this rank, and the global batch has {int(counted)} counted targets; "
                "give that number on every rank, or None to have them counted"
            )
        if changed:
            self.replicas.agree()
        return loss

    def logical(self) -> dict[str, LogicalTensor]:
        """What a checkpoint holds: parameters under model/, masters and moments under optim/."""
        tensors = describe("model", self.recs, self.params)
        parts: dict[str, dict[str, Tensor]] = {}
        for name in self.buffers.slots:
            for key, value in self.optimizer.state(name).items():
                if key != "master" or value.dtype != self.params[name].dtype:  # else the parameter is its own master
                    parts.setdefault(key, {})[name] = value
        for key, local in parts.items():
            tensors |= describe("optim", self.recs, local, key)
        return tensors | self._buffers()

    def _buffers(self) -> dict[str, LogicalTensor]:
        """Persistent buffers under buffer/, whole; the first tensor rank of the first stage that has one writes it."""
        found = {}
        for name, buffer in persistent(self.model).items():
            shape, first = tuple(buffer.shape), self.mesh.tp.index == 0 and name not in self.stage.borrowed
            found[f"buffer/{name}"] = LogicalTensor(ParamRecord(name, shape, shape, whole(shape, first)), buffer)
        return found

    def loaded(self, steps: int) -> None:
        """Call once the tensors of `logical` were filled from a checkpoint."""
        self.optimizer.loaded(steps)
