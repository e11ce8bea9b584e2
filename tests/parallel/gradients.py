"""What the tests of split layers share: weights by formula, the library's finalisation of gradients, plain SGD."""

import torch

from megacore.parallel.record import records
from megacore.parallel.replicas import SharedBoxes


def fill(module):
    for k, (name, p) in enumerate(module.named_parameters()):
        n = torch.arange(p.numel(), dtype=torch.float64)
        p.data = (0.3 * torch.sin(1 + n + 37 * k) + (1.0 if "norm" in name else 0.0)).view(p.shape).to(p.dtype)
    return module


def full_gradients(model, mesh, raw=False):
    """The library's finalisation of one rank's gradients (no dp here), put into full tensors with gaps of zero."""
    recs, params = records(model, mesh), dict(model.named_parameters())
    grads = {n: p.grad.clone() for n, p in params.items()}
    SharedBoxes(recs, list(params), mesh.tp, torch.device("cpu")).sum_(grads)
    found = {}
    for name, rec in recs.items():
        full = grads[name].new_zeros(rec.shape)
        rec.add_into_full(grads[name], full, None if raw else rec.counted())
        found[name] = full
    return found


def sgd(module, lr=0.1):
    with torch.no_grad():
        for p in module.parameters():
            p -= lr * p.grad
            p.grad = None
