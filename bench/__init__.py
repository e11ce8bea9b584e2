"""Microbenchmarks: `python -m bench OP...`. Verified first, then timed against rivals and limit."""

import os

# torch's profiler, which measures memory, would print each start and stop; it reads this when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
