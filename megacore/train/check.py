"""The rules that settings must meet, checked on every rank before the first collective. Each error is one line: field,
value, rule, remedy."""

from __future__ import annotations

from collections.abc import Collection

from megacore.models.gpt import GELU
from megacore.parallel.record import divisors
from megacore.pipeline import SCHEDULES
from megacore.train.config import Settings
from megacore.train.precision import PRECISIONS

MODELS = ("gpt",)
DEVICES = ("auto", "cpu", "cuda")


def check(settings: Settings, world: int) -> None:
    """Raise ValueError for the first rule that the settings break. Pure: reads no file and talks to nobody."""
    _check_ranges(settings)
    _check_layout(settings, world)
    _check_model(settings)
    _check_batch(settings)


def _check_ranges(settings: Settings) -> None:
    m, d, o, r = settings.model, settings.data, settings.optim, settings.run
    _among("model.kind", m.kind, MODELS)
    _among("model.activation", m.activation, GELU)
    _among("parallel.schedule", settings.parallel.schedule, SCHEDULES)
    _among("run.precision", r.precision, PRECISIONS)
    _among("run.device", r.device, DEVICES)
    _at_least(
        1,
        {"model.layers": m.layers, "model.hidden": m.hidden, "model.heads": m.heads, "model.seq_length": m.seq_length},
    )
    _at_least(1, {"data.global_batch": d.global_batch, "data.micro_batch": d.micro_batch})
    _at_least(1, {"run.steps": r.steps, "run.log_every": r.log_every, "run.keep": r.keep})
    _at_least(0, {"run.eval_every": r.eval_every, "run.eval_steps": r.eval_steps, "run.save_every": r.save_every})
    _at_least(0, {"run.max_skipped": r.max_skipped})
    _at_least(0, {"run.stop_at": r.stop_at, "run.threads": r.threads, "run.peak_tflops": r.peak_tflops})
    _at_least(
        0,
        {
            "model.ffn": m.ffn,
            "model.kv_heads": m.kv_heads,
            "model.vocab_size": m.vocab_size,
            "run.seed": r.seed,
            "run.sample_tokens": r.sample_tokens,
        },
    )
    _at_least(0, {"optim.lr": o.lr, "optim.min_lr": o.min_lr, "optim.warmup_steps": o.warmup_steps})
    _at_least(0, {"optim.weight_decay": o.weight_decay, "optim.clip": o.clip})
    for name, value in {
        "optim.eps": o.eps,
        "run.timeout_s": r.timeout_s,
        "parallel.bucket_mb": settings.parallel.bucket_mb,
    }.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is not positive; give {name} > 0")
    for name, value in {"model.dropout": m.dropout, "optim.beta1": o.beta1, "optim.beta2": o.beta2}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} is outside [0, 1); give 0 <= {name} < 1")
    if o.min_lr > o.lr:
        raise ValueError(f"optim.min_lr={o.min_lr} is above optim.lr={o.lr}; give optim.min_lr <= {o.lr}")
    if o.warmup_steps > r.steps:
        raise ValueError(
            f"optim.warmup_steps={o.warmup_steps} is more than run.steps={r.steps}; give fewer warm-up steps"
        )


def _check_layout(settings: Settings, world: int) -> None:
    p = settings.parallel
    layout = p.layout()  # refuses sizes below one, unknown axes in the order, ep that does not divide dp*cp
    for axis in ("cp", "ep"):
        if getattr(p, axis) != 1:
            raise ValueError(f"parallel.{axis}={getattr(p, axis)} is not supported yet; set parallel.{axis} = 1")
    if layout.world != world:
        raise ValueError(
            f"world={world} is not parallel tp*cp*dp*pp = {p.tp}*{p.cp}*{p.dp}*{p.pp} = {layout.world}; "
            f"start {layout.world} processes (--nproc {layout.world}) or change the layout"
        )


def _check_model(settings: Settings) -> None:
    m, p = settings.model, settings.parallel
    if m.hidden % m.heads:
        raise ValueError(
            f"model.heads={m.heads} does not divide model.hidden={m.hidden}; choose one of {divisors(m.hidden)}"
        )
    if m.kv_heads and m.heads % m.kv_heads:
        raise ValueError(
            f"model.kv_heads={m.kv_heads} does not divide model.heads={m.heads}; choose one of {divisors(m.heads)}"
        )
    if p.tp > m.heads:
        raise ValueError(
            f"parallel.tp={p.tp} is more than model.heads={m.heads}, heads stay whole; choose parallel.tp <= {m.heads}"
        )
    ffn = m.ffn or 4 * m.hidden
    if p.tp > ffn:
        raise ValueError(f"parallel.tp={p.tp} is more than model.ffn={ffn}; choose parallel.tp <= {ffn}")
    if m.vocab_size and p.tp > m.vocab_size:
        raise ValueError(
            f"parallel.tp={p.tp} is more than model.vocab_size={m.vocab_size}: some rank has none; choose a smaller tp"
        )
    links = m.layers + 2  # embedding, blocks, head: what stages are cut from
    if p.pp > links:
        raise ValueError(
            f"parallel.pp={p.pp} is more than the {links} pieces of model.layers={m.layers} (embedding, blocks, head); "
            f"choose parallel.pp <= {links}"
        )


def _check_batch(settings: Settings) -> None:
    d, p = settings.data, settings.parallel
    if d.global_batch < p.dp:
        raise ValueError(
            f"data.global_batch={d.global_batch} has no sample for each of parallel.dp={p.dp} ranks; "
            f"choose data.global_batch >= {p.dp} or parallel.dp <= {d.global_batch}"
        )


def _among(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


def _at_least(least: int, values: dict[str, float]) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name}={value} is below {least}; give {name} >= {least}")
