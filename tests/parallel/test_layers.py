"""Column, row: MB-06, MB-12 (fan-dependent init), MB-23 (views), MB-24 (deepcopy); against plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megacore.comm.mesh import SOLO, Group, Layout, Mesh
from megacore.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.record import records
from megacore.parallel.styles import Column, Fused, Qkv, Row
from tests.parallel.gradients import fill, full_gradients, sgd


class Sandwich(nn.Module):
    """MB-06: positions -> norm -> 8->16 -> GeLU -> 16->8 + bias -> residual -> final norm."""

    def __init__(self):
        super().__init__()
        self.pos = nn.Embedding(4, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8)
        self.final_norm = nn.LayerNorm(8)

    def forward(self, x):
        x = x + self.pos(torch.arange(x.shape[1]))
        return self.final_norm(x + self.down(self.act(self.up(self.norm(x)))))


SANDWICH = Plan({"up": Column(activation="tanh"), "act": Fused(), "down": Row()}, vocab_size=1)


def run_sandwich(tp):
    mesh = Mesh.build(Layout(tp=tp))
    model = fill(Sandwich().double())
    parallelize(model, mesh, SANDWICH)
    x = torch.sin(torch.arange(32, dtype=torch.float64)).view(1, 4, 8)
    first = None
    for _ in range(5):
        y = model(x)
        (y * y.detach().cos()).sum().backward()
        first = first or (y.detach().clone(), full_gradients(model, mesh))
        sgd(model)
    copies = {
        n: p.detach().clone() for n, p in model.named_parameters() if records(model, mesh)[n].shape == tuple(p.shape)
    }
    mesh.destroy()
    return *first, copies


@pytest.mark.parametrize("tp", [1, 2, 4, 3])
def test_replicated_parameters_get_whole_gradients(pool, tp):
    plain = fill(Sandwich().double())
    x = torch.sin(torch.arange(32, dtype=torch.float64)).view(1, 4, 8)
    y = plain(x)
    (y * y.detach().cos()).sum().backward()
    answers = pool.run(run_sandwich, tp, world=tp)
    for got_y, _, copies in answers:
        torch.testing.assert_close(got_y, y, rtol=1e-13, atol=1e-13)
        for name, value in copies.items():  # after 5 steps of SGD still the same bits everywhere
            if name in answers[0][2]:
                assert torch.equal(value, answers[0][2][name]), name
    for name, p in plain.named_parameters():
        total = sum(grads[name] for _, grads, _ in answers)  # each element is counted by exactly one rank
        torch.testing.assert_close(total, p.grad, rtol=1e-12, atol=1e-13, msg=name)


def zero_weight_output(tp):
    mesh = Mesh.build(Layout(tp=tp))
    row = RowParallelLinear(16, 8, group=mesh.tp)
    with torch.no_grad():
        row.weight.zero_()
        row.bias.copy_(torch.arange(1.0, 9.0))
    y = row(torch.ones(1, 4, row.local))
    mesh.destroy()
    return y.detach()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_row_bias_enters_once(pool, tp):
    for y in pool.run(zero_weight_output, tp, world=tp):
        assert torch.equal(y, torch.arange(1.0, 9.0).expand(1, 4, 8))


def init_shards(tp):
    mesh = Mesh.build(Layout(tp=tp))

    def xavier(_, full, generator):
        nn.init.xavier_normal_(full, generator=generator)

    row = RowParallelLinear(256, 64, bias=False, group=mesh.tp)
    row.reset_parameters(xavier, seed=1234, name="row")
    mesh.destroy()
    return row.weight.detach()


def test_a_shard_is_a_slice_of_the_whole_tensor(pool):
    whole = pool.run(init_shards, 1, world=1)[0]
    assert abs(whole.std().item() - 0.0791) < 0.03 * 0.0791  # sqrt(2 / (256 + 64)): the FULL fan
    for tp in (2, 4):
        shards = pool.run(init_shards, tp, world=tp)
        assert torch.equal(torch.cat(shards, 1), whole)
        assert not torch.equal(shards[0], shards[1])


VIEWS = {
    "t": lambda: torch.randn(10, 6, dtype=torch.float64).t(),
    "columns": lambda: torch.randn(6, 20, dtype=torch.float64)[:, ::2],
    "rows": lambda: torch.randn(12, 10, dtype=torch.float64)[::2],
    "swapped": lambda: torch.randn(3, 2, 10, dtype=torch.float64).transpose(0, 1),
    "expanded": lambda: torch.randn(1, 10, dtype=torch.float64).expand(6, 10),
    "slice": lambda: torch.randn(6, 30, dtype=torch.float64)[:, 10:20],
    "offset": lambda: torch.randn(61, dtype=torch.float64)[1:].view(6, 10),
}


def run_views():
    mesh = Mesh.build(Layout(tp=2))
    torch.manual_seed(3)
    column = ColumnParallelLinear(10, 8, group=mesh.tp, activation="tanh", dtype=torch.float64)
    row = RowParallelLinear(8, 10, group=mesh.tp, dtype=torch.float64)
    same = {}
    for name, make in VIEWS.items():
        x = make()
        results = []
        for value in (x, x.contiguous()):
            leaf = value.detach().requires_grad_()
            y = row(column(leaf))
            y.backward(torch.ones(1, 1, dtype=torch.float64).expand_as(y) if value is x else torch.ones_like(y))
            results.append((y.detach(), leaf.grad.clone(), column.weight.grad.clone(), row.bias.grad.clone()))
            column.zero_grad(), row.zero_grad()
        same[name] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    mesh.destroy()
    return same


def test_views_give_the_bits_of_contiguous_copies(pool):
    for same in pool.run(run_views, world=2):
        assert all(same.values()), same


def gathered(tp):
    mesh = Mesh.build(Layout(tp=tp))
    torch.manual_seed(0)
    linear = nn.Linear(6, 8 * 3, dtype=torch.float64)
    pieces = Qkv(4, 4).pieces(24, mesh.tp)
    column = ColumnParallelLinear.from_linear(linear, mesh.tp, gather_output=True, pieces=pieces)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = column(x)
    w = torch.arange(y.numel(), dtype=torch.float64).view_as(y)
    (y * w).sum().backward()
    rec = records(column, mesh)["weight"]
    full = torch.zeros(rec.shape, dtype=torch.float64)
    rec.add_into_full(column.weight.grad, full)
    mesh.destroy()
    want = linear(x)
    (want * w).sum().backward()
    return (y - want).abs().max().item(), full, linear.weight.grad


def test_gathered_output_has_the_plain_order(pool):
    for tp in (2, 3):
        answers = pool.run(gathered, tp, world=tp)
        assert max(error for error, _, _ in answers) < 1e-14
        torch.testing.assert_close(sum(full for _, full, _ in answers), answers[0][2])


def test_from_linear_of_one_rank_is_the_plain_layer():
    linear = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    assert torch.equal(ColumnParallelLinear.from_linear(linear, SOLO)(x), linear(x))
    torch.testing.assert_close(RowParallelLinear.from_linear(linear, SOLO)(x), linear(x))
    y, bias = ColumnParallelLinear.from_linear(linear, SOLO, skip_bias_add=True)(x)
    torch.testing.assert_close(y + bias, linear(x))
    fused = ColumnParallelLinear.from_linear(linear, SOLO, activation="none")(x)
    torch.testing.assert_close(fused, F.gelu(linear(x)))


def test_a_copy_has_its_own_storage_and_keeps_its_records():
    group = Group((0, 1), 1)
    column = ColumnParallelLinear(6, 8, group=group)
    twin = copy.deepcopy(column)
    assert twin.group is group and twin.weight.data_ptr() != column.weight.data_ptr()
    assert twin.placements() == column.placements()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda g: ColumnParallelLinear(4, 1, group=g), "tp=2 is more than out_features=1"),
        (lambda g: RowParallelLinear(1, 4, group=g), "tp=2 is more than in_features=1"),
        (lambda g: ColumnParallelLinear(4, 8, group=g, skip_bias_add=True, activation="tanh"), "skip_bias_add=True"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_sizes_that_cannot_work_are_refused_on_every_rank(make, words, index):
    with pytest.raises(ValueError, match=words) as caught:
        make(Group((0, 1), index))
    assert "\n" not in str(caught.value)


def test_replacements_keep_training_or_eval_mode():
    model = Sandwich().eval()
    parallelize(model, Mesh(), SANDWICH)
    assert not any(m.training for m in model.modules())


def built(tp):
    mesh = Mesh.build(Layout(tp=tp))
    torch.manual_seed(3)
    layers = [
        ColumnParallelLinear(6, 8, group=mesh.tp),
        RowParallelLinear(8, 6, group=mesh.tp),
        ColumnParallelLinear(6, 8, group=mesh.tp, transposed=True),
    ]
    mesh.destroy()
    return [p.detach() for layer in layers for p in layer.parameters()]


def test_layers_built_directly_are_shares_of_torchs_own(pool):
    torch.manual_seed(3)
    a, b, c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8)
    shards = list(zip(*pool.run(built, 2, world=2), strict=True))
    joined = [torch.cat(s, dim) for s, dim in zip(shards, (0, 0, 1, None, 1, 0), strict=True) if dim is not None]
    want = (a.weight, a.bias, b.weight, c.weight.t(), c.bias)
    assert all(torch.equal(got, p) for got, p in zip(joined, want, strict=True))
    assert torch.equal(shards[3][0], b.bias) and torch.equal(shards[3][1], b.bias)


@pytest.mark.parametrize("group", [None, Mesh()])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ValueError, match="is not a megacore Group; give one of a mesh"):
        ColumnParallelLinear(4, 4, group=group)


def test_wrong_plans_are_refused():
    with pytest.raises(ValueError, match="plan is a dict, wanted a Plan"):
        parallelize(Sandwich(), Mesh(), {"up": Column()})
    with pytest.raises(ValueError, match=r"plan row 'pos': Row\(\) on pos: an Embedding is no nn.Linear"):
        parallelize(Sandwich(), Mesh(), Plan({"pos": Row()}, vocab_size=1))
    model = parallelize(Sandwich(), Mesh(), SANDWICH)
    with pytest.raises(ValueError, match="up is parallel already"):
        parallelize(model, Mesh(), SANDWICH)


def test_a_plan_row_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="'upp' matches no module"):
        parallelize(Sandwich(), Mesh(), Plan({"upp": Column()}, vocab_size=1))
