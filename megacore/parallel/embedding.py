"""The embedding table, split by vocabulary over a tensor-parallel group. V vocabulary, H hidden, t ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.comm.collectives import reduce_from
from megacore.comm.mesh import Group
from megacore.parallel.layers import Pieces, Sharded, checked
from megacore.parallel.plain import check_embedding, check_heir
from megacore.parallel.record import Placement, along, unit_range


def vocab_range(vocab_size: int, parts: int, index: int, multiple: int = 1) -> tuple[int, int, int]:
    """(first id, stop id, local rows) of a rank. multiple = 1: shards differ by at most one row, no padding. Otherwise
    all shards have the same number of rows, a multiple of `multiple`; rows past the vocabulary are padding, at the
    end."""
    if multiple == 1:
        start, stop = unit_range(vocab_size, parts, index)
        return start, stop, stop - start
    rows = -(-vocab_size // (parts * multiple)) * multiple
    return index * rows, max(index * rows, min((index + 1) * rows, vocab_size)), rows


def vocab_pieces(vocab_size: int, group: Group, multiple: int = 1) -> tuple[Pieces, ...]:
    if group.size > vocab_size:
        raise ValueError(
            f"tp={group.size} is more than vocab_size={vocab_size}: a rank would have no row; choose tp <= {vocab_size}"
        )
    pieces = []
    for i in range(group.size):
        start, stop, _ = vocab_range(vocab_size, group.size, i, multiple)
        pieces.append((((start, stop), True),) if stop > start else ())
    return tuple(pieces)


class VocabParallelEmbedding(Sharded):
    """y[...] = table[id]: each rank looks up the ids of its own rows, zero for the others, summed over ranks.

    Ids outside [0, V) are an error at every t. Rows past V (see vocab_range) are padding and get zero gradient, and so
    does padding_idx. Cost: one all-reduce of y [T, H] in forward.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group,
        padding_idx: int | None = None,
        multiple: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.group = num_embeddings, embedding_dim, checked(group)
        self.padding_idx = padding_idx if padding_idx is None or padding_idx >= 0 else num_embeddings + padding_idx
        self.pieces = vocab_pieces(num_embeddings, group, multiple)
        self.start, self.stop, rows = vocab_range(num_embeddings, group.size, group.index, multiple)
        self.weight = nn.Parameter(torch.empty((rows, embedding_dim), device=device, dtype=dtype))
        if not self.weight.is_meta:
            plain = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
            self._adopt(plain)

    def placements(self) -> dict[str, Placement]:
        shape = (self.num_embeddings, self.embedding_dim)
        return {"weight": Placement(shape, along(shape, 0, self.pieces[self.group.index]))}

    def forward(self, ids: Tensor) -> Tensor:  # [...] int64 -> [..., H]
        self._check(ids)
        own = (ids >= self.start) & (ids < self.stop)
        local = torch.where(own, ids - self.start, 0)
        padding = self.padding_idx
        padding = padding - self.start if padding is not None and self.start <= padding < self.stop else None
        if self.group.size == 1:
            return F.embedding(local, self.weight, padding)
        # where, not multiplication: it also stops a foreign id's gradient from reaching row 0
        y = torch.where(own.unsqueeze(-1), F.embedding(local, self.weight, padding), 0.0)
        return reduce_from(y, self.group)

    def _check(self, ids: Tensor) -> None:
        inside = (ids >= 0) & (ids < self.num_embeddings)
        if ids.is_cuda:  # no wait for the device: the assertion fails there
            torch._assert_async(inside.all(), "embedding: a token id is outside the vocabulary")
        elif not bool(inside.all()):
            bad = int(ids[~inside][0])
            raise ValueError(
                f"embedding: token id {bad} is outside the vocabulary [0, {self.num_embeddings}); check the tokenizer"
            )

    @classmethod
    def like(cls, embedding: nn.Embedding, group: Group, multiple: int = 1) -> VocabParallelEmbedding:
        """This rank's rows of a plain nn.Embedding, on the meta device: the shape of what `from_embedding` gives.
        ValueError for a module that is more than that."""
        check_embedding(embedding)
        rows, width = embedding.weight.shape
        padding, dtype = embedding.padding_idx, embedding.weight.dtype
        made = cls(rows, width, group=group, padding_idx=padding, multiple=multiple, device="meta", dtype=dtype)
        check_heir(made, embedding)
        return made

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: Group, multiple: int = 1) -> VocabParallelEmbedding:
        """`like`, with this rank's share of the table; a meta table gives a meta table."""
        made = cls.like(embedding, group, multiple)
        made._adopt(embedding)
        return made

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {self.start}..{self.stop}"
