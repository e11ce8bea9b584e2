"""What the workers do in checkpoint tests; sharded_model says what each rank holds."""

from __future__ import annotations

from megacore.comm.mesh import Layout, Mesh
from megacore.train import checkpoint
from megacore.train.agreement import CheckpointError
from tests.train import sharded_model as sm

TWO = Layout(tp=2)
EXTRA = {"step": 10, "tokens": 4096, "model": {"name": "gpt", "heads": 2, "vocab_size": sm.VOCAB}}


def save_step(directory, layout, step=10, salt=0, keep=None):
    mesh = Mesh.build(layout)
    tensors = sm.logical(layout, mesh.rank, True, salt)
    return str(checkpoint.save(directory, step, tensors, EXTRA, group=mesh.world, replicas=mesh.dp_cp, keep=keep))


def load_newest(directory, layout, salt=0):
    """The step that was loaded, and the names of the tensors that are not what they should be."""
    mesh = Mesh.build(layout)
    found = checkpoint.find(directory, group=mesh.world)
    tensors = sm.logical(layout, mesh.rank, False)
    checkpoint.load(found, tensors, group=mesh.world, model=EXTRA["model"])
    want = sm.logical(layout, mesh.rank, True, salt)
    wrong = [name for name in want if not sm.same_bits(tensors[name].local, want[name].local)]
    return found.step, found.extra, wrong, found.skipped


def load_error(directory, layout, change=None, verify=False):
    """What loading says on this rank."""
    mesh = Mesh.build(layout)
    tensors, model = sm.logical(layout, mesh.rank, False), dict(EXTRA["model"])
    if change is not None:
        change(tensors, model, mesh.rank)
    try:
        found = checkpoint.find(directory, group=mesh.world, verify=verify)
        checkpoint.load(found, tensors, group=mesh.world, model=model)
    except CheckpointError as error:
        return str(error)
