"""Who serves which device, and what loading the extension promises."""

import contextvars
import runpy
import sys
from pathlib import Path

import pytest
import torch

import megacore
from megacore.ops import dropout, implementations, use
from megacore.ops.dispatch import SERVED, chosen

CPU = torch.device("cpu")


def test_defaults():
    assert {op: implementations(op, "cpu")[0] for op in SERVED} == dict.fromkeys(SERVED, "cpp")
    assert all("reference" in implementations(op, device) for op in SERVED for device in ("cpu", "cuda"))


def test_cpp_serves_a_gpu_only_if_it_was_built_for_one(monkeypatch):
    gpu = torch.device("cuda")
    for built, first in ((True, "cpp"), (False, "triton")):
        monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key, built=built: built)
        for op in ("linear", "linear_gelu", "linear_swiglu"):
            assert implementations(op, "cuda")[0] == chosen(op, gpu) == first
            assert ("cpp" in implementations(op, "cuda")) is built
            with use("reference", op, device="cuda"):
                assert chosen(op, gpu) == "reference"
    with pytest.raises(ValueError, match="impl='cpp'.*built with CUDA.*make cuda-build"), use("cpp", "linear", "cuda"):
        pass


def test_what_the_dispatcher_is_asked():
    """Its private function, by the names that csrc registers."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("megacore::linear_gelu", "CPU")
    if torch.version.cuda is None:
        assert "cpp" not in implementations("linear_gelu", "cuda")


def test_use_nests_and_ends():
    with use("reference", "*"):
        assert [chosen(op, CPU) for op in SERVED] == ["reference"] * len(SERVED)
        with use("cpp", "dropout"):
            assert (chosen("dropout", CPU), chosen("linear_gelu", CPU)) == ("cpp", "reference")
        assert chosen("dropout", CPU) == "reference"
        assert contextvars.Context().run(chosen, "dropout", CPU) == "cpp", "another context is not touched"
    assert chosen("dropout", CPU) == "cpp"
    with pytest.raises(KeyError), use("reference", "*"):
        raise KeyError
    assert chosen("dropout", CPU) == "cpp"


def test_a_choice_for_another_device_changes_nothing_here():
    with use("reference", "dropout", device="cuda"):
        assert chosen("dropout", CPU) == "cpp"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fast", "dropout"), "impl='fast'.*'cpp'"),
        (("triton", "dropout"), "impl='triton'.*op='dropout'"),
        (("cpp", "softmax"), "op='softmax'.*'dropout'"),
        (("cpp", "dropout", "tpu"), "device='tpu'.*'cpu'"),
    ],
)
def test_what_cannot_serve_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words), use(*arguments):
        pass


@pytest.mark.parametrize("interpret", [True, False])
def test_triton_serves_the_cpu_only_through_its_interpreter(interpret, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    for op in SERVED:
        assert ("triton" in implementations(op, "cpu")) is interpret
    assert implementations("cross_entropy", "cuda")[0] == "triton"


def test_a_missing_extension_says_how_to_build_it(monkeypatch):
    monkeypatch.delattr(megacore, "_C")
    monkeypatch.setitem(sys.modules, "megacore._C", None)  # what import then finds
    with pytest.raises(ImportError, match="megacore._C cannot be loaded: .*`make build"):
        runpy.run_path(megacore.__file__)


def test_one_openmp_runtime_and_its_threads_are_used():
    """A second libgomp would be a second pool; without -fopenmp at::parallel_for is serial in silence."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        where = torch.zeros(2, dtype=torch.int64), torch.arange(512)
        dropout(torch.ones(2, 512, 64), 0.5, key=1, sample=where[0], position=where[1])
    finally:
        torch.set_num_threads(before)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    assert len({m for m in mapped if "libgomp" in m or "libiomp" in m or "libomp" in m}) == 1
    undefined = Path(megacore._C.__file__).read_bytes()
    assert b"GOMP_parallel" in undefined
