"""Linear layers, split over the ranks of a tensor-parallel group.

T any leading dimensions, K inputs, N outputs, t ranks. Column-parallel splits N, row-parallel splits K.
Sizes that do not divide by t are split unevenly. A group of one gives the plain layer.

| layer  | forward                        | backward                                |
|--------|--------------------------------|-----------------------------------------|
| Column | x whole -> y split (or gathered) | dx summed over ranks                    |
| Row    | x split -> y summed over ranks   | dx split, nothing to communicate        |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.comm.collectives import copy_to, gather_from, gather_seq, reduce_from, reduce_scatter_seq, scatter_to
from megacore.comm.mesh import Group
from megacore.ops import linear, linear_gelu
from megacore.ops.linear_parts import widens
from megacore.parallel.materialize import Init, draw
from megacore.parallel.plain import check_heir, check_linear, inherit, reborn
from megacore.parallel.record import ParamRecord, Placement, Range, along, unit_range, whole

Pieces = tuple[tuple[Range, bool], ...]  # what one rank holds of the split dimension, and whether as first holder


def even_pieces(size: int, group: Group, units: int | None = None) -> tuple[Pieces, ...]:
    """One contiguous piece a rank, in whole units (a head, say) of size/units elements."""
    units = size if units is None else units
    if size % units:
        raise ValueError(f"size={size} does not divide into units={units}; units must divide it")
    if group.size > units != size:
        raise ValueError(f"tp={group.size} is more than units={units}: some rank has none; choose a smaller tp")
    return tuple(((unit_range(units, group.size, i, size // units), True),) for i in range(group.size))


def _width(pieces: Pieces) -> int:
    return sum(stop - start for (start, stop), _ in pieces)


class Sharded(nn.Module):
    """What the layers share: placements, initialisation, and copies of a plain layer's weights.

    A layer that is built directly takes its share of the plain layer that torch would build here: under the same
    torch.manual_seed on every rank its parts are those of nn.Linear or nn.Embedding, bit for bit.
    """

    group: Group

    def placements(self) -> dict[str, Placement]:
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self, init: Init, seed: int, name: str) -> None:
        """Draw the full parameters from the streams of (seed, name) and keep this rank's share."""
        for key, placed in self.placements().items():
            param = getattr(self, key)
            rec = ParamRecord(f"{name}.{key}", placed.shape, tuple(param.shape), placed.boxes)
            param.copy_(draw(rec, init, seed))

    def _adopt(self, plain: nn.Module) -> None:
        """Take this rank's share of a plain layer's parameters, in their dtype and on their device."""
        for key, placed in self.placements().items():
            old, new = getattr(plain, key), getattr(self, key)
            rec = ParamRecord(key, placed.shape, tuple(new.shape), placed.boxes)
            local = torch.empty_like(new, dtype=old.dtype) if old.is_meta else rec.slice_full(old.data)
            setattr(self, key, reborn(old, local))
        inherit(self, plain)


def checked(group: Group) -> Group:
    if not isinstance(group, Group):
        raise ValueError(f"group={group!r} is not a megacore Group; give one of a mesh, such as mesh.tp")
    return group


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """nn.Linear's product and its bits, which ours are not quicker than; but on a CPU without arithmetic of a 16-bit
    dtype torch's product is several times slower."""
    return linear(x, weight, bias) if widens(x.device.type, x.dtype) else F.linear(x, weight, bias)


def _plain_linear(layer: ColumnParallelLinear | RowParallelLinear) -> nn.Linear:
    weight = layer.weight
    plain = nn.Linear(
        layer.in_features, layer.out_features, layer.bias is not None, device=weight.device, dtype=weight.dtype
    )
    if layer.transposed:
        plain.weight = nn.Parameter(plain.weight.detach().t().contiguous())
    return plain


class ColumnParallelLinear(Sharded):
    """y[..., n] = act(sum_k x[..., k] W[n, k] + b[n]) for the columns n of this rank.

    activation: None, "tanh" or "none" (erf): fused GeLU. gather_output: y of all ranks, joined. skip_bias_add: return
    (y without bias, bias). pieces: what each rank holds of N (default: even). padded: local rows, where more than the
    true ones (a padded vocabulary). transposed: the weight is stored [K, N], as in Hugging Face's Conv1D.
    sequence_parallel: x is split along sequence_dim, and gathered here. Cost a rank: 2 T K N/t FLOP, one all-reduce of
    dx [T, K] in backward.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        activation: str | None = None,
        pieces: Sequence[Pieces] | None = None,
        padded: int | None = None,
        transposed: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if skip_bias_add and (gather_output or activation):
            raise ValueError(
                "skip_bias_add=True leaves the bias to the caller, before any activation or gather; drop one of them"
            )
        self.in_features, self.out_features, self.group = in_features, out_features, checked(group)
        self.gather_output, self.skip_bias_add, self.activation = gather_output, skip_bias_add, activation
        self.transposed, self.sequence_parallel, self.sequence_dim = transposed, sequence_parallel, sequence_dim
        self.pieces = tuple(pieces) if pieces is not None else even_pieces(out_features, group)
        self.local = padded or _width(self.pieces[group.index])
        if padded is None and not all(map(_width, self.pieces)):  # on every rank, not only where nothing is left
            raise ValueError(
                f"tp={group.size} is more than out_features={out_features}: some rank has none; choose a smaller tp"
            )
        shape = (in_features, self.local) if transposed else (self.local, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.local, device=device, dtype=dtype)) if bias else None
        self._order = self._full_order()
        if not self.weight.is_meta:
            self._adopt(_plain_linear(self))

    def placements(self) -> dict[str, Placement]:
        mine = self.pieces[self.group.index]
        # a piece that other ranks hold too sees only their own columns' gradient there: it must be summed
        shared = any(not first for rank in self.pieces for _, first in rank)
        dim, shape = int(self.transposed), (self.out_features, self.in_features)
        shape = shape[::-1] if self.transposed else shape
        found = {"weight": Placement(shape, along(shape, dim, mine), shared)}
        if self.bias is not None:
            found["bias"] = Placement((self.out_features,), along((self.out_features,), 0, mine), shared)
        return found

    def _full_order(self) -> list[int] | None:
        """Where each full column lies among the gathered ones; None if they are in order already."""
        at, place = 0, {}
        for rank in self.pieces:
            for (start, stop), first in rank:
                if first:
                    place.update(zip(range(start, stop), range(at, at + stop - start), strict=True))
                at += stop - start
        order = [place[n] for n in range(self.out_features)] if len(place) == self.out_features else None
        return None if order == list(range(at)) else order

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:  # [..., K] -> [..., N/t]
        enter = (
            (lambda v: gather_seq(v, self.group, self.sequence_dim))
            if self.sequence_parallel
            else (lambda v: copy_to(v, self.group))
        )
        x = enter(x)
        weight = self.weight.t() if self.transposed else self.weight
        if self.skip_bias_add:
            return _linear(x, weight), self.bias
        if self.activation is not None:
            y = linear_gelu(x, weight, self.bias, approximate=self.activation)
        else:
            y = _linear(x, weight, self.bias)
        return self._gather(y) if self.gather_output else y

    def _gather(self, y: Tensor) -> Tensor:
        y = gather_from(y, self.group, -1, [_width(p) for p in self.pieces])
        return y if self._order is None else y[..., self._order]

    @classmethod
    def like(cls, linear: nn.Module, group: Group, **options) -> ColumnParallelLinear:
        """This rank's columns of a plain nn.Linear (or Conv1D with transposed=True), on the meta device: the shape of
        what `from_linear` gives. ValueError for a module that is more than that."""
        transposed = bool(options.get("transposed"))
        check_linear(linear, transposed)
        n, k = linear.weight.shape[::-1] if transposed else linear.weight.shape
        made = cls(k, n, linear.bias is not None, group=group, device="meta", dtype=linear.weight.dtype, **options)
        check_heir(made, linear)
        return made

    @classmethod
    def from_linear(cls, linear: nn.Module, group: Group, **options) -> ColumnParallelLinear:
        """`like`, with this rank's share of the weights; a meta layer gives a meta layer."""
        made = cls.like(linear, group, **options)
        made._adopt(linear)
        return made

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, local={self.local}, activation={self.activation}"


class RowParallelLinear(Sharded):
    """y[..., n] = sum over ranks of sum_k x[..., k] W[n, k], + b[n] once, for the inputs k of each rank.

    input_is_parallel: x holds this rank's K/t inputs (default); otherwise it is cut here. sequence_parallel: y is left
    split along sequence_dim. Cost a rank: 2 T K/t N FLOP, one all-reduce of y [T, N] in forward. The bias is added
    after the sum, so its gradient is whole on every rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        pieces: Sequence[Pieces] | None = None,
        transposed: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.group = in_features, out_features, checked(group)
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.transposed, self.sequence_parallel, self.sequence_dim = transposed, sequence_parallel, sequence_dim
        self.pieces = tuple(pieces) if pieces is not None else even_pieces(in_features, group)
        self.local = _width(self.pieces[group.index])
        if not all(map(_width, self.pieces)):
            raise ValueError(
                f"tp={group.size} is more than in_features={in_features}: some rank has none; choose a smaller tp"
            )
        shape = (self.local, out_features) if transposed else (out_features, self.local)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        if not self.weight.is_meta:
            self._adopt(_plain_linear(self))

    def placements(self) -> dict[str, Placement]:
        shape = (self.in_features, self.out_features) if self.transposed else (self.out_features, self.in_features)
        found = {"weight": Placement(shape, along(shape, 1 - int(self.transposed), self.pieces[self.group.index]))}
        if self.bias is not None:
            first = self.group.index == 0
            found["bias"] = Placement(
                (self.out_features,), whole((self.out_features,), first), shared=self.sequence_parallel
            )
        return found

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:  # [..., K/t] -> [..., N]
        if not self.input_is_parallel:
            x = scatter_to(x, self.group, -1, [_width(p) for p in self.pieces])
        y = _linear(x, self.weight.t() if self.transposed else self.weight)
        y = (
            reduce_scatter_seq(y, self.group, self.sequence_dim)
            if self.sequence_parallel
            else reduce_from(y, self.group)
        )
        if self.skip_bias_add:
            return y, self.bias
        # under autocast y has its dtype and the bias its own: as in F.linear, the result has that of y
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @classmethod
    def like(cls, linear: nn.Module, group: Group, **options) -> RowParallelLinear:
        """This rank's inputs of a plain nn.Linear (or Conv1D with transposed=True), on the meta device: the shape of
        what `from_linear` gives. ValueError for a module that is more than that."""
        transposed = bool(options.get("transposed"))
        check_linear(linear, transposed)
        n, k = linear.weight.shape[::-1] if transposed else linear.weight.shape
        made = cls(k, n, linear.bias is not None, group=group, device="meta", dtype=linear.weight.dtype, **options)
        check_heir(made, linear)
        return made

    @classmethod
    def from_linear(cls, linear: nn.Module, group: Group, **options) -> RowParallelLinear:
        """`like`, with this rank's share of the weights; a meta layer gives a meta layer."""
        made = cls.like(linear, group, **options)
        made._adopt(linear)
        return made

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, local={self.local}"
