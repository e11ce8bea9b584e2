"""Tensor parallelism from a table, data parallelism in flat buffers, randomness that no layout changes."""
