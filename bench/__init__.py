"""Microbenchmarks: `python -m bench OP...`. Verified first, then timed against rivals and limit."""
