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
        self,
        model: nn.Module,
        links: Sequence[Link],
        streams: Streams | None = None,
        fused_loss: bool = False,
        borrowed: frozenset[str] = frozenset(),
    ):
        super().__init__()
        self.model, self.links, self.streams = model, tuple(links), streams
        self.borrowed = borrowed  # buffers that an earlier stage holds too, and answers for
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

    A module that links of several stages list is kept on each of them. A parameter with copies on several stages (tied,
    or of such a module) is marked for records(); they must be the first and the last stage, where the embedding group
    is. Raises ValueError where a parameter belongs to no link, or copies cannot be served.
    """
    home: dict[str, set[int]] = {}
    for stage, held in enumerate(keep):
        for module in (module for link in held for module in links[link].modules):
            home.setdefault(module, set()).add(stage)
    stages_of = {name: _stages(name, home) for name, _ in model.named_parameters(remove_duplicate=False)}
    for names in _objects(model):
        stages = sorted(set().union(*(stages_of[name] for name in names)))
        if len(stages) > 1:
            _mark(model, names, stages_of, stages, len(keep), index)
    mine = [module for module, stages in home.items() if index in stages]
    for name in [n for n, _ in model.named_modules(remove_duplicate=False) if n]:
        owned = any(m == "" or name == m or name.startswith(f"{m}.") or m.startswith(f"{name}.") for m in mine)
        if not owned:
            parent, _, leaf = name.rpartition(".")
            try:
                model.get_submodule(parent)._modules[leaf] = None
            except AttributeError:  # its parent went already
                continue
    _drop_parameters(model, stages_of, index)
    borrowed = _drop_buffers(model, home, index)
    return Stage(model, [links[i] for i in keep[index]], streams, fused_loss, borrowed)


def _drop_parameters(model: nn.Module, stages_of: dict[str, set[int]], index: int) -> None:
    """Parameters of modules that several stages hold in part go where they are not this stage's. One object may have
    several names: it stays while one of them is."""
    present = dict(model.named_parameters(remove_duplicate=False))
    needed = {id(param) for name, param in present.items() if index in stages_of[name]}
    for name, param in present.items():
        if index not in stages_of[name] and id(param) not in needed:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = None


def _drop_buffers(model: nn.Module, home: dict[str, set[int]], index: int) -> frozenset[str]:
    """Buffers go where no link of this stage lists them; one that no link lists at all (of the model itself, say) stays
    on every stage. Returns those that an earlier stage holds too."""
    borrowed = set()
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        stages = _listed(name, home)
        if stages and index not in stages:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._buffers[leaf] = None
        elif index != min(stages, default=0):
            borrowed.add(name)
    return frozenset(borrowed)


def _objects(model: nn.Module) -> list[list[str]]:
    """The names of every parameter, those of one object together, first name first."""
    several = tied_names(model)
    others = {name for names in several for name in names}
    single = [[n] for n, _ in model.named_parameters(remove_duplicate=False) if n not in others]
    return single + several


def _listed(name: str, home: dict[str, set[int]]) -> set[int]:
    """The stages whose links list `name` or a module around it."""
    around = [
        stages for module, stages in home.items() if module == "" or name == module or name.startswith(f"{module}.")
    ]
    return set().union(*around)


def _stages(name: str, home: dict[str, set[int]]) -> set[int]:
    if not (found := _listed(name, home)):
        raise ValueError(f"parameter {name} belongs to no link of the plan's chain; add it or its module to one")
    return found


def _mark(
    model: nn.Module, names: list[str], stages_of: dict[str, set[int]], stages: list[int], count: int, index: int
) -> None:
    first = names[0]
    if stages != [0, count - 1]:
        raise ValueError(
            f"{first} has copies on stages {stages}; copies may be on the first and the last stage only: list its "
            "module in the links of one stage and hand on what it computes, or choose a smaller pp"
        )
    for name in names:
        if index in stages_of[name]:
            owner, _, leaf = name.rpartition(".")
            ties = getattr(model.get_submodule(owner), TIES, {})
            setattr(model.get_submodule(owner), TIES, {**ties, leaf: (first, index == stages[0])})
