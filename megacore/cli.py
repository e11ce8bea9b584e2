"""The command line: prepare, train, topo, verify, sample. The only module that imports tyro, reads argv and the
environment.

Each command is a frozen dataclass (its fields are its options, their comments its help) and a function that takes one.
Errors of the caller (ValueError, a missing file) end in one line and exit code 2.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar, get_type_hints

import tyro
from rich.table import Table
from tyro.conf import Positional

from megacore import program
from megacore.comm.hosts import crossing, place_ranks
from megacore.comm.mesh import ORDER, Layout
from megacore.comm.wording import groups as in_words_of_groups
from megacore.installation import example_config
from megacore.train import config
from megacore.train.check import check
from megacore.train.config import Settings
from megacore.train.data.bars import in_words, with_bars
from megacore.train.data.prepare import prepare
from megacore.train.data.sources import EXCLUDE, SUFFIXES
from megacore.train.launch import Place, launch
from megacore.train.overrides import spelled
from megacore.train.plain import plain, screen, shortened
from megacore.train.ranges import Range, check_value, range_of, within
from megacore.train.resume import check_files

T = TypeVar("T")
WORLD = Range(1, 2**16)  # ranks that `topo` draws


@dataclass(frozen=True)
class TrainCommand(Settings):
    """Train a model. CONFIG is a TOML file; any of its fields can be given here as well, and then wins."""

    config: Positional[Path] = Path()  # the TOML file
    nproc: int = within(
        0, 0, 4096
    )  # start this many processes on this host; 1: the whole run on one process, whatever the layout
    fresh: bool = False  # start anew: an earlier run in the same folder is moved aside, not resumed


def train_main(argv: Sequence[str]) -> int:
    """train a model: under torchrun, or with --nproc N"""
    command = _parse_train(argv)
    settings = Settings(**{f.name: getattr(command, f.name) for f in fields(Settings)})
    place = place_of(os.environ)
    if command.nproc and place.world > 1:
        raise ValueError(
            f"nproc={command.nproc} inside torchrun's world of {place.world}; leave --nproc out under torchrun"
        )
    world = command.nproc or place.world
    if command.nproc == 1 and (layout := settings.parallel.layout()).world > 1:
        print(
            f"--nproc 1: layout tp {layout.tp} x pp {layout.pp} x dp {layout.dp} becomes 1 x 1 x 1, same global and "
            "micro batch",
            flush=True,
        )
        settings = settings.serial()
    check(settings, world)
    settings = settings.filled(world)
    check_files(settings, command.fresh)  # before any process is started; each rank checks again, on its own host
    if command.nproc > 1:
        return program.leave(launch(command.nproc, ["train", *_without_nproc(argv)], os.environ))
    from megacore.train import (
        job,  # the model, optimizer and compiler: 3 s that the launcher and topo need not wait for
    )

    return job.run(settings, place, fresh=command.fresh)


def place_of(env: Mapping[str, str]) -> Place:
    """What torchrun's environment says; one process where there is none."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Place()

    def number(name: str, default: int | None = None) -> int:
        text = env.get(name) if default is not None else env[name]
        if text is None:
            return default
        if not text.isdecimal():
            raise ValueError(f"{name}='{plain(text)}' is no whole number; start the ranks with torchrun or --nproc")
        return int(text)

    rank, world = number("RANK"), number("WORLD_SIZE")
    local = number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world)
    return Place(rank, world, *local, number("TORCHELASTIC_RESTART_COUNT", 0), "TORCHELASTIC_RUN_ID" in env)


def _parse_train(argv: Sequence[str]) -> TrainCommand:
    if {"-h", "--help"} & set(argv):
        return _parse(TrainCommand, ["--help"], "train", TrainCommand())
    words, options = spelled(argv, {"nproc": int, "fresh": bool})
    if not words:
        raise ValueError(f"CONFIG is missing; for example: megacore train {example_config()} --nproc 8")
    configs = [w for w in words if w.endswith(".toml")]
    if not configs:
        raise ValueError(f"CONFIG='{plain(words[0])}' is no .toml file; for example: megacore train {example_config()}")
    if len(words) > 1:
        other = next((w for w in words if w != configs[0]), configs[0])
        raise ValueError(
            f"command line: unexpected argument '{plain(other)}'; options are --section.field VALUE, and CONFIG is one"
        )
    base = config.load(configs[0])
    default = TrainCommand(**{f.name: getattr(base, f.name) for f in fields(Settings)})
    return _parse(TrainCommand, options, "train", default)


def _parse(kind: type[T], argv: Sequence[str], name: str, default: T | None = None) -> T:
    """The command's options by tyro. ValueError, one line, where they are wrong, or a number is outside its range."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):  # tyro draws a box around what is wrong
            options = {} if default is None else {"default": default}
            command = tyro.cli(kind, args=list(argv), prog=f"megacore {name}", **options)
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise ValueError(f"command line: {_unboxed(said.getvalue())}; see megacore {name} --help") from None
    hints = get_type_hints(kind)
    for field in fields(kind):
        check_value(field.name, getattr(command, field.name), range_of(field, hints[field.name]))
    return command


def _unboxed(text: str) -> str:
    """What tyro's box says first, in one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()]
    lines = [line for line in lines if line]
    body = lines[1:] if len(lines) > 1 else lines  # the first is the title, in a frame
    end = next((i for i, line in enumerate(body) if set(line) <= {"─", "-"}), len(body))
    if not end and body:
        body, end = body[1:], next((i for i, line in enumerate(body[1:]) if set(line) <= {"─", "-"}), len(body))
    return plain(" ".join(body[:end]))[:300].rstrip(".") or "it cannot be read"


def _without_nproc(argv: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for a in argv:
        if not skip and a != "--nproc" and not a.startswith("--nproc="):
            kept.append(a)
        skip = a == "--nproc"
    return kept


@dataclass(frozen=True)
class PrepareCommand:
    """Turn text into Megatron's .bin/.idx: OUT/train, OUT/valid and OUT/tokenizer.json."""

    text: Positional[tuple[Path, ...]]  # text files, .jsonl files or folders
    out: Path  # folder to write to
    tokenizer: Path | None = None  # a tokenizer.json to use; a byte-level BPE is trained where none is given
    vocab_size: int = 32768  # of the tokenizer that is trained; fewer where the text has not so many
    valid_fraction: float = 0.05  # share of the documents held out
    suffixes: tuple[str, ...] = SUFFIXES  # of the files that are read inside folders
    exclude: tuple[str, ...] = EXCLUDE  # names of folders that are not entered
    jsonl_key: str = "text"  # the field of a JSON line that holds the text
    seed: int = within(0, -(2**63), 2**63 - 1)  # decides which documents are held out


def prepare_main(argv: Sequence[str]) -> int:
    """text -> tokens on disk and a tokenizer"""
    command = _parse(PrepareCommand, argv, "prepare")
    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name not in ("text", "out")}
    console = screen()
    report = with_bars(console, lambda show: prepare(command.text, command.out, progress=show, **options))
    in_words(console, command.out, report, None if command.tokenizer else command.vocab_size)
    return 0


@dataclass(frozen=True)
class SampleCommand:
    """Text from a trained model, on one process."""

    checkpoint: Positional[Path]  # a run's folder, or one checkpoint
    prompt: str = "def "  # what the text begins with
    tokens: int = within(128, 0, 10**6)  # tokens to generate
    temperature: float = within(0.8, 0, 1e6)  # 0: always the likeliest token
    top_k: int = within(40, 0, 2**31 - 1)  # draw among this many likeliest tokens; 0: all
    seed: int = within(0, 0, 2**63 - 1)
    tokenizer: Path | None = None  # a tokenizer.json; that of the run where none is given


def sample_main(argv: Sequence[str]) -> int:
    """text from a trained model"""
    from megacore.train.sample import continue_text

    command = _parse(SampleCommand, argv, "sample")
    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name not in ("checkpoint", "prompt")}
    print(continue_text(command.checkpoint, command.prompt, note=lambda line: print(line, file=sys.stderr), **options))
    return 0


def verify_main(argv: Sequence[str]) -> int:
    """prove on a model that parallel equals serial"""
    from megacore import verify  # the command is its own: settings and function live there

    return verify.run(_parse(verify.Settings, argv, "verify"))


@dataclass(frozen=True)
class TopoCommand:
    """Print which ranks form which group, and which groups leave their host."""

    tp: int = within(1, 1, 2**16)  # ranks that split each matrix
    pp: int = within(1, 1, 2**16)  # pipeline stages
    dp: int = within(1, 1, 2**16)  # replicas
    cp: int = within(1, 1, 2**16)  # ranks that split the sequence
    ep: int = within(1, 1, 2**16)  # ranks that split the experts
    order: str = ORDER  # the axes from fastest to slowest
    hosts: str = "1"  # number of equal hosts, or name:slots,name:slots


def topo_main(argv: Sequence[str]) -> int:
    """which ranks form which group, on which hosts"""
    command = _parse(TopoCommand, argv, "topo")
    layout = Layout(command.tp, command.cp, command.dp, command.pp, command.ep, command.order)
    check_value("tp*cp*dp*pp", layout.world, WORLD)
    host_of = place_ranks(command.hosts, layout.world)
    console = screen()
    table = Table(
        title=f"{layout.world} ranks, order {layout.order}, tp {layout.tp} cp {layout.cp} dp {layout.dp} pp {layout.pp}"
    )
    for column in ("group", "number", "size", "across hosts", "members"):
        table.add_column(column, overflow="fold")
    for kind, groups in layout.kinds().items():
        crossed = len(crossing(groups, host_of))
        table.add_row(kind, str(len(groups)), str(len(groups[0])), str(crossed), in_words_of_groups(groups))
    console.print(table)
    crossed = crossing(layout.groups("tp"), host_of)
    if crossed:
        names = ", ".join(f"{tuple(g)} on {sorted({host_of[r] for r in g})}" for g in crossed[:4])
        console.print(
            f"warning: {len(crossed)} of {len(layout.groups('tp'))} tp groups cross hosts: {names}. Every layer waits "
            "for the network; choose a tp that divides the ranks of a host, or an order that begins with tp.",
            style="yellow",
        )  # fmt: skip
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command: 0, 2 for a mistake of the caller, 1 for a failure of the run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if hasattr(sys.stdout, "reconfigure"):
        # A log that is followed shows each line as it comes; a name that no encoding can write is spelled
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    if command not in COMMANDS:
        print(f"megacore: unknown command '{plain(command)}'; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if command != "train":  # it listens for Ctrl-C by itself once it has imported what it needs
        program.interruptible()
    try:
        return COMMANDS[command](rest)
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        if program.speaks(os.environ):
            print(f"megacore {command}: interrupted", file=sys.stderr)
        return program.INTERRUPTED
    except (ValueError, OSError) as error:
        line = plain(" ".join(map(shortened, str(error).split())))
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        _say_once(line, lambda: print(f"megacore {command}: {rank}error: {line}", file=sys.stderr))
        return 2


def _say_once(line: str, say: Callable[[], None]) -> None:
    """Says it, unless this is a rank of torchrun's and a peer has said the same."""
    from megacore.train.start import say_once  # what only ranks need

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("MASTER_PORT")
    port = int(os.environ["MASTER_PORT"]) if agent else None
    say_once(place_of(os.environ), port, os.environ.get("MASTER_ADDR", ""), line, say)


def _usage() -> str:
    rows = "\n".join(f"  {name:8}  {function.__doc__}" for name, function in COMMANDS.items())
    return f"megacore COMMAND ...\n\n{rows}\n\nmegacore COMMAND --help names the options; --version what is installed."


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "prepare": prepare_main,
    "train": train_main,
    "topo": topo_main,
    "verify": verify_main,
    "sample": sample_main,
}
