"""Data parallelism: main gradients in flat buffers, summed in buckets while backward still runs.

    flat[p] = sum over this rank's micro-batches of grad p          fp32 (fp64 for fp64 parameters)
    flat    = sum over dp x cp of flat                              one asynchronous all-reduce a bucket
    then tied copies are summed over `embed`, and `shared` boxes over `tp`

Sums, never means: the loss is already divided by the number of valid tokens of the whole global batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from megacore.comm.mesh import Mesh
from megacore.parallel.buckets import Slot, flat_layout
from megacore.parallel.record import ParamRecord
from megacore.parallel.replicas import SharedBoxes, sum_tied


class GradBuffers:
    """The main gradients of the trainable parameters of one rank.

    A step: `zero()`, backward of every micro-batch (`expect()` before the last one), `finish()`, then `grad(name)`.
    A post-accumulate hook folds each `p.grad` into its slot and clears it. A parameter is ready when it receives a
    gradient after `expect`, or when the executor says so by `ready` (deferred weight gradients); a hook alone never
    makes it ready. A bucket is launched as soon as all its parameters are ready and all earlier buckets are launched:
    the order is the same on all ranks whatever each rank's backward did.

    Memory: one main-gradient element per trainable parameter element, plus one `p.grad` at a time.
    Construction is collective over `tp`. Errors: ValueError for parameters on several devices.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        recs: Mapping[str, ParamRecord],
        mesh: Mesh,
        bucket_bytes: int = 32 << 20,
    ) -> None:
        devices = {p.device for p in params.values()}
        if len(devices) > 1:
            raise ValueError(f"parameters lie on {sorted(map(str, devices))}; move the module to one device first")
        self.device = devices.pop() if devices else torch.device("cpu")
        self.params = dict(params)
        trainable = {n: p for n, p in params.items() if p.requires_grad}
        self.layout = flat_layout(trainable, bucket_bytes)
        self.flat = self.layout.allocate(self.device)
        self.wait_seconds = 0.0  # blocked in finish(), since construction or since the reader reset it
        self.launches: list[tuple[int, float]] = []  # (bucket, perf_counter()) of this step, in order
        self._mesh, self._recs = mesh, recs
        self._grads = {n: slot.view(self.flat) for n, slot in self.layout.slots.items()}
        self._names = {p: n for n, p in trainable.items()}
        self._shared = SharedBoxes(recs, list(trainable), mesh.tp, self.device)
        self._works: list[dist.Work] = []
        self._start_step()
        me = weakref.ref(
            self
        )  # the collector does not see through a tensor's hooks: a strong cycle would never be freed
        self._hooks = [p.register_post_accumulate_grad_hook(partial(_fold, me, n)) for n, p in trainable.items()]

    def _start_step(self) -> None:
        self._touched: set[str] = set()  # received a gradient since zero()
        self._expected: set[str] = set()
        self._ready: set[str] = set()
        self._missing = [len(b.names) for b in self.layout.buckets]  # parameters not ready yet
        self.launches = []

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Trainable parameters, last first."""
        return self.layout.slots

    def grad(self, name: str) -> Tensor:
        """View of the flat buffer in the parameter's local shape: whole after `finish()`."""
        if name not in self._grads:
            raise ValueError(f"name={name!r} has no gradient slot; it is frozen or not on this rank")
        return self._grads[name]

    def zero(self) -> None:
        """Start a step. No pass over memory: the first gradient of a parameter is copied, not added."""
        for name, p in self.params.items():
            if p.requires_grad != (name in self._grads):
                raise ValueError(f"{name}.requires_grad={p.requires_grad} changed; build new GradBuffers and optimizer")
            p.grad = None
        self._start_step()

    def expect(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """The next gradient of each of `params` (default: all) is its last of this step. A parameter that two
        chunks of one rank share is to be expected by the one whose backward comes last."""
        self._expected.update(self._grads if params is None else (self._names[p] for p in params if p in self._names))

    def ready(self, params: Iterable[nn.Parameter]) -> None:
        """The gradients of `params` are complete, whatever the hooks saw; a `p.grad` still there is folded in first."""
        for p in params:
            if p in self._names:
                self._take(self._names[p], p)
                self._mark(self._names[p])

    def add(self, name: str, grad: Tensor) -> None:
        """Add one micro-batch's gradient (local shape, any floating dtype and strides) in the main dtype."""
        if self.layout.slots[name].bucket < len(self.launches):
            raise RuntimeError(
                f"{name} got a gradient after its bucket was reduced; call expect() only before its last"
            )
        if name in self._touched:
            self._grads[name].add_(grad)
        else:
            self._grads[name].copy_(grad)
            self._touched.add(name)

    def _take(self, name: str, param: nn.Parameter) -> None:
        if param.grad is not None:
            self.add(name, param.grad)
            param.grad = None

    def _mark(self, name: str) -> None:
        if name in self._ready:
            return
        self._ready.add(name)
        self._missing[self.layout.slots[name].bucket] -= 1
        while (n := len(self.launches)) < len(self._missing) and self._missing[n] == 0:
            self._launch()

    def _launch(self) -> None:
        number = len(self.launches)
        bucket = self.layout.buckets[number]
        for name in bucket.names:
            if name not in self._touched:
                self._grads[name].zero_()
        self.launches.append((number, perf_counter()))
        if self._mesh.dp_cp.size > 1:
            with record_function(f"launch gradient bucket {number}"):
                part = self.flat[bucket.dtype][bucket.start : bucket.stop]
                self._works.append(dist.all_reduce(part, group=self._mesh.dp_cp.pg, async_op=True))

    def finish(self) -> None:
        """Launch what is left (parameters without a gradient count as zero), wait, and sum the replicas.

        Collective over dp x cp, embed and tp. On a GPU `wait` orders streams: `wait_seconds` is the host's time only.
        """
        while len(self.launches) < len(self.layout.buckets):
            self._launch()
        start = perf_counter()
        for work in self._works:
            work.wait()
        self._works.clear()
        sum_tied(self._grads, self._recs, self._mesh.embed)
        self._shared.sum_(self._grads)
        self.wait_seconds += perf_counter() - start

    def close(self) -> None:
        """Remove the hooks: gradients stay in `p.grad` from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _fold(buffers: weakref.ref[GradBuffers], name: str, param: nn.Parameter) -> None:
    owner = buffers()
    if owner is not None:
        owner._take(name, param)
        if name in owner._expected:
            owner._mark(name)
