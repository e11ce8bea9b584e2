"""The settings of a training run: frozen dataclasses, read from a TOML file, checked before anything starts.

A field is named by section and name (`optim.lr`). Names that users know from elsewhere are accepted in the file and on
the command line (`tensor_model_parallel_size` is `parallel.tp`); ALIASES lists them.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megacore.comm.mesh import ORDER, Layout
from megacore.train.names import advice
from megacore.train.plain import plain
from megacore.train.ranges import Range, check_value, range_of, within
from megacore.train.regular import read_bytes

LARGEST = 1 << 20  # bytes of a settings file
ALIASES = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "data_parallel_size": "parallel.dp",
    "expert_model_parallel_size": "parallel.ep",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_heads",
    "ffn_hidden_size": "model.ffn",
    "learning_rate": "optim.lr",
    "padded_vocab_size": "model.vocab_size",
    "global_batch_size": "data.global_batch",
    "micro_batch_size": "data.micro_batch",
    "train_iters": "run.steps",
    "lr_warmup_iters": "optim.warmup_steps",
    "clip_grad": "optim.clip",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_eps": "optim.eps",
    "log_interval": "run.log_every",
    "eval_interval": "run.eval_every",
    "eval_iters": "run.eval_steps",
    "save_interval": "run.save_every",
}


@dataclass(frozen=True)
class ModelSettings:
    """The Transformer. Sizes are those of the whole model, not of a shard."""

    kind: str = "gpt"  # the model family: gpt
    layers: int = within(4, 1, 2**14)  # Transformer blocks
    hidden: int = within(128, 1, 2**20)  # features of the residual stream
    heads: int = within(4, 1, 2**16)  # attention heads
    kv_heads: int = within(0, 0, 2**16)  # key and value heads, shared by groups of query heads; 0: as many as `heads`
    ffn: int = within(0, 0, 2**22)  # features inside the MLP; 0: 4 * hidden
    vocab_size: int = within(0, 0, 2**31 - 1)  # true number of tokens; 0: the tokenizer's
    seq_length: int = within(128, 1, 2**24)  # tokens in a sample
    dropout: float = within(0.0, 0, 1, below=True)  # on embeddings, attention output and MLP output
    activation: str = "tanh"  # the form of GeLU: tanh or erf
    tied: bool = True  # the output matrix is the embedding


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes share the work; world = tp * cp * dp * pp."""

    tp: int = within(1, 1, 2**16)  # ranks that split each matrix
    pp: int = within(1, 1, 2**16)  # pipeline stages
    dp: int = within(0, 0, 2**16)  # replicas, each with its own part of the batch; 0: world / (tp * cp * pp)
    cp: int = within(1, 1, 2**16)  # ranks that split the sequence
    ep: int = within(1, 1, 2**16)  # ranks that split the experts; divides dp * cp
    order: str = ORDER  # the axes from fastest to slowest
    schedule: str = "1f1b"  # pipeline schedule: 1f1b or gpipe
    bucket_mb: float = within(32.0, 0.001, 2**16)  # size of a gradient bucket

    def layout(self, world: int = 0) -> Layout:
        """The layout of `world` processes; where dp is not given and nothing is said of a world, of as few as it takes.
        ValueError for sizes that make no layout; that they make this world is for check() to see."""
        dp = self.dp or max(1, world // max(1, self.tp * self.cp * self.pp))
        return Layout(tp=self.tp, cp=self.cp, dp=dp, pp=self.pp, ep=self.ep, order=self.order)


@dataclass(frozen=True)
class DataSettings:
    """What `megacore prepare` wrote, and how much of it one optimizer step sees."""

    dir: str = ""  # folder written by `megacore prepare`: train.bin/.idx, valid.bin/.idx, tokenizer.json
    global_batch: int = within(8, 1, 2**24)  # samples in one optimizer step, over all ranks
    micro_batch: int = within(1, 1, 2**24)  # samples in one forward of one rank
    shuffle: bool = True  # a new order each epoch, keyed by run.seed


@dataclass(frozen=True)
class OptimSettings:
    """AdamW, linear warm-up, cosine decay to `min_lr` at `run.steps`, clipping by the global norm."""

    lr: float = within(1e-3, 0, 1e30)  # peak learning rate
    min_lr: float = within(-1.0, 0, 1e30, unset=-1)  # at the end of the decay; -1: 1e-4, or lr where that is less
    warmup_steps: int = within(-1, 0, 10**9, unset=-1)  # linear warm-up; -1: 20, or run.steps where fewer
    beta1: float = within(0.9, 0, 1, below=True)
    beta2: float = within(0.95, 0, 1, below=True)
    eps: float = within(1e-8, 1e-30, 1)
    weight_decay: float = within(0.1, 0, 1e4)  # on matrices and embeddings only
    clip: float = within(1.0, 0, 1e30)  # largest global gradient norm; 0: no clipping


@dataclass(frozen=True)
class RunSettings:
    """How long, where to, how often."""

    out: str = "runs/run"  # run folder: checkpoints, metrics.jsonl, tensorboard, tokenizer
    steps: int = within(100, 1, 10**9)  # optimizer steps of the whole run; fixes the learning-rate schedule
    stop_at: int = within(0, 0, 10**9)  # leave cleanly after this step, schedule unchanged; 0: at `steps`
    seed: int = within(0, 0, 2**63 - 1)  # weights, data order and dropout
    fused_loss: bool = True  # head and loss in one operator, which never holds all logits
    precision: str = "fp32"  # fp32, bf16 (fp32 masters) or fp64
    device: str = "auto"  # auto (a GPU if there is one), cpu or cuda
    # CPU threads of a process; 0: 1 when ranks share a host, torch's choice for one process
    threads: int = within(0, 0, 1024)
    # steps between lines on a screen that is no terminal; metrics.jsonl has every step
    log_every: int = within(10, 1, 10**9)
    eval_every: int = within(0, 0, 10**9)  # steps between evaluations; 0: at the end only
    eval_steps: int = within(8, 0, 10**9)  # global batches of one evaluation
    save_every: int = within(0, 0, 10**9)  # steps between checkpoints; 0: at the end only
    keep: int = within(2, 1, 10**9)  # checkpoints kept
    tensorboard: bool = True
    # peak of one device for MFU; 0: from the device's name, or measured (fp32 matmul) on CPU
    peak_tflops: float = within(0.0, 0, 1e9)
    # steps in a row without finite gradients after which the run has diverged and ends; 0: never
    max_skipped: int = within(10, 0, 10**9)
    timeout_s: float = within(600.0, 0.1, 30 * 86400)  # a collective that waits longer ends the run
    sample_tokens: int = within(96, 0, 10**6)  # length of the text in the closing report; 0: none
    sample_prompt: str = "def "


@dataclass(frozen=True)
class Settings:
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @property
    def last_step(self) -> int:
        return min(self.run.steps, self.run.stop_at) if self.run.stop_at else self.run.steps

    def filled(self, world: int) -> Settings:
        """What is left open (dp, warm-up, lowest rate) filled in for a run of `world` processes."""
        o = self.optim
        minimum = min(1e-4, o.lr) if o.min_lr == -1 else o.min_lr
        warmup = min(20, self.run.steps) if o.warmup_steps == -1 else o.warmup_steps
        parallel = dataclasses.replace(self.parallel, dp=self.parallel.layout(world).dp)
        optim = dataclasses.replace(o, min_lr=minimum, warmup_steps=warmup)
        return dataclasses.replace(self, parallel=parallel, optim=optim)

    def serial(self) -> Settings:
        """The same run on one process: same batches, same micro-batch size, layout 1x1x1."""
        return dataclasses.replace(self, parallel=dataclasses.replace(self.parallel, tp=1, pp=1, dp=1, cp=1, ep=1))


def field_names() -> dict[str, type]:
    """Every field by its full name, with its type."""
    names = {}
    for section, cls in get_type_hints(Settings).items():
        hints = get_type_hints(cls)
        names.update({f"{section}.{f.name}": hints[f.name] for f in fields(cls)})
    return names


def ranges() -> dict[str, Range | None]:
    """The range of every number by its field's full name; None for other fields."""
    kinds = field_names()
    sections = get_type_hints(Settings).items()
    return {n: range_of(f, kinds[n]) for section, cls in sections for f in fields(cls) for n in [f"{section}.{f.name}"]}


def nearest(name: str) -> str:
    """What to say of a name that is none: the field that it most likely means, or those that there are."""
    return advice(name, list(field_names()), ALIASES)


def load(path: str | Path) -> Settings:
    """The settings of a TOML file; fields it does not name keep their defaults. ValueError (one line) on a file that is
    missing, no regular file, no TOML, an unknown field, a value of the wrong type or outside its field's range."""
    named = f"config='{plain(path)}'"
    try:
        tree = tomllib.loads(read_bytes(path, LARGEST).decode("utf-8-sig").replace("\r\n", "\n"))
    except RecursionError:
        raise ValueError(f"{named} is nested too deeply; the sections are {_sections()}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{named} is not TOML: {plain(error)}") from None
    except (OSError, ValueError) as error:  # UnicodeDecodeError; a NUL in the path; a number of 4300 digits
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{named} cannot be read ({plain(why)}); give the path of a TOML file") from None
    return from_tree(tree, plain(path))


def from_tree(tree: Mapping[str, Any], source: str = "settings") -> Settings:
    """Settings from nested mappings, as TOML or a checkpoint's JSON gives them. ValueError as load()."""
    known, allowed = field_names(), ranges()
    values: dict[str, Any] = {}
    for name, value in _named(tree, source):
        full = name if name in known else ALIASES.get(name.rsplit(".", 1)[-1])
        if full is None:
            raise ValueError(f"{source}: unknown field '{plain(name)}'; {nearest(name)}")
        if full in values:
            raise ValueError(f"{source}: field {full!r} is given twice (also as '{plain(name)}'); keep one")
        values[full] = _typed(full, value, known[full], source)
        check_value(full, values[full], allowed[full], source)
    sections = {}
    for section, cls in get_type_hints(Settings).items():
        given = {f.name: values[f"{section}.{f.name}"] for f in fields(cls) if f"{section}.{f.name}" in values}
        sections[section] = cls(**given)
    return Settings(**sections)


def _sections() -> str:
    return ", ".join(f"[{s}]" for s in get_type_hints(Settings))


def _named(tree: Mapping[str, Any], source: str) -> Iterator[tuple[str, Any]]:
    """(section.name or name, value). Whatever stands inside a section is a value, tables too: one where a number is
    wanted is not to be taken for nothing."""
    sections = get_type_hints(Settings)
    for key, value in tree.items():
        if key in sections:
            if not isinstance(value, Mapping):
                raise ValueError(f"{source}: {key}={_short(value)} is {type(value).__name__}; give a section [{key}]")
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif isinstance(value, Mapping) and key not in ALIASES:
            near = [f"[{s}]" for s in difflib.get_close_matches(key, sections, n=1, cutoff=0.7)]
            hint = f"nearest valid section: {near[0]}" if near else f"the sections are {_sections()}"
            raise ValueError(f"{source}: unknown section [{plain(key)}]; {hint}")
        else:
            yield key, value


def _typed(name: str, value: Any, kind: type, source: str) -> Any:
    if kind is float and type(value) is int and abs(value) < 2**1023:  # the range refuses more
        return float(value)
    accepted = get_args(kind) or (kind,)
    if type(value) not in accepted and not (kind is float and type(value) is int):
        raise ValueError(f"{source}: {name}={_short(value)} is {type(value).__name__}; give {kind.__name__}")
    return value


def _short(value: Any) -> str:
    text = plain(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def describe(settings: Settings) -> dict[str, Any]:
    """Nested plain values, for JSON."""
    return dataclasses.asdict(settings)
