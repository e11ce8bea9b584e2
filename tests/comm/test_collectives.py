"""Autograd collectives against plain torch on the joined tensors; MB-23: inputs and upstream gradients that are
views."""

import pytest
import torch

from megacore.comm import collectives as c
from megacore.comm.mesh import SOLO, Layout, Mesh

VIEWS = ("plain", "t", "columns", "rows", "expanded", "offset", "swapped", "slice")


def view(kind, rows, cols, seed):
    """A [rows, cols] fp64 tensor of the kind, a leaf underneath it, and where its values come from."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    if kind == "t":
        base = rand(cols, rows)
        return base, lambda b: b.t()
    if kind == "columns":
        return rand(rows, 2 * cols), lambda b: b[:, ::2]
    if kind == "rows":
        return rand(2 * rows, cols), lambda b: b[::2]
    if kind == "expanded":
        return rand(1, cols), lambda b: b.expand(rows, cols)
    if kind == "offset":
        return rand(rows * cols + 1), lambda b: b[1:].view(rows, cols)
    if kind == "swapped":
        return rand(cols, 1, rows), lambda b: b.transpose(0, 2)[:, 0]
    if kind == "slice":
        return rand(rows, 3 * cols), lambda b: b[:, cols : 2 * cols]
    return rand(rows, cols), lambda b: b


CALLS = {
    "copy_to": lambda x, g: c.copy_to(x, g),
    "reduce_from": lambda x, g: c.reduce_from(x, g),
    "gather_from": lambda x, g: c.gather_from(x, g, 1),
    "scatter_to": lambda x, g: c.scatter_to(x, g, 1),
    "gather_seq": lambda x, g: c.gather_seq(x, g, 0),
    "reduce_scatter_seq": lambda x, g: c.reduce_scatter_seq(x, g, 0),
}


def outputs(name, kind, up, contiguous):
    """y and the base's gradient on this rank, for one kind of input view and upstream gradient."""
    mesh = Mesh.build(Layout(tp=2))
    base, look = view(kind, 6, 10, seed=mesh.rank)
    base.requires_grad_()
    x = look(base).contiguous() if contiguous else look(base)
    y = CALLS[name](x, mesh.tp)
    up_base, up_look = view(up, *y.shape, seed=9)  # the same on both ranks, as a replicated result's gradient is
    dy = up_look(up_base)
    y.backward(dy.contiguous() if contiguous else dy)
    values = y.detach().clone(), base.grad.clone()
    mesh.destroy()
    return values


def all_outputs():
    found = {}
    for name in CALLS:
        for kind in VIEWS:
            up = VIEWS[(VIEWS.index(kind) + 3) % len(VIEWS)]
            found[name, kind] = (outputs(name, kind, up, False), outputs(name, kind, up, True))
    return found


def test_views_give_the_same_bits_as_contiguous_copies(pool):
    for answers in pool.run(all_outputs, world=2):
        for case, (strided, plain) in answers.items():
            assert torch.equal(strided[0], plain[0]), case
            assert torch.equal(strided[1], plain[1]), case


def against_torch(sizes):
    """Each call on uneven shards, with a loss that differs by rank where the direction allows it."""
    mesh = Mesh.build(Layout(tp=len(sizes)))
    g, n, r = mesh.tp, sum(sizes), mesh.rank
    gen = torch.Generator().manual_seed(0)
    full = torch.randn(n, 5, generator=gen, dtype=torch.float64)
    w = torch.randn(len(sizes), n, 5, generator=gen, dtype=torch.float64)  # rank's own weights on the whole
    start = sum(sizes[:r])
    own = slice(start, start + sizes[r])
    shard = full[own].clone().requires_grad_()
    errors = {}
    y = c.gather_from(shard, g, 0, sizes)
    (y * w[0]).sum().backward()
    errors["gather_from"] = ((y - full).abs().sum(), (shard.grad - w[0][own]).abs().sum())
    shard.grad = None
    y = c.gather_seq(shard, g, 0, sizes)
    (y * w[r]).sum().backward()
    errors["gather_seq"] = ((y - full).abs().sum(), (shard.grad - w.sum(0)[own]).abs().sum())
    whole = full.clone().requires_grad_()
    y = c.scatter_to(whole, g, 0, sizes)
    (y * w[0][own]).sum().backward()
    errors["scatter_to"] = ((y - full[own]).abs().sum(), (whole.grad - w[0]).abs().sum())
    mine = w[r].clone().requires_grad_()
    y = c.reduce_scatter_seq(mine, g, 0, sizes)
    (y * full[own]).sum().backward()
    errors["reduce_scatter_seq"] = ((y - w.sum(0)[own]).abs().sum(), (mine.grad - full).abs().sum())
    mine.grad = None
    y = c.reduce_from(mine, g)
    (y * full).sum().backward()
    errors["reduce_from"] = ((y - w.sum(0)).abs().sum(), (mine.grad - full).abs().sum())
    mine.grad = None
    y = c.copy_to(mine, g)
    (y * w[r]).sum().backward()
    errors["copy_to"] = ((y - mine).abs().sum(), (mine.grad - w.sum(0)).abs().sum())
    mesh.destroy()
    return {name: [float(e) for e in pair] for name, pair in errors.items()}


@pytest.mark.parametrize("sizes", [(4, 4), (3, 2, 2), (1, 5, 0, 2)])
def test_both_directions_against_the_joined_tensor(pool, sizes):
    for errors in pool.run(against_torch, sizes, world=len(sizes)):
        for name, pair in errors.items():
            assert max(pair) < 1e-12, (name, pair)


def bad_sizes():
    mesh = Mesh.build(Layout(tp=2))
    messages = []
    for call in (
        lambda: c.scatter_to(torch.zeros(5, 2), mesh.tp, 0),
        lambda: c.all_gather(torch.zeros(5, 2), mesh.tp, 0, (2, 2)),
        lambda: c.scatter_to(torch.zeros(5, 2), mesh.tp, 0, (3, 3)),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    mesh.destroy()
    return messages


def test_sizes_that_do_not_fit_are_refused(pool):
    for messages in pool.run(bad_sizes, world=2):
        assert (
            len(messages) == 3 and "does not divide by 2 ranks" in messages[0] and all("\n" not in m for m in messages)
        )


def test_a_group_of_one_is_the_identity():
    x = torch.randn(3, 4, requires_grad=True)
    for name, call in CALLS.items():
        assert call(x, SOLO) is x, name


def test_split_sizes():
    assert c.split_sizes(10, 4) == (3, 3, 2, 2)
    assert [c.split_range(10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
