"""linear_gelu against torch: F.gelu(F.linear(x, w, b)).    x [M, K], w [N, K], b [N] -> [M, N]

Limit: the matrix products alone (one forward, two more backward) at the measured peak.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import harness, operators
from megacore.ops import linear_gelu

SHAPES = ((1024, 768, 3072), (2048, 512, 2048))  # M, K, N
APPROXIMATE = {"tanh": "tanh", "erf": "none"}


def rows(options: harness.Options) -> Iterator[harness.Row]:
    for threads in options.threads:
        torch.set_num_threads(threads)
        limits = harness.measure_limits()
        for shape in ((64, 32, 128),) if options.quick else SHAPES:
            for act in APPROXIMATE:
                case = {"act": act, "dtype": "fp32", "shape": "x".join(map(str, shape)), "threads": threads}
                yield from _rows(options, limits, case, shape, APPROXIMATE[act])


def _rows(
    options: harness.Options, limits: harness.Limits, case: dict, shape: tuple[int, int, int], approximate: str
) -> Iterator[harness.Row]:
    m, k, n = shape
    torch.manual_seed(0)
    x, w, b, dy = torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n), torch.randn(m, n)
    inputs = [t.requires_grad_() for t in (x, w, b)]

    def ours(x, w, b):
        return linear_gelu(x, w, b, approximate=approximate)

    def torchs(x, w, b):
        return F.gelu(F.linear(x, w, b), approximate=approximate)

    operators.verify("linear_gelu", ours, torchs, inputs, dy)
    contestants = {"ours": ours, "torch-eager": torchs, "torch-compile": operators.compiled(torchs)}
    flops = 2.0 * m * k * n
    bounds = {"fwd": limits.ms(flops=flops), "fwd+bwd": limits.ms(flops=3 * flops)}
    yield from operators.rows("linear_gelu", case, contestants, inputs, dy, options, bounds)
