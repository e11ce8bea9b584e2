"""MB-11 (c), (d): padding index and ids outside the vocabulary; uneven and padded shards against nn.Embedding."""

import pytest
import torch
from torch import nn

from megacore.comm.mesh import SOLO, Group, Layout, Mesh
from megacore.parallel.embedding import VocabParallelEmbedding, vocab_pieces, vocab_range
from megacore.parallel.record import records


def table(rows, width, padding_idx=None):
    embedding = nn.Embedding(rows, width, padding_idx=padding_idx, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(rows * width, dtype=torch.float64).view(rows, width).sin())
    return embedding


def look_up(tp, rows, multiple, padding_idx, ids):
    mesh = Mesh.build(Layout(tp=tp))
    embedding = VocabParallelEmbedding.from_embedding(table(rows, 6, padding_idx), mesh.tp, multiple)
    y = embedding(ids)
    (y * torch.arange(y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
    rec = records(embedding, mesh)["weight"]
    full = torch.zeros(rec.shape, dtype=torch.float64)
    rec.add_into_full(embedding.weight.grad, full)
    true = embedding.stop - embedding.start
    mesh.destroy()
    return y.detach(), full, embedding.weight.grad[true:].abs().sum().item()


@pytest.mark.parametrize("tp, rows, multiple", [(1, 50, 1), (2, 50, 1), (4, 50, 1), (4, 50, 8), (3, 12, 1), (4, 5, 4)])
def test_lookup_and_gradient_are_those_of_the_plain_table(pool, tp, rows, multiple):
    ids = torch.arange(24).view(3, 8) * 7 % rows
    plain = table(rows, 6)
    y = plain(ids)
    (y * torch.arange(y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
    answers = pool.run(look_up, tp, rows, multiple, None, ids, world=tp)
    for got, _, padding in answers:
        assert torch.equal(got, y)
        assert padding == 0.0
    assert torch.equal(sum(full for _, full, _ in answers), plain.weight.grad)


def test_the_padding_index_is_a_global_one(pool):
    ids = torch.tensor([[1, 5, 9]])
    answers = pool.run(look_up, 3, 12, 1, 5, ids, world=3)
    grad = sum(full for _, full, _ in answers).abs().sum(1)
    assert grad[5] == 0 and grad[1] > 0 and grad[9] > 0  # 1, 5 and 9 are local row 1 of their shards


def bad_id(tp, bad):
    mesh = Mesh.build(Layout(tp=tp))
    embedding = VocabParallelEmbedding(50, 4, group=mesh.tp)
    try:
        embedding(torch.tensor([[1, bad]]))
    except ValueError as error:
        return str(error)
    finally:
        mesh.destroy()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bad", [50, -1])
def test_an_id_outside_the_vocabulary_is_an_error_on_every_rank(pool, tp, bad):
    for message in pool.run(bad_id, tp, bad, world=tp):
        assert f"token id {bad} is outside the vocabulary [0, 50)" in message and "\n" not in message


@pytest.mark.parametrize("vocab, parts, multiple", [(50, 4, 1), (50, 4, 8), (5, 4, 4), (50257, 8, 128), (8, 8, 1)])
def test_shards_cover_the_vocabulary_once(vocab, parts, multiple):
    shares = [vocab_range(vocab, parts, i, multiple) for i in range(parts)]
    assert [v for start, stop, _ in shares for v in range(start, stop)] == list(range(vocab))
    assert all(stop - start <= rows and rows % multiple == 0 for start, stop, rows in shares)


def test_more_ranks_than_ids_are_refused():
    with pytest.raises(ValueError, match="tp=4 is more than vocab_size=3"):
        vocab_pieces(3, Group((0, 1, 2, 3), 0))


def test_tables_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="max_norm"):
        VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, max_norm=1.0), SOLO)
