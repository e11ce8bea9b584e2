"""python -m megacore, and the command `megacore`: the command line, or one line that says which packages it lacks."""

import sys

import torch

from megacore import _C, __version__, installation


def main() -> int:
    argv = sys.argv[1:]
    if argv[:1] in (["--version"], ["-V"]):
        print(installation.summary(__version__, torch.__version__, _C.built_with_cuda))
        return 0
    if names := installation.missing("train"):
        command = " ".join(["megacore", *argv[:1]])
        print(installation.lacks(f"{command}: error: the command line", "train", names), file=sys.stderr)
        return 2
    from megacore import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
