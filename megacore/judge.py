"""What is wrong first, in the order of cause: loss, gradients, norm, update; of each step by itself.

AdamW's update g / (|g| + eps) has slope 1 / eps at g = 0: where an exact gradient is zero (a key bias, say) it turns
rounding of size d into a step of lr * d / eps, and two right runs part by more than rounding. So a trajectory that left
the serial one after a right first step is judged by its steps. Each starts from the layout's own state:

    loss and gradients of step k     against the plain model at the layout's weights after step k - 1
    norm and weights after step k    against torch's clipping and AdamW on the layout's own gradients

Nothing is amplified in either, so the same bounds hold for each step: if all hold, the layout's run is the exact
algorithm with a gradient that is off by at most the bound in each step. A wrong weight of 1e-9 stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacore.compare import Outcome, assemble, copies_that_differ, relative, worst
from megacore.serial import Reference, Serial
from megacore.subject import Subject, Trial


@dataclass(frozen=True)
class Judgement:
    """Largest errors, and the first thing that is wrong or ""."""

    loss: float
    grad: float
    norm: float
    weight: float
    wrong: str = ""
    step: int = 0  # of `wrong`, from 1


def judge(outcomes: Sequence[Outcome], reference: Reference, trial: Trial, bound: float) -> Judgement:
    """Against the serial trajectory. Raises ValueError where pieces do not make whole tensors."""
    gradients = assemble(outcomes, lambda o: o.gradients, reference.gradients)
    weights = assemble(outcomes, lambda o: o.weights, reference.weights)
    grad, grad_at = worst(gradients, reference.gradients, bound, backward=True)
    weight, weight_at = worst(weights, reference.weights, bound)
    losses = [max(relative([o.losses[k]], [reference.losses[k]]) for o in outcomes) for k in range(trial.steps)]
    norms = [max(relative([o.norms[k]], [reference.norms[k]]) for o in outcomes) for k in range(trial.steps)]
    found: list[tuple[int, str]] = []

    def note(step: int, what: str, error: float) -> None:
        if not error <= bound:
            found.append((step, f"{what} differs by {error:.1e}"))

    note(1, "loss of step 1", losses[0])
    note(1, f"gradient of {grad_at}", grad)
    note(1, "gradient norm of step 1", norms[0])
    found += [(1, text) for text in copies_that_differ(outcomes, early=True)]
    for k in range(1, trial.steps):
        note(k + 1, f"loss of step {k + 1}", losses[k])
        note(k + 1, f"gradient norm of step {k + 1}", norms[k])
    if trial.precision == "fp64":
        note(trial.steps + 1, f"weight {weight_at}", weight)
    found += [(trial.steps + 2, text) for text in copies_that_differ(outcomes)]
    step, wrong = found[0] if found else (0, "")
    return Judgement(max(losses), grad, max(norms), weight, wrong, step)


def judge_steps(subject: Subject, trial: Trial, outcomes: Sequence[Outcome], bound: float) -> Judgement:
    """Each step by itself, from outcomes that kept every step: see the module's head. Cost: one serial run."""
    serial = Serial(subject, trial)
    loss = grad = norm = weight = 0.0
    wrong = ""
    for k in range(trial.steps):
        want_loss, want = serial.backward(k)
        got = assemble(outcomes, lambda o, k=k: o.each[k][0], want)
        grad_k, grad_at = worst(got, want, bound, backward=True)
        want_norm = serial.update(got)
        after, stepped = assemble(outcomes, lambda o, k=k: o.each[k][1], serial.weights()), serial.weights()
        weight_k, weight_at = worst(after, stepped, bound)
        loss_k = max(relative([o.losses[k]], [want_loss]) for o in outcomes)
        norm_k = max(relative([o.norms[k]], [want_norm]) for o in outcomes)
        checks = (
            (f"loss of step {k + 1}, at the layout's own weights,", loss_k),
            (f"gradient of {grad_at} in step {k + 1}, at the layout's own weights,", grad_k),
            (f"gradient norm of step {k + 1}, of the layout's own gradients,", norm_k),
            (f"weight {weight_at} after step {k + 1}, by AdamW on the layout's own gradients,", weight_k),
        )
        wrong = wrong or next((f"{what} differs by {error:.1e}" for what, error in checks if not error <= bound), "")
        loss, grad, norm, weight = max(loss, loss_k), max(grad, grad_k), max(norm, norm_k), max(weight, weight_k)
        if wrong:
            return Judgement(loss, grad, norm, weight, wrong, k + 1)
        serial.load(after)
    wrong = (copies_that_differ(outcomes) or [""])[0]
    return Judgement(loss, grad, norm, weight, wrong, trial.steps)
