"""The settings of a training run: frozen dataclasses, read from a TOML file, checked before anything starts.

A field is named by section and name (`optim.lr`). Names that users know from elsewhere are accepted in the file and on
the command line (`tensor_model_parallel_size` is `parallel.tp`); ALIASES lists them.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megacore.comm.mesh import ORDER, Layout

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
    layers: int = 4  # Transformer blocks
    hidden: int = 128  # features of the residual stream
    heads: int = 4  # attention heads
    kv_heads: int = 0  # key and value heads, shared by groups of query heads; 0: as many as `heads`
    ffn: int = 0  # features inside the MLP; 0: 4 * hidden
    vocab_size: int = 0  # true number of tokens; 0: the tokenizer's
    seq_length: int = 128  # tokens in a sample
    dropout: float = 0.0  # on embeddings, attention output and MLP output
    activation: str = "tanh"  # the form of GeLU: tanh or erf
    tied: bool = True  # the output matrix is the embedding


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes share the work; world = tp * cp * dp * pp."""

    tp: int = 1  # ranks that split each matrix
    pp: int = 1  # pipeline stages
    dp: int = 1  # replicas, each with its own part of the batch
    cp: int = 1  # ranks that split the sequence
    ep: int = 1  # ranks that split the experts; divides dp * cp
    order: str = ORDER  # the axes from fastest to slowest
    schedule: str = "1f1b"  # pipeline schedule: 1f1b or gpipe
    bucket_mb: float = 32.0  # size of a gradient bucket

    def layout(self) -> Layout:
        return Layout(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, order=self.order)


@dataclass(frozen=True)
class DataSettings:
    """What `megacore prepare` wrote, and how much of it one optimizer step sees."""

    dir: str = ""  # folder written by `megacore prepare`: train.bin/.idx, valid.bin/.idx, tokenizer.json
    global_batch: int = 8  # samples in one optimizer step, over all ranks
    micro_batch: int = 1  # samples in one forward of one rank
    shuffle: bool = True  # a new order each epoch, keyed by run.seed


@dataclass(frozen=True)
class OptimSettings:
    """AdamW, linear warm-up, cosine decay to `min_lr` at `run.steps`, clipping by the global norm."""

    lr: float = 1e-3  # peak learning rate
    min_lr: float = 1e-4  # learning rate at the end of the decay
    warmup_steps: int = 20  # steps of linear warm-up
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices and embeddings only
    clip: float = 1.0  # largest global gradient norm; 0: no clipping


@dataclass(frozen=True)
class RunSettings:
    """How long, where to, how often."""

    out: str = "runs/run"  # run folder: checkpoints, metrics.jsonl, tensorboard, tokenizer
    steps: int = 100  # optimizer steps of the whole run; fixes the learning-rate schedule
    stop_at: int = 0  # leave cleanly after this step, schedule unchanged; 0: at `steps`
    seed: int = 0  # weights, data order and dropout
    fused_loss: bool = True  # head and loss in one operator, which never holds all logits
    precision: str = "fp32"  # fp32, bf16 (fp32 masters) or fp64
    device: str = "auto"  # auto (a GPU if there is one), cpu or cuda
    threads: int = 0  # CPU threads of a process; 0: 1 when ranks share a host, torch's choice for one process
    log_every: int = 10  # steps between lines on a screen that is no terminal; metrics.jsonl has every step
    eval_every: int = 0  # steps between evaluations; 0: at the end only
    eval_steps: int = 8  # global batches of one evaluation
    save_every: int = 0  # steps between checkpoints; 0: at the end only
    keep: int = 2  # checkpoints kept
    tensorboard: bool = True
    peak_tflops: float = 0.0  # peak of one device for MFU; 0: from the device's name, or measured (fp32 matmul) on CPU
    max_skipped: int = 10  # steps in a row without finite gradients after which the run has diverged and ends; 0: never
    timeout_s: float = 600.0  # a collective that waits longer ends the run
    sample_tokens: int = 96  # length of the text in the closing report; 0: none
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


def nearest(name: str) -> str:
    """The valid field name that a wrong one most likely meant."""
    known = field_names()
    short = name.rsplit(".", 1)[-1]
    by_short: dict[str, str] = {}
    for full in known:
        by_short.setdefault(full.rsplit(".", 1)[-1], full)
    candidates = [*known, *by_short, *ALIASES]
    for asked in (name, short):
        for found in difflib.get_close_matches(asked, candidates, n=1, cutoff=0.6):
            return ALIASES.get(found, by_short.get(found, found))
    section = name.split(".", 1)[0]
    return ", ".join(n for n in known if n.startswith(f"{section}.")) or ", ".join(get_type_hints(Settings))


def load(path: str | Path) -> Settings:
    """The settings of a TOML file; fields it does not name keep their defaults. ValueError (one line) on a missing
    file, an unknown field or a value of the wrong type."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config={str(path)!r} cannot be read ({error}); give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config={str(path)!r} is not TOML: {error}") from None
    return from_tree(tree, str(path))


def from_tree(tree: Mapping[str, Any], source: str = "settings") -> Settings:
    """Settings from nested mappings, as TOML or a checkpoint's JSON gives them."""
    known = field_names()
    values: dict[str, Any] = {}
    for name, value in _flatten(tree):
        full = name if name in known else ALIASES.get(name.rsplit(".", 1)[-1])
        if full is None:
            section = name.split(".", 1)[0]
            if "." in name and section not in (sections := get_type_hints(Settings)):
                near = difflib.get_close_matches(section, sections, n=1) or sections
                raise ValueError(
                    f"{source}: unknown section [{section}]; nearest valid section: {', '.join(f'[{s}]' for s in near)}"
                )
            raise ValueError(f"{source}: unknown field {name!r}; nearest valid name: {nearest(name)}")
        if full in values:
            raise ValueError(f"{source}: field {full!r} is given twice (also as {name!r}); keep one")
        values[full] = _typed(full, value, known[full], source)
    sections = {}
    for section, cls in get_type_hints(Settings).items():
        given = {f.name: values[f"{section}.{f.name}"] for f in fields(cls) if f"{section}.{f.name}" in values}
        sections[section] = cls(**given)
    return Settings(**sections)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += _flatten(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found


def _typed(name: str, value: Any, kind: type, source: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    accepted = get_args(kind) or (kind,)
    if type(value) not in accepted:
        raise ValueError(f"{source}: {name}={value!r} is {type(value).__name__}; give {kind.__name__}")
    return value


def describe(settings: Settings) -> dict[str, Any]:
    """Nested plain values, for JSON."""
    return dataclasses.asdict(settings)
