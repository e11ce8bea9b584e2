"""Copies of a parameter within one model: tied embeddings over stages, key/value heads over tensor ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.data import GradBuffers
from megacore.parallel.record import Box, ParamRecord, records


def tied_copies(layout):
    mesh = Mesh.build(layout)
    module = nn.Module()
    recs = {}
    names = {0: "embed.weight"} | {layout.pp - 1: "head.weight"}
    name = names.get(mesh.stage, f"block{mesh.stage}.weight")
    leaf = nn.Module()
    leaf.weight = nn.Parameter(torch.zeros(6, 4))
    module.add_module(name.split(".")[0], leaf)
    for full, rec in records(module, mesh).items():
        tied = mesh.stage in names
        recs[full] = replace(rec, tie="embed.weight" if tied else None, tie_first=mesh.is_first_stage or not tied)
    buffers = GradBuffers(dict(module.named_parameters()), recs, mesh)
    buffers.expect()
    (leaf.weight * by_rank(mesh.rank)).sum().backward()
    buffers.finish()
    return buffers.grad(name).clone()


def by_rank(rank):
    return torch.sin(torch.arange(24.0).view(6, 4) + 24 * rank)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3), Layout(pp=3, dp=2)])
def test_tied_copies_are_summed_over_first_and_last_stage(pool, layout):
    grads = pool.run(tied_copies, layout, world=layout.world)
    for rank, grad in enumerate(grads):
        at = layout.coords(rank)
        stages = (0, layout.pp - 1) if at["pp"] in (0, layout.pp - 1) else (at["pp"],)
        ranks = [layout.rank(pp=p, dp=d) for p in stages for d in range(layout.dp)]
        torch.testing.assert_close(grad, sum(by_rank(r) for r in ranks), rtol=1e-6, atol=1e-6)
        assert torch.equal(grad, grads[layout.rank(pp=stages[0])])


QUERIES = {2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}  # query rows of each rank: 8 in two groups
KV_HEAD = {2: (0, 1), 3: (0, 0, 1), 4: (0, 0, 1, 1)}  # at tp 3 the last rank shares nothing but must take part


def qkv_record(tp, index, width=3):
    """Full [12, width]: 8 query rows, then 2 rows for each of 2 key/value heads."""
    start, count, kv = sum(QUERIES[tp][:index]), QUERIES[tp][index], KV_HEAD[tp][index]
    columns = (0, width)
    query = Box(((start, start + count), columns), ((0, count), columns))
    key = Box(((8 + 2 * kv, 10 + 2 * kv), columns), ((count, count + 2), columns), KV_HEAD[tp].index(kv) == index)
    shared = KV_HEAD[tp].count(kv) > 1
    return ParamRecord("qkv", (12, width), (count + 2, width), (query, key), shared)


def shared_boxes(layout):
    mesh = Mesh.build(layout)
    rec = qkv_record(layout.tp, mesh.tp.index)
    module = nn.Module()
    module.qkv = nn.Parameter(torch.zeros(rec.local_shape, dtype=torch.float64))
    module.norm = nn.Parameter(torch.zeros(5, dtype=torch.float64))  # replicated, and its gradient is whole already
    recs = records(module, mesh) | {"qkv": rec}
    buffers = GradBuffers(dict(module.named_parameters()), recs, mesh)
    upstream = torch.sin(torch.arange(36.0).double() + 100 * mesh.rank).view(12, 3)
    ((module.qkv * rec.slice_full(upstream)).sum() + module.norm.sum()).backward()
    buffers.finish()
    assert torch.equal(buffers.grad("norm"), torch.full((5,), float(layout.dp), dtype=torch.float64))
    return buffers.grad("qkv").clone(), upstream


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=3), Layout(tp=4), Layout(tp=4, dp=2)])
def test_shared_boxes_hold_the_whole_gradient_everywhere(pool, layout):
    """MB-08's finalisation: a key/value head held by two ranks gets both ranks' parts."""
    results = pool.run(shared_boxes, layout, world=layout.world)
    full = torch.zeros(12, 3, dtype=torch.float64)  # each rank adds, at the places it holds, what its own backward gave
    for rank, (_, upstream) in enumerate(results):
        rec = qkv_record(layout.tp, layout.coords(rank)["tp"])
        rec.add_into_full(rec.slice_full(upstream), full)
    for rank, (grad, _) in enumerate(results):
        wanted = qkv_record(layout.tp, layout.coords(rank)["tp"]).slice_full(full)
        torch.testing.assert_close(grad, wanted, rtol=1e-14, atol=1e-15)
