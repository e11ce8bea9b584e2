"""The one definition of the loss, on logits that stay split by vocabulary: given, or left to the loss to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.comm.mesh import Group
from megacore.ops import cross_entropy, linear_cross_entropy
from megacore.parallel.batch import IGNORE
from megacore.parallel.embedding import vocab_range
from megacore.parallel.head import Unprojected
from megacore.parallel.regions import check_region


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    group: Group,
    multiple: int = 1,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "none",
    inplace_backward: bool = False,
) -> Tensor:
    """Cross-entropy of logits [..., V/t] whose columns are this rank's share of the vocabulary, as
    VocabParallelEmbedding and a vocabulary-parallel head lay it out (`multiple` as there). See
    megacore.ops.cross_entropy for the formula. Raises ValueError where a whole parameter acts on the split logits."""
    if group.size > 1 and not torch.compiler.is_compiling():
        check_region(logits, "the loss")
    start, _, _ = vocab_range(vocab_size, group.size, group.index, multiple)
    return cross_entropy(
        logits,
        target,
        vocab_size=vocab_size,
        vocab_start=start,
        group=group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        inplace_backward=inplace_backward,
    )


def head_cross_entropy(
    logits: Unprojected,
    target: Tensor,
    *,
    vocab_size: int,
    group: Group,
    multiple: int = 1,
    ignore_index: int = IGNORE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    scale: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """scale * the loss of logits that were not computed, as a VocabHead gives them inside `unprojected`. See
    megacore.ops.linear_cross_entropy."""
    start, _, _ = vocab_range(vocab_size, group.size, group.index, multiple)
    return linear_cross_entropy(
        logits.hidden,
        logits.weight,
        target,
        bias=logits.bias,
        vocab_size=vocab_size,
        vocab_start=start,
        group=group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        scale=scale,
        chunk_rows=chunk_rows,
    )
