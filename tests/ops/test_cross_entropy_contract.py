"""cross_entropy and torch: gradcheck, opcheck, compilation, refusals; and Triton's interpreter, for both files.

Triton serves a CPU only in its interpreter, which has to be chosen before it is imported: `test_in_the_interpreter`
runs the tests that carry "triton" in their name in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

from megacore.ops import cross_entropy, use
from tests.ops.cross_entropy_cases import IMPLS, KERNELS, OPTIONS, PATHS, inputs, serving, with_gradient


@pytest.fixture(params=PATHS)
def impl(request):
    """The implementation that serves cross_entropy during the test."""
    with serving(request.param) as name:
        yield name


# ---- contracts of torch ----


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_gradcheck(impl, options):
    x, y, _ = inputs(3, 5, torch.float64)
    y[y == -100] = options.get("ignore_index", -100)
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, y, vocab_size=5, **options), x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [k for k in KERNELS if k in IMPLS])
def test_opcheck(kind, dtype):
    x, y, g = inputs(6, 10, dtype)
    ops, suffix, how = torch.ops.megacore, KERNELS[kind], (-100, 0.1, 1e-3)
    loss, norm = ops.cross_entropy(x, y, 0, 10, "", *how, False, kind)
    stats = (x, y, 0, 10, -100)
    packed = getattr(ops, "cross_entropy_stats" + suffix)(*stats)
    backward = (g.float(), x, y, norm, 0, 10, *how)
    for name, args in {
        "stats" + suffix: stats,
        "merge" + suffix: (packed, y, 1, 10, *how),
        "bwd" + suffix: backward,
        "bwd" + suffix + "_": (g.float(), x.clone(), *backward[2:]),
    }.items():
        opcheck(getattr(ops, "cross_entropy_" + name).default, args)
    for inplace in (False, True):
        opcheck(ops.cross_entropy.default, (x.clone().requires_grad_(), y, 0, 10, "", *how, inplace, kind))


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_in_one_graph(inplace):
    x, y, g = inputs(6, 10)

    def f(x, y):
        return cross_entropy(x * 2, y, vocab_size=10, label_smoothing=0.1, reduction="sum", inplace_backward=inplace)

    found = []
    for run in (f, torch.compile(f, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        run(leaf, y).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="target"):  # values are checked in compiled code too
        torch.compile(f, fullgraph=True)(x, y + 10)


def test_choice_is_captured_at_forward():
    x, y, _ = inputs(6, 10)
    x.requires_grad_()
    with use("reference", "cross_entropy"):
        loss = cross_entropy(x, y, vocab_size=10)
    ours = cross_entropy(x, y, vocab_size=10)
    names = [[n.name() for n in [t.grad_fn, *(f for f, _ in t.grad_fn.next_functions)]] for t in (loss, ours)]
    assert "megacore" not in str(names[0]) and "megacore" in str(names[1])


def test_second_derivative_is_refused():
    x, y, _ = inputs(6, 10)
    x.requires_grad_()
    loss = cross_entropy(x, y, vocab_size=10, inplace_backward=True)
    (dx,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    assert dx.data_ptr() != x.data_ptr(), "a graph of the gradient needs the logits"
    with pytest.raises(NotImplementedError, match="reference"):
        dx.sum().backward()


def test_loss_does_not_depend_on_the_number_of_threads():
    x, y, g = inputs(70, 3000)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(with_gradient(x, y, g))
    finally:
        torch.set_num_threads(before)
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0]) and torch.equal(gradient, found[0][1])


# ---- refusals ----


@pytest.mark.parametrize("bad", [50, -1])
def test_ids_outside_the_vocabulary(impl, bad):
    """MB-11 (d): padding columns do not make an id valid."""
    x, y, _ = inputs(6, 52, ignored=False)
    y %= 50
    y[4] = bad
    with pytest.raises(ValueError, match=rf"cross_entropy: target\[4\] is {bad}; wanted an id in \[0, 50\)"):
        cross_entropy(x, y, vocab_size=50)
    y[4] = -100
    assert cross_entropy(x, y, vocab_size=50)[4] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a | {"logits": a["logits"].long()}, ["logits", "int64", "fp32"]),
        (lambda a: a | {"target": a["target"].int()}, ["target", "int32", "int64"]),
        (lambda a: a | {"target": a["target"][:3]}, ["target", r"\[3\]", r"\[6\]"]),
        (lambda a: a | {"target": a["target"].to("meta")}, ["target", "meta", "cpu"]),
        (lambda a: a | {"vocab_size": 0}, ["vocab_size", "0", "at least 1"]),
        (lambda a: a | {"vocab_size": 12}, ["logits", r"\[0, 10\)", "vocab_size=12"]),
        (lambda a: a | {"vocab_start": 3}, ["logits", r"\[3, 10\)", "vocab_size=10", "vocab_start"]),
        (lambda a: a | {"vocab_start": -1}, ["vocab_start", "-1", "at least 0"]),
        (lambda a: a | {"label_smoothing": 1.5}, ["label_smoothing", "1.5", r"\[0, 1\]"]),
        (lambda a: a | {"z_loss": -1.0}, ["z_loss", "-1.0"]),
        (lambda a: a | {"reduction": "avg"}, ["reduction", "avg", "'mean'"]),
        (lambda a: a | {"logits": a["logits"][:1].expand(6, 10), "inplace_backward": True}, ["logits", "strides"]),
    ],
)
def test_refusals_name_operator_argument_got_and_wanted(change, words):
    x, y, _ = inputs(6, 10, ignored=False)
    with pytest.raises(ValueError, match=".*".join(["cross_entropy", *words])) as caught:
        cross_entropy(**change({"logits": x, "target": y, "vocab_size": 10}))
    assert "\n" not in str(caught.value)


# ---- Triton ----


@pytest.mark.skipif("triton" in IMPLS, reason="this is the interpreter's process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here")
def test_in_the_interpreter():
    files = [str(path) for path in Path(__file__).parent.glob("test_cross_entropy*.py") if "parallel" not in path.name]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-v", "-p", "no:cacheprovider", *files, "-k", "triton"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
