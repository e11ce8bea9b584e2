from tests.interpreter import mended  # noqa: F401  where Triton's interpreter runs, its bf16 as hardware has it
from tests.spawn import pool  # noqa: F401  the session's workers
