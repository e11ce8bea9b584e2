"""linear against torch: F.linear(x, w, b).    x [M, K], w [N, K], b [N] -> [M, N]"""

from collections.abc import Iterator

import torch.nn.functional as F

from bench import linear_family
from bench.harness import Options
from bench.operators import ours_named
from bench.report import Row


def cases(options: Options) -> list[dict[str, object]]:
    """Shape: M, K, N."""
    if options.device == "cuda":
        return [{"dtype": "bf16", "shape": "512x256x512" if options.quick else "8192x8192x4096"}]
    shape = "64x32x128" if options.quick else "2048x768x3072"
    return [{"dtype": dtype, "shape": shape} for dtype in ("fp32", "bf16")]


def rows(options: Options) -> Iterator[Row]:
    def make(case, limits):
        mine = ours_named("linear")
        return linear_family.problem("linear", case, limits, mine, F.linear, {}, device=options.device)

    yield from linear_family.rows("linear", options, cases(options), make)
