"""linear_swiglu against torch: [gate | up] = F.linear(x, w), F.silu(gate) * up.    x [M, K], w [2F, K] -> [M, F]"""

from collections.abc import Iterator

import torch.nn.functional as F

from bench import linear_family
from bench.harness import Options
from bench.operators import ours_named
from bench.report import Row


def cases(options: Options) -> list[dict[str, object]]:
    """Shape: M, K, F."""
    if options.device == "cuda":
        return [{"dtype": "bf16", "shape": "512x256x512" if options.quick else "8192x4096x14336"}]
    return [{"dtype": "fp32", "shape": "64x32x96" if options.quick else "2048x768x2048"}]


def rows(options: Options) -> Iterator[Row]:
    def make(case, limits):
        mine = ours_named("linear_swiglu")

        def torchs(x, w):
            gate, up = F.linear(x, w).chunk(2, -1)
            return F.silu(gate) * up

        return linear_family.problem(
            "linear_swiglu", case, limits, mine, torchs, {}, gated=True, bias=False, device=options.device
        )

    yield from linear_family.rows("linear_swiglu", options, cases(options), make)
