from tests.spawn import pool  # noqa: F401  the session's workers
