"""The executor: obeys a schedule, and alone sends and receives.

One rank holds `chunks`, pieces of the model: chunk c of pipeline rank r is global stage c*p + r. What crosses from
stage to stage is a named set of tensors; the first stage gets an empty set, and the outputs of the last go to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megacore.comm.mesh import SOLO, Group
from megacore.pipeline.messages import Headers, Mailbox
from megacore.pipeline.route import Route, routes
from megacore.pipeline.schedule import Action, Schedule, forward_only, one_f_one_b
from megacore.pipeline.simulate import simulate


class StageLike(Protocol):
    def forward(self, tensors: dict[str, Tensor], mb: Any, /) -> dict[str, Tensor]: ...


class MicroBatchLike(Protocol):
    @property
    def signature(self) -> Hashable: ...  # equal signatures: equal names, shapes and dtypes of all that crosses stages


Loss = Callable[[dict[str, Tensor], Any], Tensor]


class Executor:
    """Runs any schedule over one pipeline.

    `down` carries activations and `up` gradients: two communicators over the same ranks, in pipeline order (`mesh.pp`
    and `mesh.pp_up`). With groups of one nothing of torch.distributed is used. `device` is where messages arrive.
    `wait_seconds` adds up the time spent waiting for messages (on NCCL the stream waits, and it is not in it).
    """

    def __init__(
        self,
        chunks: Sequence[StageLike],
        down: Group = SOLO,
        up: Group = SOLO,
        schedule: Schedule = one_f_one_b,
        device: torch.device | str = "cpu",
    ) -> None:
        if not chunks:
            raise ValueError("chunks is empty; give each pipeline rank at least one chunk of the model")
        if down.ranks != up.ranks:
            raise ValueError(f"up={up.ranks} has not the ranks of down={down.ranks}; give two groups of the same ranks")
        self.chunks, self.down, self.up = list(chunks), down, up
        self.schedule, self.device = schedule, torch.device(device)
        self.wait_seconds = 0.0
        self._headers = Headers()
        self._routes: dict[tuple[bool, int], Route] = {}

    def step(
        self, microbatches: Sequence[MicroBatchLike], loss: Loss, *, on_last: Callable[[int], None] | None = None
    ) -> list[Tensor]:
        """Forward and backward of every micro-batch; gradients are added to the parameters' `.grad` as autograd does.

        `loss(outputs, mb)` is called on the last stage alone and gives a scalar, already scaled: gradients are those of
        the sum of these scalars. Returns the detached losses in the order of the micro-batches on the last stage, and
        [] elsewhere. `on_last(chunk)` is called just before the action that completes the chunk's weight gradients, so
        that a full bucket may be reduced while backward goes on. Micro-batches may differ in signature.

        Raises ValueError, on every rank and before any message, for no micro-batches and for a schedule that is not
        complete or deadlocks. An exception of a stage propagates; the executor cannot be used after one, and the other
        ranks wait until their processes are ended.
        """
        if not microbatches:
            raise ValueError("microbatches is empty; a training step needs at least one")
        return self._run(True, microbatches, loss, on_last)

    def evaluate(self, microbatches: Sequence[MicroBatchLike], loss: Loss) -> list[Tensor]:
        """Forward only, without gradients; any number of micro-batches. Returns what `loss` returns (any tensor) per
        micro-batch on the last stage, and [] elsewhere."""
        with torch.no_grad():
            return self._run(False, microbatches, loss, None)

    def splits(self, microbatches: int) -> bool:
        """Whether this rank has W actions, which walk the graph, the loss's too, a second time."""
        return bool(self._route(True, microbatches).split)

    def forget(self) -> None:
        """Agree anew on what crosses stages. Call it on every rank after freezing or thawing parameters."""
        self._headers = Headers()

    def _run(
        self, train: bool, microbatches: Sequence, loss: Loss, on_last: Callable[[int], None] | None
    ) -> list[Tensor]:
        route = self._route(train, len(microbatches))
        mail = Mailbox(self.down, self.up, route, self._headers, lambda i: microbatches[i].signature, self.device)
        run = _Run(self, train, route, mail, microbatches, loss)
        for index, action in enumerate(route.actions):
            mail.post(route.positions[index])
            if route.one_way and index + 1 < len(route.actions):
                mail.post(route.positions[index + 1], wait=False)  # what arrives during this action
            if on_last is not None and index in route.last:
                on_last(action.chunk)
            {"F": run.forward, "B": run.backward, "W": run.weights}[action.kind](action)
        mail.flush()
        self.wait_seconds += mail.wait_seconds
        return [run.losses[i] for i in sorted(run.losses)]

    def _route(self, train: bool, m: int) -> Route:
        """The schedule for m micro-batches, checked by the simulator; the same on every rank."""
        if (train, m) not in self._routes:
            p, v = self.down.size, len(self.chunks)
            if train:
                lists = [self.schedule(rank, p, m) for rank in range(p)]
            else:
                lists = [forward_only(rank, p, m, v) for rank in range(p)]
            order = simulate(lists, v, microbatches=m).order
            self._routes[train, m] = routes(order, p, v)[self.down.index]
        return self._routes[train, m]


class _Inputs:
    """What a stage is given, as the ordinary results of an operation: its first one may then write into them, as it
    might into those of the layer before in one process. (A leaf that needs a gradient may not be written to.)"""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.names = [name for name, t in tensors.items() if t.requires_grad]
        self.grads: dict[str, Tensor | None] = {}  # where backward leaves them
        self.edges: list[GradientEdge] = []
        self.tensors = dict(tensors)
        if self.names:
            arrived = [tensors[name].requires_grad_(False) for name in self.names]
            entered = _Enter.apply(torch.empty(0, requires_grad=True), self, *arrived)
            self.tensors |= zip(self.names, entered, strict=True)
            self.edges = [get_gradient_edge(t) for t in entered]  # of now: a write moves a tensor's own edge
            self.shapes = {name: (t.shape, t.dtype, t.device) for name, t in zip(self.names, entered, strict=True)}

    def zero(self, name: str) -> Tensor:
        shape, dtype, device = self.shapes[name]
        return torch.zeros(shape, dtype=dtype, device=device)


class _Enter(torch.autograd.Function):
    """Tensors that came from outside become results of this node, in their own memory; backward hands their gradients
    out. `anchor` needs a gradient, and with it the node is on every path."""

    @staticmethod
    def forward(ctx, anchor: Tensor, inputs: _Inputs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.inputs.grads = dict(zip(ctx.inputs.names, grads, strict=True))
        return (None,) * (2 + len(grads))


@dataclass
class _Live:
    """What a micro-batch keeps in a chunk between its F and its last backward. The outputs themselves are not kept:
    backward starts from the edges of the graph that made them."""

    inputs: _Inputs
    roots: dict[str, Tensor | GradientEdge]  # outputs that have one, or the loss
    grads: list[Tensor | None] = field(default_factory=list)


class _Run:
    """One pass over a schedule."""

    def __init__(
        self, executor: Executor, train: bool, route: Route, mail: Mailbox, microbatches: Sequence, loss: Loss
    ) -> None:
        self.chunks, self.train, self.split, self.mail = executor.chunks, train, route.split, mail
        self.p, self.rank = executor.down.size, executor.down.index
        self.microbatches, self.loss = microbatches, loss
        self.losses: dict[int, Tensor] = {}
        self.live: dict[tuple[int, int], _Live] = {}

    def forward(self, action: Action) -> None:
        stage, i = action.chunk * self.p + self.rank, action.microbatch
        mb = self.microbatches[i]
        inputs = _Inputs(self.mail.receive(("F", stage, i)) if stage else {})
        outputs = self.chunks[action.chunk].forward(inputs.tensors, mb)
        inputs.tensors = {}  # what the graph needs of them, the graph keeps
        if stage == self.p * len(self.chunks) - 1:
            value = self.loss(outputs, mb)
            self.losses[i] = value.detach()
            roots = {"loss": value} if value.requires_grad else {}
        else:
            self.mail.send(("F", stage + 1, i), outputs)
            roots = {name: get_gradient_edge(t) for name, t in outputs.items() if t.requires_grad}
        if self.train:
            self.live[action.chunk, i] = _Live(inputs, roots)

    def backward(self, action: Action) -> None:
        """Both gradients, or that of the inputs alone when a W follows."""
        stage, i = action.chunk * self.p + self.rank, action.microbatch
        split = (action.chunk, i) in self.split
        live = self.live[action.chunk, i] if split else self.live.pop((action.chunk, i))
        roots = list(live.roots.values())
        if stage == self.p * len(self.chunks) - 1:
            live.grads = [None] * len(roots)
        else:
            arrived = self.mail.receive(("B", stage, i))
            live.grads = [arrived[name] for name in live.roots]
        inputs, found = live.inputs, {}
        if split and roots and inputs.names:
            grads = torch.autograd.grad(roots, inputs.edges, live.grads, retain_graph=True, allow_unused=True)
            found = dict(zip(inputs.names, grads, strict=True))
        elif roots and not split:
            torch.autograd.backward(roots, live.grads)
            found = inputs.grads
        if stage:
            # An input that nothing used has gradient zero, and zeros are sent: which inputs are used may depend on the
            # data, so only "needs a gradient" is agreed beforehand.
            given = {name: found.get(name) for name in inputs.names}
            self.mail.send(("B", stage - 1, i), {n: inputs.zero(n) if g is None else g for n, g in given.items()})

    def weights(self, action: Action) -> None:
        """The graph is walked a second time, so the inputs' gradients are computed again on the way to the weights."""
        live = self.live.pop((action.chunk, action.microbatch))
        if live.roots:
            torch.autograd.backward(list(live.roots.values()), live.grads)
