"""The gate of `make kernels` closes: on a kernel that spills, on one without an entry, on what ptxas complains of."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "kernels.py"

KERNEL = '''
import triton
import triton.language as tl

@triton.jit
def keeps(x_ptr, y_ptr, COLS: tl.constexpr):
    """All of a tile stays alive across a sum: a register for each 32 elements at one warp, of 255."""
    at = tl.arange(0, COLS)
    x = tl.load(x_ptr + at)
    x = x / tl.sum(x)
    tl.store(y_ptr + at, x)

AOT = {}
'''


def gate(folder, entry):
    (folder / "__init__.py").write_text("")
    (folder / "probe.py").write_text(KERNEL + entry)
    command = [sys.executable, str(TOOL), "--only", "triton", "--triton", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here")
@pytest.mark.parametrize(
    ("columns", "code", "words"), [(128, 0, "ok"), (16384, 1, "spills: stack"), (None, 1, "no entry in AOT")]
)
def test_gate(tmp_path, columns, code, words):
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    entry = f"AOT['keeps'] = [({types}, {{'COLS': {columns}}}, {{'num_warps': 1}})]\n" if columns else ""
    done = gate(tmp_path, entry)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout


def load():
    spec = importlib.util.spec_from_file_location("kernels_tool", TOOL)
    sys.modules[spec.name] = tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_what_ptxas_says():
    tool = load()
    line = "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\nptxas info : Used 168 registers"
    assert not tool.ptxas_faults(line.format(0, 0, 0))
    assert tool.ptxas_faults(line.format(8, 0, 0)) and tool.ptxas_faults(line.format(16, 4, 4))
    assert tool.ptxas_faults(
        "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    )


def test_what_the_machine_code_must_hold():
    fault = load().matrix_fault
    product = "%5 = tt.dot %1, %2, %3 : tensor<64x64xf16> * tensor<64x64xf16> -> tensor<64x64xf32>"
    assert not fault(product, "HGMMA.64x64x16.F32 R24 ;", 90) and not fault(product, "HMMA.16816.F32 R4 ;", 80)
    assert "no HGMMA" in fault(product, "HMMA.16816.F32 R4 ;", 90) and "no HMMA" in fault(product, "FFMA R1 ;", 80)
    assert "slow path" in fault(product, "HGMMA.64x64x16 R24 ; HMMA.16816 R4 ;", 90)
    assert not fault(product.replace("f16", "f32"), "FFMA R1 ;", 90), "fp32 products have no such instruction"
    assert "STL" in fault("", "STL.64 [R1], R2 ;", 80)
