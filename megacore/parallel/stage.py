"""One pipeline stage of a model: some consecutive links of the plan's chain, under the plain model's full names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor, nn

from megacore.parallel.batch import MicroBatch
from megacore.parallel.head import Unprojected, heads_of, unprojected
from megacore.parallel.plan import Link, Plan, tied_names
from megacore.parallel.random import Streams
from megacore.parallel.record import TIES


class Stage(nn.Module):
    """`forward({}, batch)` on the first stage, `forward(tensors of the stage before, batch)` on the others; the last
    one returns {"logits": [B, S, V/t]}, or with fused_loss {"logits": Unprojected}, which the loss multiplies out. The
    modules of other stages are gone from `model`."""

    def __init__(
        self, model: nn.Module, links: Sequence[Link], streams: Streams | None = None, fused_loss: bool = False
    ):
        super().__init__()
        self.model, self.links, self.streams = model, tuple(links), streams
        self.heads = tuple(heads_of(model)) if fused_loss else ()  # none on the stages before the last

    def forward(self, tensors: dict[str, Tensor], batch: MicroBatch) -> dict[str, Tensor | Unprojected]:
        with ExitStack() as around:
            if self.streams is not None:
                around.enter_context(self.streams.at(batch))
            for head in self.heads:
                around.enter_context(unprojected(head))
            return self._run(tensors, batch)

    def _run(self, tensors: dict[str, Tensor], batch: MicroBatch) -> dict[str, Tensor]:
        for link in self.links:
            tensors = link.run(self.model, tensors, batch)
        return tensors


def logits_of(output: object) -> Tensor:
    """Plain models return logits, Hugging Face's an object that has them."""
    return getattr(output, "logits", output)


def chain_of(model: nn.Module, plan: Plan) -> list[Link]:
    """The plan's links; a plan without a chain has one link, the whole model, called as model(ids)."""
    if plan.chain is not None:
        return plan.chain(model)

    def run(whole: nn.Module, _: dict[str, Tensor], batch: MicroBatch) -> dict[str, Tensor]:
        return {"logits": logits_of(whole(batch.ids))}

    return [Link(("",), run)]


def cut(
    model: nn.Module,
    links: Sequence[Link],
    keep: Sequence[range],
    index: int,
    streams: Streams | None = None,
    fused_loss: bool = False,
) -> Stage:
    """Stage `index` of those that hold the links `keep[0]`, `keep[1]`, ...; changes `model` in place.

    Parameters tied across stages are marked for records(); they must sit on the first and the last stage, where the
    embedding group is. Raises ValueError where a parameter belongs to no link, or a tie cannot be served.
    """
    home = {module: stage for stage, held in enumerate(keep) for link in held for module in links[link].modules}
    stage_of = {name: _home(name, home) for name, _ in model.named_parameters(remove_duplicate=False)}
    for first, *others in tied_names(model):
        stages = sorted({stage_of[n] for n in (first, *others)})
        if len(stages) > 1:
            _mark(model, first, others, stage_of, stages, len(keep), index)
    mine = [module for module, stage in home.items() if stage == index]
    for name in [n for n, _ in model.named_modules() if n]:
        owned = any(m == "" or name == m or name.startswith(f"{m}.") or m.startswith(f"{name}.") for m in mine)
        if not owned:
            parent, _, leaf = name.rpartition(".")
            try:
                model.get_submodule(parent)._modules[leaf] = None
            except AttributeError:  # its parent went already
                continue
    for name in [n for n, _ in model.named_parameters(remove_duplicate=False)]:
        if stage_of[name] != index:  # a parameter of a module that several stages hold
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = None
    return Stage(model, [links[i] for i in keep[index]], streams, fused_loss)


def _home(name: str, home: dict[str, int]) -> int:
    found = [stage for module, stage in home.items() if module == "" or name == module or name.startswith(f"{module}.")]
    if not found:
        raise ValueError(f"parameter {name} belongs to no link of the plan's chain; add it or its module to one")
    return found[0]


def _mark(
    model: nn.Module, first: str, others: list[str], stage_of: dict[str, int], stages: list[int], count: int, index: int
) -> None:
    if stages != [0, count - 1]:
        raise ValueError(
            f"{first} is tied across stages {stages}; tied parameters may sit on the first and the last stage only"
        )
    for name in (first, *others):
        if stage_of[name] == index:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), TIES, {leaf: (first, index == stages[0])})
