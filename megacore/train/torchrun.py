"""torchrun, without its summary of a failure: the rank that failed has said why, and a page of tracebacks below would
hide it. `python -m megacore.train.torchrun ARGUMENTS` takes torchrun's arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(arguments: Sequence[str] | None = None) -> int:
    """With torchrun's arguments, or those of the command line: 0, or the exit code of the rank that failed first (1 if
    a signal ended it)."""
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        print(f"megacore train: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"megacore train: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
