"""Imports a CUDA build of megacore and says which operators have CUDA kernels: `make cuda-build` ends with it.

    PYTHON tools/cuda_check.py FOLDER        the build, in a folder of its own (never the checkout's)

Needs no GPU and shows nothing about what runs on one. It fails on an undefined symbol, on a missing kernel, on a
refusal that names the wrong thing, on a fake that would need CUDA, and on a CPU operator that is wrong with this torch.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

WANTED = (
    "linear",
    "linear_gelu",
    "linear_swiglu",
    "linear_gelu_dpre",
    "linear_swiglu_dpre",
    "linear_dgrad",
    "linear_gelu_dgrad",
    "linear_wgrad",
    "linear_wgrad_",
    "linear_wgrad_dbias",
    "linear_dbias",
)


def load(folder: Path) -> object:
    """megacore._C of that folder, every symbol resolved now: a missing one is an ImportError or OSError naming it."""
    sys.path.insert(0, str(folder))
    from megacore import _C

    if not Path(_C.__file__).resolve().is_relative_to(folder.resolve()):
        raise SystemExit(f"cuda_check: loaded {_C.__file__}; wanted the build in {folder}")
    ctypes.CDLL(_C.__file__, mode=os.RTLD_NOW | os.RTLD_LOCAL)  # torch's libraries are loaded: nothing may be left over
    if not _C.built_with_cuda:
        raise SystemExit("cuda_check: this _C was built without csrc/cuda")
    return _C


def kernels() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    schemas = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("megacore::"))
    for name in schemas:
        keys = [key for key in ("CPU", "CUDA", "Meta") if has(name, key)]
        print(f"  {name.removeprefix('megacore::'):32} {' '.join(keys)}")
    if missing := [name for name in WANTED if not has(f"megacore::{name}", "CUDA")]:
        raise SystemExit(f"cuda_check: no CUDA kernel for {', '.join(missing)}")


def fakes() -> None:
    """Shapes of CUDA tensors are known without CUDA."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    import megacore.ops  # noqa: F401  registers the fakes

    def shapes(device: str) -> list[tuple]:
        x, weight, bias = (torch.empty(size, device=device) for size in ((2, 5, 8), (16, 8), (16,)))
        y, pre = torch.ops.megacore.linear_gelu(x, weight, bias, "tanh")
        dpre, dbias = torch.ops.megacore.linear_gelu_dpre(y, pre, True, "tanh")
        return [(tuple(t.shape), t.device.type) for t in (y, pre, dpre, dbias)]

    with FakeTensorMode():
        cuda = shapes("cuda")
    for device, found in (("cuda", cuda), ("meta", shapes("meta"))):
        wanted = [((2, 5, 16), device)] * 3 + [((16,), device)]
        if found != wanted:
            raise SystemExit(f"cuda_check: fakes on {device} give {found}; wanted {wanted}")


def refusals() -> None:
    """The CUDA kernels check before they touch a device, so that their refusals can be seen on CPU tensors."""
    x, weight, bias = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
    cases = (
        ("linear: weight is [6, 8] Half", "linear", (x, weight.half(), bias)),
        ("linear: weight is [6, 7]", "linear", (x, weight[:, 1:], bias)),
        ("linear: bias is [5]", "linear", (x, weight, bias[1:])),
        ("linear_gelu: approximate is 'erf'", "linear_gelu", (x, weight, bias, "erf")),
        ("linear_swiglu: weight is [5, 8]", "linear_swiglu", (x, weight[1:], None)),
        ("linear_gelu_dpre: dy is [4, 8]", "linear_gelu_dpre", (x, weight, True, "tanh")),
        ("linear_dgrad: weight is [6, 8]", "linear_dgrad", (x, weight)),
        ("linear_wgrad: x is [4, 8]", "linear_wgrad", (x[1:], x)),
        ("linear_wgrad_: main_grad is [8, 7]", "linear_wgrad_", (x, x, torch.ones(8, 7))),
        ("linear_wgrad_: main_grad is [8, 8] Half", "linear_wgrad_", (x, x, torch.ones(8, 8).half())),
    )
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for words, name, arguments in cases:
        try:
            getattr(torch.ops.megacore, name).default.redispatch(cuda, *arguments)
        except ValueError as error:
            if str(error).startswith(words):
                continue
            raise
        raise SystemExit(f"cuda_check: {name} accepts what it should refuse with: {words}")


def cpu_operators() -> None:
    """The CPU kernels, rebuilt against this torch, still agree with it."""
    from megacore.ops import cross_entropy, linear_gelu

    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((65, 33), (47, 33), (47,)))
    target = torch.randint(47, (65,), generator=generator)

    def gradients(layer, loss) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        value = loss(layer(*leaves, approximate="tanh"), target)
        return [value.detach(), *torch.autograd.grad(value.mean(), leaves)]

    def plain(x, weight, bias, approximate):
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    def head(logits, target):
        return cross_entropy(logits, target, vocab_size=47)

    ours, theirs = gradients(linear_gelu, head), gradients(plain, F.cross_entropy)
    for name, got, want in zip(("loss", "dx", "dweight", "dbias"), ours, theirs, strict=True):
        torch.testing.assert_close(got.mean() if name == "loss" else got, want, msg=lambda m, n=name: f"{n}: {m}")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    _C = load(Path(sys.argv[1]))
    print(f"megacore._C for torch {torch.__version__}, CUDA {torch.version.cuda}; a GPU: {torch.cuda.is_available()}")
    kernels()
    fakes()
    refusals()
    cpu_operators()
    for name in ("first", "unfused", "measured"):
        _C.set_linear_mode(name)
    print(f"cuda-build: {len(WANTED)} operators have CUDA kernels, no symbol is missing; no GPU has run them here")


if __name__ == "__main__":
    main()
