"""Named sets of tensors between stages: headers, asynchronous sends, receives posted in the sender's order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.comm.mesh import Group
from megacore.pipeline.route import Key, Message, Route


class Spec(NamedTuple):
    """One tensor of a message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    grad: bool  # it needs a gradient, so one comes back

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)


Header = tuple[Spec, ...]


def header_of(tensors: Mapping[str, Tensor]) -> Header:
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise ValueError(f"output {name!r} of a stage is a {type(t).__name__}; only tensors cross stages")
    return tuple(
        Spec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad) for name, t in tensors.items()
    )


def encode(header: Header) -> bytes:
    return json.dumps(header).encode()


def decode(text: bytes) -> Header:
    return tuple(Spec(name, dtype, tuple(shape), grad) for name, dtype, shape, grad in json.loads(text))


HeaderKey = tuple[int, Hashable, bool]  # consuming stage, signature of the micro-batch, gradients enabled


@dataclass
class Headers:
    """What one rank has told and been told, kept from step to step: a header crosses once per key."""

    sent: dict[HeaderKey, Header] = field(default_factory=dict)
    known: dict[HeaderKey, Header] = field(default_factory=dict)

    def announce(self, key: HeaderKey, header: Header) -> bool:
        """Whether the header must be sent. Raises ValueError when it contradicts what was said before."""
        before = self.sent.get(key)
        if before is not None and before != header:
            raise ValueError(
                f"signature={key[1]}: {header} crosses into stage {key[0]}, where {before} crossed before; make the "
                "signature fix names, shapes and dtypes, and call Executor.forget() on every rank after freezing or "
                "thawing parameters"
            )
        self.sent[key] = header
        return before is None


_LENGTH, _TEXT = object(), object()  # where the header is kept alive beside the tensors, under no name of theirs


@dataclass(eq=False)
class _Pending:
    message: Message
    works: list[dist.Work]
    tensors: dict[Hashable, Tensor]  # kept alive: a send reads, and a receive writes, its buffer until it is complete
    specs: Header = ()


class Mailbox:
    """One rank's end of the two channels, for one run of a schedule: activations on `down`, gradients on `up`.

    `signature(i)` is that of micro-batch i. A group of one hands tensors over in memory.
    """

    def __init__(
        self,
        down: Group,
        up: Group,
        route: Route,
        headers: Headers,
        signature: Callable[[int], Hashable],
        device: torch.device,
    ) -> None:
        self.groups = {"F": down, "B": up}
        self.route, self.headers, self.signature, self.device = route, headers, signature, device
        self.grad = torch.is_grad_enabled()
        self.wait_seconds = 0.0
        self._posted = 0  # how many of route.incoming
        self._received: dict[Key, _Pending] = {}
        self._sends: list[_Pending] = []
        self._local: dict[Key, dict[str, Tensor]] = {}

    def post(self, position: int, wait: bool = True) -> None:
        """Post the receives of every message made before `position`, in the sender's order. An unknown header is waited
        for; with wait=False posting stops there instead, because its sender may itself be waiting for us."""
        incoming = self.route.incoming
        while self._posted < len(incoming) and incoming[self._posted].produced < position:
            message = incoming[self._posted]
            specs = self._specs(message, wait)
            if specs is None:
                return
            tensors = {spec.name: spec.empty(self.device) for spec in specs}
            works = [self._irecv(message, item, t) for item, t in enumerate(tensors.values(), 2) if t.numel()]
            self._received[message.key] = _Pending(message, works, tensors, specs)
            self._posted += 1

    def receive(self, key: Key) -> dict[str, Tensor]:
        """The tensors of a message, waiting for them; activations that need a gradient come as leaves."""
        if key in self._local:
            return self._local.pop(key)
        pending = self._received.pop(key)
        self._wait(pending.works)
        self._reclaim(pending.message)
        if key[0] == "F" and self.grad:
            for spec in pending.specs:
                pending.tensors[spec.name].requires_grad_(spec.grad)
        return pending.tensors

    def send(self, key: Key, tensors: Mapping[str, Tensor]) -> None:
        """Start sending; returns at once. Activations that need a gradient are announced as such."""
        message, header = self.route.outgoing[key], header_of(tensors)
        if message.source == message.target:
            self._local[key] = {name: t.detach().requires_grad_(t.requires_grad) for name, t in tensors.items()}
            return
        works: list[dist.Work] = []
        kept = {name: t.detach().contiguous() for name, t in tensors.items()}
        if key[0] == "F" and self.headers.announce(self._header_key(message), header):
            text = torch.frombuffer(bytearray(encode(header)), dtype=torch.uint8).to(self.device)
            length = torch.tensor([text.numel()], dtype=torch.int64, device=self.device)
            kept |= {_LENGTH: length, _TEXT: text}
            works += [self._isend(message, 0, length), self._isend(message, 1, text)]
        works += [self._isend(message, item, kept[name]) for item, name in enumerate(tensors, 2) if kept[name].numel()]
        self._sends.append(_Pending(message, works, kept))

    def flush(self) -> None:
        """Wait until every send is complete: its tensors may be parameters, which the optimizer is about to change."""
        for pending in self._sends:
            self._wait(pending.works)
        self._sends.clear()

    def _reclaim(self, arrived: Message) -> None:
        """Free the sends that the arrival of a message proves complete: those its sender consumed before making it.
        (gloo cannot tell: is_completed() of a send stays false until it is waited for, and waiting early would stall.)
        """
        peer, upto = arrived.source, arrived.produced
        done = [p for p in self._sends if p.message.target == peer and p.message.consumed <= upto]
        for pending in done:
            for work in pending.works:
                work.wait()
        self._sends = [p for p in self._sends if p not in done]

    def _specs(self, message: Message, wait: bool) -> Header | None:
        """What a message holds: for gradients, the tensors that we sent and that need one."""
        if message.kind == "B":
            stage = message.stage + 1  # whose input these are the gradients of
            sent = self.headers.sent.get((stage, self.signature(message.microbatch), self.grad))
            assert sent is not None or not wait, "gradients are made after the forward that we sent"
            return sent and tuple(spec for spec in sent if spec.grad)
        key = self._header_key(message)
        if key not in self.headers.known and wait:
            length = torch.empty(1, dtype=torch.int64, device=self.device)
            self._wait([self._irecv(message, 0, length)])
            text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
            self._wait([self._irecv(message, 1, text)])
            self.headers.known[key] = decode(bytes(text.tolist()))
        return self.headers.known.get(key)

    def _header_key(self, message: Message) -> HeaderKey:
        return (message.stage, self.signature(message.microbatch), self.grad)

    def _isend(self, message: Message, item: int, tensor: Tensor) -> dist.Work:
        group = self.groups[message.kind]
        return dist.isend(tensor, group.ranks[message.target], group=group.pg, tag=_tag(message, item))

    def _irecv(self, message: Message, item: int, tensor: Tensor) -> dist.Work:
        group = self.groups[message.kind]
        return dist.irecv(tensor, group.ranks[message.source], group=group.pg, tag=_tag(message, item))

    def _wait(self, works: list[dist.Work]) -> None:
        start = time.perf_counter()
        for work in works:
            work.wait()
        self.wait_seconds += time.perf_counter() - start


def _tag(message: Message, item: int) -> int:
    """Gloo matches by tag. Messages of one pair are posted in one order at both ends, so a tag that repeats is
    harmless; distinct ones turn a mistake into a time-out instead of a wrong value. Tags are below 2^31."""
    return ((message.microbatch << 20) + (message.stage << 10) + item) % 2**31
