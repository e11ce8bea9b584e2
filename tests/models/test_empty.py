"""A batch or a sequence of size 0: what plain torch gives, a result of the shape and zero gradients."""

import pytest
import torch
import torch.nn.functional as F

from megacore.comm.mesh import Layout, Mesh
from megacore.models import gpt
from megacore.models.attention import CausalSelfAttention
from megacore.ops import (
    cross_entropy,
    dropout,
    implementations,
    linear,
    linear_cross_entropy,
    linear_gelu,
    linear_swiglu,
    use,
)
from megacore.parallel.batch import MicroBatch
from megacore.parallel.plan import parallelize
from megacore.parallel.random import Streams

EMPTY = [(0, 5), (2, 0), (0, 0)]
by_shape = pytest.mark.parametrize("shape", EMPTY, ids=str)


def micro_batch(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    return MicroBatch.of(ids, ids)


def check_zero(module, x):
    for name, p in module.named_parameters():
        assert p.grad is not None and not p.grad.any(), name
    assert x.grad.shape == x.shape


@by_shape
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention(shape, train, p, kv_heads):
    streams = Streams()
    attention = CausalSelfAttention(8, 4, kv_heads, p, streams).train(train)
    x = torch.randn(*shape, 8, requires_grad=True)
    with streams.at(micro_batch(shape)):
        y = attention(x)
    assert y.shape == x.shape
    y.sum().backward()
    check_zero(attention, x)


@by_shape
@pytest.mark.parametrize("impl", ["cpp", "reference"])
@pytest.mark.parametrize("op", [linear, linear_gelu, linear_swiglu], ids=lambda f: f.__name__)
def test_linear_family(op, impl, shape):
    assert impl in implementations(op.__name__)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        leaves = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((*shape, 4), (6, 4), (6,))]
        with use(impl, op.__name__):
            y = op(*leaves)
        assert y.shape == (*shape, 3 if op is linear_swiglu else 6) and y.dtype == dtype
        for got, like in zip(torch.autograd.grad(y, leaves, torch.ones_like(y)), leaves, strict=True):
            assert got.shape == like.shape and not got.any()


@by_shape
@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_losses(impl, shape):
    target = torch.zeros(shape, dtype=torch.int64)
    for reduction in ("none", "sum", "mean"):
        want = F.cross_entropy(torch.randn(*target.flatten().shape, 5), target.flatten(), reduction=reduction)
        want = want.view(shape) if reduction == "none" else want.nan_to_num()  # a mean of nothing is 0 here
        logits = torch.randn(*shape, 5, requires_grad=True)
        x, weight = torch.randn(*shape, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        with use(impl, "cross_entropy"), use(impl, "linear_cross_entropy"):
            plain = cross_entropy(logits, target, vocab_size=5, reduction=reduction)
            fused = linear_cross_entropy(x, weight, target, vocab_size=5, reduction=reduction)
        assert torch.equal(plain, want) and torch.equal(fused, want)
        (plain.sum() + fused.sum()).backward()
        assert logits.grad.shape == logits.shape and x.grad.shape == x.shape and not weight.grad.any()


@by_shape
@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_dropout(impl, shape):
    batch = micro_batch(shape)
    for middle in ((), (3,)):  # heads
        b, s = shape
        for features in (4, 0):
            x = torch.randn(b, *middle, s, features, requires_grad=True)
            with use(impl, "dropout"):
                y = dropout(x, 0.5, key=1, sample=batch.samples, position=batch.positions)
            y.sum().backward()
            assert y.shape == x.shape == x.grad.shape


def split_model(world, shape):
    config = gpt.GPTConfig(layers=2, hidden=16, heads=4, kv_heads=2, vocab_size=48, seq_length=8, dropout=0.1)
    mesh, _ = Mesh.build(Layout(tp=world)), torch.manual_seed(0)  # the same weights on every rank
    model = parallelize(gpt.GPT(config), mesh, gpt.plan(config))
    batch = micro_batch(shape)
    with model.streams.at(batch):
        logits = model(batch.ids)
    logits.sum().backward()
    mesh.destroy()
    return logits.shape, [name for name, p in model.named_parameters() if p.grad is None or p.grad.any()]


@by_shape
@pytest.mark.parametrize("tp", [1, 2])
def test_a_split_model(pool, tp, shape):
    for logits, wrong in pool.run(split_model, tp, shape, world=tp):
        assert logits == (*shape, 48 // tp) and not wrong
