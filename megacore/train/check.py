"""The rules that settings must meet, checked on every rank before the first collective. Each error is one line: field,
value, rule, remedy."""

from __future__ import annotations

from collections.abc import Collection

from megacore.models.gpt import GELU
from megacore.parallel.record import divisors
from megacore.pipeline import SCHEDULES
from megacore.train.config import Settings, describe, ranges
from megacore.train.plain import plain
from megacore.train.precision import PRECISIONS
from megacore.train.ranges import check_value

MODELS = ("gpt",)
DEVICES = ("auto", "cpu", "cuda")


def check(settings: Settings, world: int) -> None:
    """Raise ValueError for the first rule that the settings break in a world of so many processes. Pure: reads no file
    and talks to nobody."""
    _check_ranges(settings)
    _check_layout(settings, world)
    settings = settings.filled(world)
    _check_rates(settings)
    _check_model(settings)
    _check_batch(settings)


def _check_ranges(settings: Settings) -> None:
    """Every number is within the range that its field declares (config.py), every choice among those there are."""
    m, r = settings.model, settings.run
    values = describe(settings)
    for name, allowed in ranges().items():
        section, _, leaf = name.partition(".")
        check_value(name, values[section][leaf], allowed)
    _among("model.kind", m.kind, MODELS)
    _among("model.activation", m.activation, GELU)
    _among("parallel.schedule", settings.parallel.schedule, SCHEDULES)
    _among("run.precision", r.precision, PRECISIONS)
    _among("run.device", r.device, DEVICES)


def _check_rates(settings: Settings) -> None:
    o, r = settings.optim, settings.run
    if o.min_lr > o.lr:
        raise ValueError(f"optim.min_lr={o.min_lr} is above optim.lr={o.lr}; give optim.min_lr <= {o.lr}")
    if o.warmup_steps > r.steps:
        raise ValueError(
            f"optim.warmup_steps={o.warmup_steps} is more than run.steps={r.steps}; give fewer warm-up steps, or none "
            f"for as many as fit"
        )


def _check_layout(settings: Settings, world: int) -> None:
    p = settings.parallel
    layout = p.layout(world)  # refuses unknown axes in the order, ep that does not divide dp*cp
    for axis in ("cp", "ep"):
        if getattr(p, axis) != 1:
            raise ValueError(f"parallel.{axis}={getattr(p, axis)} is not supported yet; set parallel.{axis} = 1")
    if layout.world == world:
        return
    if p.dp:
        rest, over = divmod(world, p.tp * p.cp * p.pp)
        left = f", or leave parallel.dp out: it is then {rest}" if not over else ""
        raise ValueError(
            f"world={world} is not parallel tp*cp*dp*pp = {p.tp}*{p.cp}*{p.dp}*{p.pp} = {layout.world}; "
            f"start {layout.world} processes (--nproc {layout.world}) or change the layout{left}"
        )
    one = p.tp * p.cp * p.pp
    more = max(1, -(-world // one)) * one
    raise ValueError(
        f"world={world} is not parallel tp*cp*dp*pp = {p.tp}*{p.cp}*dp*{p.pp} for any dp: tp*cp*pp = {one} does not "
        f"divide it; start {more} processes (--nproc {more}) or change the layout"
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
        raise ValueError(f"{name}='{plain(value)}' is unknown; choose one of {', '.join(allowed)}")
