"""AdamW on slices of flat master buffers, clipping, and the learning rate.

    g = grad * min(1, clip / (norm + 1e-6))             norm over the whole model, as torch.nn.utils.clip_grad_norm_
    then torch.optim.AdamW on (master, g), one slice a parameter; then bf16 parameter = master

The arithmetic is torch's own AdamW, so that a serial run in plain PyTorch gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, isfinite, pi

import torch
from torch import Tensor, nn

from megacore.comm.mesh import Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import ParamRecord
from megacore.train.rounded import bits, not_rounded

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = (*MOMENTS, "master")  # what a checkpoint holds of each parameter


def learning_rate(step: int, *, peak: float, minimum: float, warmup: int, total: int) -> float:
    """Rate of the step numbered `step`, from 0.

    peak * (step + 1) / warmup                                   while step < warmup (the first step is not wasted on 0)
    minimum + (peak - minimum) * (1 + cos(pi * r)) / 2           after, r = (step - warmup) / (total - warmup)
    minimum                                                      from step `total` on
    """
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup={warmup} is not within 0..total={total}; give fewer warm-up steps or more steps")
    if not 0 <= minimum <= peak:
        raise ValueError(f"minimum={minimum} is not within 0..peak={peak}; give a smaller minimum rate")
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return minimum
    return minimum + (peak - minimum) * (1 + cos(pi * (step - warmup) / (total - warmup))) / 2


def matrices_only(name: str, rec: ParamRecord) -> bool:
    """The default weight-decay rule, on the full shape: matrices and embeddings decay, biases and norms do not."""
    return len(rec.shape) >= 2


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did; the same on every rank."""

    norm: float  # before clipping
    scale: float  # by which the gradients were multiplied
    skipped: str = ""  # the reason, or empty


class MixedAdamW:
    """torch.optim.AdamW over the slots of `buffers`, one 1-D slice a parameter.

    Masters and moments lie in flat buffers of the gradients' layout and dtype (fp32; fp64 for fp64 parameters). A
    parameter of that dtype becomes a view of its master (`p.data` is replaced here: build the optimizer after the
    weights are on their device); a narrower one (bf16) is rounded from its master after each step. Weights that were
    written since (loaded, copied, swapped) are taken into the masters by the next step: see `refresh`. Frozen
    parameters are never touched. `decay` is asked with a parameter's canonical name: tied copies get one answer.
    Memory: 3 main elements a parameter element (2 moments and, unless it is the parameter itself, the master).
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        recs: Mapping[str, ParamRecord],
        buffers: GradBuffers,
        mesh: Mesh,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay: Callable[[str, ParamRecord], bool] = matrices_only,
    ) -> None:
        self.buffers, self.mesh = buffers, mesh
        self._slots = buffers.slots
        self._state = {key: buffers.layout.allocate(buffers.device) for key in STATE}
        self._masters: dict[str, tuple[nn.Parameter, Tensor]] = {}  # parameter and its master, in the local shape
        self._dtypes: dict[str, torch.dtype] = {}  # as built
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        self._steps: dict[str, Tensor] = {}
        slices: dict[str, Tensor] = {}
        for name, slot in self._slots.items():
            self._adopt(name, params[name])
            slices[name] = piece = slot.piece(self._state["master"])
            piece.grad = slot.piece(buffers.flat)
            groups[bool(decay(recs[name].canonical, recs[name]))].append(piece)
        self._adam = None
        if slices:
            rates = ((groups[True], weight_decay), (groups[False], 0.0))
            given = [{"params": pieces, "weight_decay": rate} for pieces, rate in rates if pieces]
            self._adam = torch.optim.AdamW(given, lr=lr, betas=betas, eps=eps)
        for name, piece in slices.items():  # torch makes these at the first step; a checkpoint must fill them before
            moments = {key: self._slots[name].piece(self._state[key]) for key in MOMENTS}
            self._steps[name] = torch.zeros((), dtype=torch.float32)
            self._adam.state[piece] = {"step": self._steps[name], **moments}
        self.steps = 0  # taken, skipped ones left out: what AdamW's bias correction counts

    @torch.no_grad()
    def _adopt(self, name: str, param: nn.Parameter) -> None:
        master = self._slots[name].view(self._state["master"])
        master.copy_(param)
        self._masters[name] = (param, master)
        self._dtypes[name] = param.dtype
        if param.dtype == master.dtype:
            param.data = master

    def step(
        self, lr: float, grad_norm: float | Tensor, clip: float = 0.0, num_valid: int | None = None, loss: float = 0.0
    ) -> StepInfo:
        """One step on the finished gradients, or none at all.

        The only place that decides to skip: when `grad_norm` (of `global_norm`, the same on every rank) is not finite,
        when the loss is not (a finite gradient of an infinite loss leads nowhere), or when the global batch has no
        valid token. A skipped step leaves weights, moments and `steps` bitwise
        unchanged: no weight decay either. clip: largest norm, 0 for none. The gradients are scaled in place. Weights
        written since the last step count, in a skipped step too (`refresh`).
        """
        if clip < 0:
            raise ValueError(f"clip={clip} is negative; give the largest gradient norm, or 0 for no clipping")
        self.refresh()
        norm = float(grad_norm)
        if not isfinite(norm):
            return StepInfo(norm, 0.0, skipped="gradients are not finite")
        if not isfinite(loss):
            return StepInfo(norm, 0.0, skipped="the loss is not finite")
        if num_valid == 0:
            return StepInfo(norm, 0.0, skipped="no valid token in the global batch")
        scale = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        if scale < 1.0:
            for flat in self.buffers.flat.values():
                flat.mul_(scale)
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
        self.steps += 1
        self._round()
        return StepInfo(norm, scale)

    @torch.no_grad()
    def refresh(self) -> list[str]:
        """Take weights that were written from outside into the masters; the names of their parameters. Moments stay.

        A parameter that is its own master shows what was written in place; one whose memory was replaced
        (`p.data = new`) is copied into its master and becomes a view of it again: `new` is no longer part of the model.
        Of a narrower parameter, an element that is not what its master rounds to was written, however (load_state_dict,
        `copy_`, `p.data.copy_`, `p.data = new`): its master becomes that element, exactly. The others keep the bits
        below: whoever swaps an average in and back, or zeroes one row after each step, loses none elsewhere.

        `step` does this first, so that nobody need call it. ValueError where a parameter has another dtype, shape or
        device than the optimizer was built for. Cost: one rounding and comparison of the narrow parameters
        (measured on one AVX-512 core, 25 M bf16 parameters: 32 of 175 ms of a step).
        """
        self.check()
        written, narrow = [], {}
        for name, (param, master) in self._masters.items():
            if param.dtype != master.dtype:
                narrow[name] = (param.data, master)
            elif param.data_ptr() != master.data_ptr() or param.stride() != master.stride():
                master.copy_(param)
                param.data = master
                written.append(name)
        for name in not_rounded(narrow):
            param, master = narrow[name]
            master.copy_(torch.where(bits(param) != bits(master.to(param.dtype)), param.to(master.dtype), master))
            written.append(name)
        return written

    def check(self) -> None:
        """ValueError where a parameter can no longer be trained by this optimizer. Looks at no element."""
        for name, (param, master) in self._masters.items():
            now = (param.dtype, tuple(param.shape), param.device)
            then = (self._dtypes[name], tuple(master.shape), master.device)
            if now != then:
                what = next(
                    f"{a} now, {b} when the optimizer was built" for a, b in zip(now, then, strict=True) if a != b
                )
                raise ValueError(f"{name} is {what}; write into the parameter as it was, or build a new optimizer")

    @torch.no_grad()
    def _round(self) -> None:
        pairs = [(param.data, master) for param, master in self._masters.values() if param.dtype != master.dtype]
        if pairs:
            torch._foreach_copy_([narrow for narrow, _ in pairs], [wide for _, wide in pairs])

    def state(self, name: str) -> dict[str, Tensor]:
        """Views, in the parameter's local shape, of "exp_avg", "exp_avg_sq" and "master"."""
        if name not in self._slots:
            raise ValueError(f"name={name!r} has no optimizer state; it is frozen or not on this rank")
        return {key: self._slots[name].view(self._state[key]) for key in STATE}

    @torch.no_grad()
    def loaded(self, steps: int) -> None:
        """Call after the views of `state` were filled from a checkpoint: sets the step count, rounds the masters."""
        self.steps = steps
        for count in self._steps.values():
            count.fill_(steps)
        self._round()

    @torch.no_grad()
    def load(self, states: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Copy states (as `state` gives them, by parameter name) and resume after `steps` steps."""
        missing = sorted(set(self._slots) - set(states))
        if missing:
            raise ValueError(f"optimizer state lacks {missing[0]} and {len(missing) - 1} more; load one of this model")
        for name in self._slots:
            for key, view in self.state(name).items():
                view.copy_(states[name][key])
        self.loaded(steps)
