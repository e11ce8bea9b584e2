"""Triton kernels, one file per operator. A leaf: imports torch and triton only. Installed as `megacore.triton_kernels`,
because the bare name belongs to another package. Each file ends with `AOT`, the table by which `make kernels` compiles
every kernel ahead of time without a GPU."""
