"""dropout (counter-based, mask never stored) against F.dropout (mask stored).    x [B, S, F] -> [B, S, F]

Limit: one read and one write of the tensor in each direction, at the measured bandwidth.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import harness, operators
from megacore.ops import dropout, use

SHAPES = ((4, 1024, 768), (4, 256, 256))  # B, S, F
P = 0.1
KEY = 0x5DEECE66D


def rows(options: harness.Options) -> Iterator[harness.Row]:
    for threads in options.threads:
        torch.set_num_threads(threads)
        limits = harness.measure_limits()
        for shape in ((2, 16, 32),) if options.quick else SHAPES:
            case = {"dtype": "fp32", "shape": "x".join(map(str, shape)), "threads": threads}
            yield from _rows(options, limits, case, shape)


def _rows(
    options: harness.Options, limits: harness.Limits, case: dict, shape: tuple[int, int, int]
) -> Iterator[harness.Row]:
    torch.manual_seed(0)
    x, dy = torch.randn(shape).requires_grad_(), torch.randn(shape)
    sample, position = torch.arange(shape[0]), torch.arange(shape[1])

    def ours(x):
        return dropout(x, P, key=KEY, sample=sample, position=position)

    def torchs(x):
        return F.dropout(x, P)

    _verify(ours, x, dy)
    nbytes = 4.0 * x.numel()
    bounds = {"fwd": limits.ms(nbytes=2 * nbytes), "fwd+bwd": limits.ms(nbytes=4 * nbytes)}
    yield from operators.rows("dropout", case, {"ours": ours, "torch-eager": torchs}, (x,), dy, options, bounds)


def _verify(ours: operators.Operator, x: torch.Tensor, dy: torch.Tensor) -> None:
    """The mask is that of the plain-torch Philox, bit for bit, forward and backward, and drops the share it should."""
    got = operators.outcome(ours, (x,), dy)
    with use("reference", "dropout"):
        wanted = operators.outcome(ours, (x,), dy)
    if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
        raise AssertionError("dropout: other bits than the reference; not timed")
    dropped = float((got[0] == 0).double().mean())
    if abs(dropped - P) > 5 * (P * (1 - P) / x.numel()) ** 0.5:
        raise AssertionError(f"dropout: drops {dropped:.4f} of the elements at p={P}; not timed")
