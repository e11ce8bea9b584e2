"""cross_entropy against F.cross_entropy, a loss for each token.    logits [R, V], target [R] -> [R]

Limit: forward reads the logits once; backward reads them again and writes the gradient, all at the measured bandwidth.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import harness, operators
from megacore.ops import cross_entropy

SHAPES = ((1024, 32000), (1024, 50304))  # R, V


def rows(options: harness.Options) -> Iterator[harness.Row]:
    for threads in options.threads:
        torch.set_num_threads(threads)
        limits = harness.measure_limits()
        for shape in ((16, 1000),) if options.quick else SHAPES:
            for inplace in (False, True):
                case = {"dtype": "fp32", "shape": "x".join(map(str, shape)), "threads": threads, "inplace": inplace}
                yield from _rows(options, limits, case, shape)


def _rows(
    options: harness.Options, limits: harness.Limits, case: dict, shape: tuple[int, int]
) -> Iterator[harness.Row]:
    rows_, vocab = shape
    torch.manual_seed(0)
    logits = torch.randn(rows_, vocab).requires_grad_()
    target = torch.randint(vocab, (rows_,))
    dy = torch.rand(rows_)

    def ours(logits, target):
        return cross_entropy(logits, target, vocab_size=vocab, reduction="none", inplace_backward=case["inplace"])

    def torchs(logits, target):
        return F.cross_entropy(logits, target, reduction="none")

    operators.verify("cross_entropy", ours, torchs, (logits, target), dy)
    contestants = {"ours": ours, "torch-eager": torchs, "torch-compile": operators.compiled(torchs)}
    nbytes = 4.0 * rows_ * vocab
    bounds = {"fwd": limits.ms(nbytes=nbytes), "fwd+bwd": limits.ms(nbytes=3 * nbytes)}
    if case["inplace"]:
        del bounds["fwd"]  # nothing differs in forward
    yield from operators.rows("cross_entropy", case, contestants, (logits, target), dy, options, bounds)
