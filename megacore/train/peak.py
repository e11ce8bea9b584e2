"""The arithmetic peak that MFU is measured against. It is always named: a share of an unnamed peak says nothing."""

from __future__ import annotations

import time

import torch

# Dense bf16 tensor-core peaks in TFLOP/s, from the vendor's data sheets (SXM where there are several forms).
GPU_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "V100": 125.0}
SIDE = (
    512  # of the square matrices: 3 MiB of fp32, far from call overhead, and 3 ms: some repetition is not interrupted
)


def gpu_peak(name: str) -> float | None:
    """FLOP/s of a GPU by its name, None when it is not in the table."""
    return next((tflops * 1e12 for key, tflops in GPU_TFLOPS.items() if key in name), None)


def measure_cpu_peak(cores: int, seconds: float = 0.5) -> float:
    """FLOP/s of `cores` cores: the best fp32 matrix product [512,512]x[512,512] on one core in about `seconds`, times
    `cores`. All cores at once would measure what else the machine is doing; where cores are threads of one another this
    is more than they can reach together, and MFU too low rather than too high."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        out, best, until = torch.empty(SIDE, SIDE), float("inf"), time.perf_counter() + seconds
        torch.mm(a, b, out=out)
        while (began := time.perf_counter()) < until or best == float("inf"):
            torch.mm(a, b, out=out)
            best = min(best, time.perf_counter() - began)
        return cores * 2 * SIDE**3 / best
    finally:
        torch.set_num_threads(before)
