"""The command line: prepare, train, topo, verify, sample. The only module that imports tyro, reads argv and the
environment.

Each command is a frozen dataclass (its fields are its options, their comments its help) and a function that takes one.
Errors of the caller (ValueError, a missing file) end in one line and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from tyro.conf import Positional

from megacore import program
from megacore.comm.hosts import crossing, place_ranks
from megacore.comm.mesh import ORDER, Layout
from megacore.installation import example_config
from megacore.train import config
from megacore.train.check import check
from megacore.train.config import ALIASES, Settings
from megacore.train.data.prepare import prepare
from megacore.train.data.sources import EXCLUDE, SUFFIXES
from megacore.train.launch import Place, launch
from megacore.train.resume import check_files


@dataclass(frozen=True)
class TrainCommand(Settings):
    """Train a model. CONFIG is a TOML file; any of its fields can be given here as well, and then wins."""

    config: Positional[Path] = Path()  # the TOML file
    nproc: int = 0  # start this many processes on this host; 1: the whole run on one process, whatever the layout
    fresh: bool = False  # start anew: an earlier run in the same folder is moved aside, not resumed


def train_main(argv: Sequence[str]) -> int:
    """train a model: under torchrun, or with --nproc N"""
    command = _parse_train(argv)
    settings = Settings(**{f.name: getattr(command, f.name) for f in fields(Settings)})
    place = place_of(os.environ)
    if command.nproc < 0:
        raise ValueError(f"nproc={command.nproc} is negative; give the number of processes to start")
    if command.nproc and place.world > 1:
        raise ValueError(
            f"nproc={command.nproc} inside torchrun's world of {place.world}; leave --nproc out under torchrun"
        )
    if command.nproc == 1 and settings.parallel.layout().world > 1:
        p = settings.parallel
        print(
            f"--nproc 1: layout tp {p.tp} x pp {p.pp} x dp {p.dp} becomes 1 x 1 x 1, same global and micro batch",
            flush=True,
        )
        settings = settings.serial()
    check(settings, command.nproc or place.world)
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
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    local = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world))
    return Place(rank, world, *local, int(env.get("TORCHELASTIC_RESTART_COUNT", 0)), "TORCHELASTIC_RUN_ID" in env)


def _parse_train(argv: Sequence[str]) -> TrainCommand:
    args = _flags([_full_name(a) for a in argv])
    words = _words(args)
    path = next((a for a in words if a.endswith(".toml")), None)
    base = config.load(path) if path else Settings()
    default = TrainCommand(**{f.name: getattr(base, f.name) for f in fields(Settings)})
    if path is None and not {"-h", "--help"} & set(args):
        if words:
            raise ValueError(f"CONFIG={words[0]!r} is no .toml file; for example: megacore train {example_config()}")
        raise ValueError(f"CONFIG is missing; for example: megacore train {example_config()} --nproc 8")
    command, unknown = tyro.cli(
        TrainCommand, args=args, default=default, prog="megacore train", return_unknown_args=True
    )
    for option in unknown:
        if not option.startswith("-"):
            raise ValueError(f"command line: unexpected argument {option!r}; options are --section.field VALUE")
        name = option.lstrip("-").split("=")[0].replace("-", "_")
        raise ValueError(f"command line: unknown field {name!r}; nearest valid name: {config.nearest(name)}")
    return command


def _full_name(argument: str) -> str:
    """--tensor-model-parallel-size=2 -> --parallel.tp=2"""
    name, equals, value = argument.partition("=")
    full = ALIASES.get(name[2:].replace("-", "_")) if name.startswith("--") else None
    return f"--{full}{equals}{value}" if full else argument


SWITCHES = {"fresh", *(name for name, kind in config.field_names().items() if kind is bool)}


def _switch(argument: str) -> str:
    """The name of the true-or-false field that an option is, empty for any other argument."""
    name = argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""
    return name if name in SWITCHES else ""


def _flags(args: Sequence[str]) -> list[str]:
    """--run.tensorboard false and --run.tensorboard=false -> --run.no-tensorboard, as tyro spells it."""
    out, words = [], list(args)
    while words:
        argument = words.pop(0)
        if not (name := _switch(argument)):
            out.append(argument)
            continue
        value = argument.partition("=")[2]
        if not value and words and words[0].lower() in ("true", "false"):
            value = words.pop(0)
        if (value := value.lower() or "true") not in ("true", "false"):
            raise ValueError(f"command line: {argument}: {value!r} is neither true nor false; give one of them")
        section, _, leaf = name.rpartition(".")
        out.append("--" + f"{section}." * bool(section) + "no-" * (value == "false") + leaf.replace("_", "-"))
    return out


def _words(args: Sequence[str]) -> list[str]:
    """The arguments that are neither an option nor an option's value."""
    kept, value = [], False
    for argument in args:
        if argument.startswith("-"):
            switch = _switch(argument.replace(".no-", ".").replace("--no-", "--"))
            value = "=" not in argument and not switch
        else:
            if not value:
                kept.append(argument)
            value = False
    return kept


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
    vocab_size: int = 32768  # of the tokenizer that is trained
    valid_fraction: float = 0.05  # share of the documents held out
    suffixes: tuple[str, ...] = SUFFIXES  # of the files that are read inside folders
    exclude: tuple[str, ...] = EXCLUDE  # names of folders that are not entered
    jsonl_key: str = "text"  # the field of a JSON line that holds the text
    seed: int = 0  # decides which documents are held out


def prepare_main(argv: Sequence[str]) -> int:
    """text -> tokens on disk and a tokenizer"""
    command = tyro.cli(PrepareCommand, args=list(argv), prog="megacore prepare")
    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name not in ("text", "out")}
    console = Console()
    columns = (TextColumn("{task.description:9}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        report = prepare(command.text, command.out, progress=show, **options)
    for reason, count in report.skipped.items():
        names = ", ".join(report.examples.get(reason, ()))
        console.print(f"skipped {count}: {reason} ({names})", highlight=False, soft_wrap=True)
    console.print(
        f"{command.out}: {report.files:,} files read, {report.files_skipped:,} skipped, "
        f"{report.characters:,} characters; vocabulary {report.vocab_size:,}; "
        f"train {report.train_documents:,} documents, {report.train_tokens:,} tokens; "
        f"valid {report.valid_documents:,} documents, {report.valid_tokens:,} tokens", highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 0


@dataclass(frozen=True)
class SampleCommand:
    """Text from a trained model, on one process."""

    checkpoint: Positional[Path]  # a run's folder, or one checkpoint
    prompt: str = "def "  # what the text begins with
    tokens: int = 128  # tokens to generate
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 40  # draw among this many likeliest tokens; 0: all
    seed: int = 0
    tokenizer: Path | None = None  # a tokenizer.json; that of the run where none is given


def sample_main(argv: Sequence[str]) -> int:
    """text from a trained model"""
    from megacore.train.sample import continue_text

    command = tyro.cli(SampleCommand, args=list(argv), prog="megacore sample")
    options = {f.name: getattr(command, f.name) for f in fields(command) if f.name not in ("checkpoint", "prompt")}
    print(continue_text(command.checkpoint, command.prompt, note=lambda line: print(line, file=sys.stderr), **options))
    return 0


def verify_main(argv: Sequence[str]) -> int:
    """prove on a model that parallel equals serial"""
    from megacore import verify  # the command is its own: settings and function live there

    return verify.run(tyro.cli(verify.Settings, args=list(argv), prog="megacore verify"))


@dataclass(frozen=True)
class TopoCommand:
    """Print which ranks form which group, and which groups leave their host."""

    tp: int = 1  # ranks that split each matrix
    pp: int = 1  # pipeline stages
    dp: int = 1  # replicas
    cp: int = 1  # ranks that split the sequence
    ep: int = 1  # ranks that split the experts
    order: str = ORDER  # the axes from fastest to slowest
    hosts: str = "1"  # number of equal hosts, or name:slots,name:slots


def topo_main(argv: Sequence[str]) -> int:
    """which ranks form which group, on which hosts"""
    command = tyro.cli(TopoCommand, args=list(argv), prog="megacore topo")
    layout = Layout(command.tp, command.cp, command.dp, command.pp, command.ep, command.order)
    host_of = place_ranks(command.hosts, layout.world)
    console = Console()
    table = Table(
        title=f"{layout.world} ranks, order {layout.order}, tp {layout.tp} cp {layout.cp} dp {layout.dp} pp {layout.pp}"
    )
    for column in ("group", "number", "size", "across hosts", "members"):
        table.add_column(column, overflow="fold")
    for kind, groups in layout.kinds().items():
        members = " ".join("{" + ",".join(map(str, g)) + "}" for g in groups)
        table.add_row(kind, str(len(groups)), str(len(groups[0])), str(len(crossing(groups, host_of))), members)
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
        sys.stdout.reconfigure(line_buffering=True)  # a log that is followed shows each line as it comes
    if command not in COMMANDS:
        print(f"megacore: unknown command {command!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
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
        line = " ".join(str(error).split())
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
