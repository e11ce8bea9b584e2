"""Derivatives beyond the first reverse one: right, or refused in one line. Never a zero tangent in silence."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from megacore.comm.collectives import split_range
from megacore.comm.mesh import Layout, Mesh
from megacore.ops import (
    WeightGrads,
    cross_entropy,
    dropout,
    linear,
    linear_cross_entropy,
    linear_gelu,
    linear_swiglu,
    use,
)

SCHEMAS = re.findall(r'm\.def\("(\w+)\(', Path(__file__).parents[2].joinpath("csrc/ops.cpp").read_text())
REFUSED = r"^{} has no forward-mode derivative \(jvp, jacfwd, forward_ad\); .+$"
PLACEHOLDERS = {"str": "", "int": 1, "SymInt": 1, "float": 0.5, "bool": False}


def arguments(op):
    """One for each argument of the schema, of its type; values and shapes do not fit."""
    kinds = [str(a.type) for a in op.default._schema.arguments]
    return [torch.ones(2, 2) if "Tensor" in k else PLACEHOLDERS[k] for k in kinds]


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_operator_loses_a_tangent(name):
    """Whichever tensor carries it, whether or not another one requires a gradient, under no_grad too."""
    op = getattr(torch.ops.megacore, name)
    tensors = [i for i, a in enumerate(arguments(op)) if isinstance(a, torch.Tensor)]
    assert tensors
    for which in tensors:
        for needs_grad in (False, True):
            args = arguments(op)
            args[tensors[-1]].requires_grad_(needs_grad)
            with forward_ad.dual_level(), torch.set_grad_enabled(needs_grad):
                args[which] = forward_ad.make_dual(args[which], torch.ones(2, 2))
                with pytest.raises(NotImplementedError, match=REFUSED.format(name)):
                    op(*args)


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    made = (torch.randn(s, generator=g, dtype=dtype) for s in ((3, 4), (3, 4), (6, 4), (6,)))
    return *made, torch.tensor([1, 5, -100])


X, TANGENT, W, B, Y = inputs()
WHERE = {"key": 7, "sample": torch.tensor([3]), "position": torch.arange(3)}
MASK = dropout(torch.ones(1, 3, 4), 0.5, **WHERE)[0].double()
FUNCTIONS = {  # ours, and the same in plain torch
    "linear": (lambda x: linear(x, W, B), lambda x: F.linear(x, W, B)),
    "linear_gelu": (lambda x: linear_gelu(x, W, B), lambda x: F.gelu(F.linear(x, W, B), approximate="tanh")),
    "linear_swiglu": (
        lambda x: linear_swiglu(x, W, B),
        lambda x: F.silu(F.linear(x, W[:3], B[:3])) * F.linear(x, W[3:], B[3:]),
    ),
    "cross_entropy": (
        lambda x: cross_entropy(x, Y.clamp(max=3), vocab_size=4, label_smoothing=0.1, z_loss=0.01),
        lambda x: _loss(x, Y.clamp(max=3)),
    ),
    "linear_cross_entropy": (
        lambda x: linear_cross_entropy(x, W, Y, bias=B, vocab_size=6, label_smoothing=0.1, z_loss=0.01),
        lambda x: _loss(F.linear(x, W, B), Y).sum() / 2,
    ),
    "dropout": (lambda x: dropout(x.view(1, 3, 4), 0.5, **WHERE).view(3, 4), lambda x: x * MASK),
}
by_function = pytest.mark.parametrize("op", FUNCTIONS)


def _loss(logits, target):
    loss = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    return (loss + 0.01 * logits.logsumexp(1) ** 2).masked_fill(target == -100, 0.0)


def by_dual_level(f, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent


FORWARD = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (TANGENT,))[1],
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "forward_ad": lambda f: by_dual_level(f, X, TANGENT),
    "forward_ad beside a gradient": lambda f: by_dual_level(f, X.clone().requires_grad_(), TANGENT).detach(),
    "jvp of vmap": lambda f: torch.func.jvp(torch.func.vmap(f), (X.expand(2, 3, 4),), (TANGENT.expand(2, 3, 4),))[1],
    "vmap of jvp": lambda f: torch.func.vmap(lambda t: torch.func.jvp(f, (X,), (t,))[1])(TANGENT.expand(2, 3, 4)),
}


@pytest.mark.parametrize("way", FORWARD)
@by_function
def test_forward_mode_is_refused_and_the_reference_has_it(op, way):
    ours, plain = FUNCTIONS[op]
    with pytest.raises(NotImplementedError, match=REFUSED.format(op)):
        FORWARD[way](ours)
    if "vmap" in way and "cross_entropy" in op:
        return  # the reference looks at values of targets, which vmap forbids
    with use("reference", op):
        got = FORWARD[way](ours)
    torch.testing.assert_close(got, FORWARD[way](plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [linear, linear_gelu, linear_swiglu])
def test_weight_grads_refuse_a_tangent(function):
    grads = WeightGrads().into(W, torch.zeros(6, 4, dtype=torch.float64))
    for impl in ("cpp", "reference"):
        with use(impl, function.__name__), pytest.raises(NotImplementedError, match="no forward-mode"):
            torch.func.jvp(lambda x: function(x, W, B, weight_grad=grads), (X,), (TANGENT,))
        with use(impl, function.__name__), pytest.raises(NotImplementedError, match="no forward-mode"):
            by_dual_level(lambda x: function(x, W, B, weight_grad=grads), X, TANGENT)


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.hessian, torch.func.jacrev], ids=lambda f: f.__name__
)
@by_function
def test_reverse_transforms_are_right_or_raise(op, transform):
    """torch.func.grad of an operator registered by torch.library raises in torch 2.13."""
    ours, plain = (lambda x, f=f: (f(x) ** 2).sum() for f in FUNCTIONS[op])
    want = transform(plain)(X)
    try:
        got = transform(ours)(X)
    except (RuntimeError, NotImplementedError):
        got = want
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with use("reference", op):
        torch.testing.assert_close(transform(ours)(X), want, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@by_function
def test_vmap_is_a_loop(op):
    ours, plain = FUNCTIONS[op]
    many = torch.stack([X, 2 * X])
    got = torch.func.vmap(ours)(many)
    torch.testing.assert_close(got, torch.stack([plain(x) for x in many]), rtol=1e-12, atol=1e-12)


def over_ranks(world):
    """Each rank's first derivative with a graph of it, and what the second and the tangent say."""
    group = Mesh.build(Layout(tp=world)).tp
    start, stop = split_range(6, world, group.index)
    found = []
    for op in ("cross_entropy", "linear_cross_entropy"):
        with use("reference", op):

            def f(x, op=op):
                how = {"vocab_size": 6, "vocab_start": start, "group": group}
                if op == "cross_entropy":
                    return cross_entropy(x @ W[start:stop].t(), Y, **how).sum()
                return linear_cross_entropy(x, W[start:stop], Y, reduction="sum", **how)

            x = X.clone().requires_grad_()
            (dx,) = torch.autograd.grad(f(x), x, create_graph=True)
            found.append(dx.detach())
            for attempt in (lambda dx=dx: dx.sum().backward(), lambda f=f: by_dual_level(f, X, TANGENT),
                            lambda f=f: torch.func.jvp(f, (X,), (TANGENT,))):  # fmt: skip
                try:
                    attempt()
                except NotImplementedError as error:
                    found.append(str(error))
                else:
                    found.append("nothing said")
    return found


def test_over_ranks_the_reference_has_the_first_derivative_alone(pool):
    """What a rank takes from the others is a constant to it: a second derivative or a tangent would lack a part."""
    x = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(F.linear(x, W), Y, reduction="sum"), x)
    ranks = pool.run(over_ranks, 2, world=2)
    for at, op in ((0, "cross_entropy"), (4, "linear_cross_entropy")):
        torch.testing.assert_close(sum(found[at] for found in ranks), want, rtol=1e-12, atol=1e-12)
        for found in ranks:
            why = f"{op} over 2 ranks has no second and no forward-mode derivative; in one process the reference has"
            assert found[at + 1 : at + 4] == [why] * 3
