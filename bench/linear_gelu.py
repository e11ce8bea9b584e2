"""linear_gelu against torch: F.gelu(F.linear(x, w, b)).    x [M, K], w [N, K], b [N] -> [M, N]

Rivals forward: also oneDNN's fused product, and on a GPU the one behind torch._addmm_activation (cuBLASLt's epilogue).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench import linear_family
from bench.harness import Missing, Options
from bench.operators import Operator, ours_named
from bench.report import Row

APPROXIMATE = {"tanh": "tanh", "erf": "none"}


def cases(options: Options) -> list[dict[str, object]]:
    """Shape: M, K, N."""
    if options.device == "cuda":
        shapes = ("512x256x512",) if options.quick else linear_family.GPU_SHAPES
        return [{"act": "tanh", "dtype": "bf16", "shape": shape} for shape in shapes]
    shape = "64x32x128" if options.quick else "2048x768x3072"
    fp32 = [{"act": act, "dtype": "fp32", "shape": shape} for act in APPROXIMATE]
    bf16 = {"act": "tanh", "dtype": "bf16", "shape": shape}
    return [*fp32, bf16, bf16 | {"isa": "avx2"}]


def rows(options: Options) -> Iterator[Row]:
    def make(case, limits):
        approximate = APPROXIMATE[case["act"]]
        mine = ours_named("linear_gelu")

        def ours(x, w, b):
            return mine(x, w, b, approximate=approximate)

        def torchs(x, w, b):
            return F.gelu(F.linear(x, w, b), approximate=approximate)

        if options.device == "cuda":
            rivals = {"cublaslt": lambda: cublaslt(approximate)}
        else:
            rivals = {"onednn": lambda: onednn(approximate)}
        return linear_family.problem("linear_gelu", case, limits, ours, torchs, rivals, device=options.device)

    yield from linear_family.rows("linear_gelu", options, cases(options), make)


def onednn(approximate: str) -> Operator:
    if not torch.backends.mkldnn.is_available():
        raise Missing("this torch has no oneDNN")
    return lambda x, w, b: torch.ops.mkldnn._linear_pointwise(x, w, b, "gelu", [], approximate)


def cublaslt(approximate: str) -> Operator:
    if approximate != "tanh":
        raise Missing("cuBLASLt's GeLU is the tanh form")
    return lambda x, w, b: torch._addmm_activation(b, x, w.t(), use_gelu=True)
