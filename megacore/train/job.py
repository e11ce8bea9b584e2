"""One process of a training job, from settings to exit code: checks, communicators, step, loop, report."""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from megacore.comm.mesh import Mesh
from megacore.train import checkpoint
from megacore.train.agreement import CheckpointError, by_first, together
from megacore.train.assemble import family
from megacore.train.config import Settings
from megacore.train.corpus import Corpus
from megacore.train.failure import StopRequest, guard
from megacore.train.launch import Place
from megacore.train.lock import NAME as LOCK
from megacore.train.lock import RunLock
from megacore.train.loop import Loop, Outcome
from megacore.train.outlets import Screen, best_effort, write_whole
from megacore.train.peak import gpu_peak, measure_cpu_peak
from megacore.train.peers import Board
from megacore.train.plain import screen
from megacore.train.report import Closing, print_report, recalled, report_is_of, write_report
from megacore.train.resume import check_files
from megacore.train.same import facts
from megacore.train.sample import continue_text
from megacore.train.start import join, meet
from megacore.train.step import TrainStep
from megacore.train.timers import PARTS

FILES_S = 1800.0  # one rank may work on files for so long, or for run.timeout_s if that is more, while others wait
SAMPLED_PARAMETERS = 200_000_000  # up to here the closing report has a sample of text


def run(settings: Settings, place: Place, fresh: bool = False) -> int:
    """Train; the exit code. Every rank of the job calls this once; the world is that of torchrun's environment."""
    settings, corpus = check_files(settings.filled(place.world), fresh)
    device = choose_device(settings.run.device, place.local_rank)
    set_arithmetic(settings.run.threads, place.local_world, device)
    board = join(place, settings.run.timeout_s)
    if board.store is not None:
        meet(board, facts(settings, corpus, device, fresh))

    def work() -> int:
        connect(device, place, board)
        return _train(settings, corpus, place, device, fresh)

    return guard(work, board, os.getppid() if place.elastic else None)


def choose_device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("run.device='cuda' and torch finds no GPU; set run.device = cpu, or install a torch with CUDA")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"run.device='cuda': rank {local_rank} of this host has no GPU of its own "
            f"({torch.cuda.device_count()} here); start one process a GPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def set_arithmetic(threads: int, local_world: int, device: torch.device) -> None:
    """The same bits whenever the same run is repeated."""
    if threads or local_world > 1:
        torch.set_num_threads(threads or 1)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = (
            False  # a debugging aid; costs a write of every new tensor
        )


def connect(device: torch.device, place: Place, board: Board) -> None:
    """Join the job's process group; a world of one has none."""
    if place.world > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        options = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            backend, store=dist.PrefixStore("groups", board.store.clone()), rank=place.rank, world_size=place.world,
            timeout=timedelta(seconds=board.timeout_s), **options,
        )  # fmt: skip


def _train(settings: Settings, corpus: Corpus, place: Place, device: torch.device, fresh: bool) -> int:
    out, timeout = Path(settings.run.out), settings.run.timeout_s
    with StopRequest() as stop, RunLock(out) as lock:
        console = screen(file=Screen(sys.stdout))
        mesh = Mesh.build(
            settings.parallel.layout(), timedelta(seconds=timeout), files=timedelta(seconds=max(timeout, FILES_S))
        )
        by_first(mesh.files, f"cannot use {out}", lock.take)
        if fresh:
            _set_aside(out, Path(settings.data.dir), mesh, console)
        model = family(settings.model, settings.run.seed)
        trainer = TrainStep(
            model.build, model.plan, mesh, seed=settings.run.seed, precision=settings.run.precision,
            schedule=settings.parallel.schedule, optim=settings.optim, init=model.init, device=device,
            bucket_bytes=int(settings.parallel.bucket_mb * 2**20), fused_loss=settings.run.fused_loss,
        )  # fmt: skip
        loop = Loop(settings, trainer, corpus, device, console)
        loop.resume()
        if mesh.rank == 0:
            _introduce(settings, trainer, console)
        peak, source = total_peak(settings, mesh, place, device)
        outcome = loop.run(stop)
        closing = None
        if outcome.trained and not outcome.stopped:
            closing = _close(settings, loop, outcome, (peak, source), model.flops_per_token, device)
        elif mesh.rank == 0 and not outcome.stopped and not report_is_of(out / "report.json", outcome.done):
            closing = recalled(  # the process that trained ended after its last save
                out / "metrics.jsonl", flops_per_token=model.flops_per_token, peak_flops=peak, peak_source=source,
                train_loss=outcome.train_loss, valid_loss=outcome.valid_loss, averaged=len(loop.losses),
                vocab_size=settings.model.vocab_size, done=outcome.done,
            )  # fmt: skip
        _leave(mesh)  # rank 0 then reports alone: its text may take longer than others may wait
        if mesh.rank == 0 and closing:
            _report(settings, closing, out, console)
        if mesh.rank == 0 and not outcome.trained and not outcome.stopped:
            console.print(
                f"the run in {out} is complete at step {outcome.done}; raise run.steps, or start anew with --fresh",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
    return 0


def _leave(mesh: Mesh) -> None:
    if mesh.world.size > 1:
        dist.barrier(group=mesh.files.pg)  # who leaves while another still communicates looks like a failed peer
        mesh.destroy()
        dist.destroy_process_group()


def _set_aside(out: Path, data: Path, mesh: Mesh, console: Console) -> None:
    """--fresh: an earlier run in the folder gets another name; nothing is deleted, and the data stays in its place."""

    def move() -> str:
        here = out.resolve()
        if data.resolve() == here:
            raise CheckpointError(f"data.dir={str(data)!r} is run.out and would be moved; give another run.out")
        # `make train` keeps the data of a run inside its folder
        stays = (here / LOCK, data.resolve())
        old = (
            [p for p in out.iterdir() if not any(s.is_relative_to(here / p.name) for s in stays)]
            if out.is_dir()
            else []
        )
        if not old:
            return ""
        number = 1 + max(
            (int(p.suffix[1:]) for p in out.parent.glob(f"{out.name}.*") if p.suffix[1:].isdigit()), default=0
        )
        aside = out.with_name(f"{out.name}.{number}")
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        return str(aside)

    moved = by_first(mesh.files, f"cannot move {out} aside", move)
    if moved and mesh.rank == 0:
        console.print(f"--fresh: the earlier run is now {moved}", highlight=False, markup=False, soft_wrap=True)


def _introduce(settings: Settings, trainer: TrainStep, console: Console) -> None:
    p, m, d = settings.parallel, settings.model, settings.data
    whole, held = trainer.logits_bytes(d.micro_batch * m.seq_length)
    saved = (
        f"; fused loss: {held / 2**20:,.1f} of {whole / 2**20:,.1f} MiB of logits of a micro-batch at a time, "
        f"{(whole - held) / 2**20:,.1f} MiB saved on the last stage"
    )
    console.print(
        f"{m.kind}: {m.layers} layers, hidden {m.hidden}, {m.heads} heads, vocabulary {m.vocab_size}, "
        f"sequence {m.seq_length}, {settings.run.precision}; tp {p.tp} x pp {p.pp} x dp {p.dp}, {p.schedule}, "
        f"global batch {d.global_batch} in micro-batches of {d.micro_batch}{saved if trainer.fused_loss else ''}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    tokenizer, copy = Path(d.dir) / "tokenizer.json", Path(settings.run.out) / "tokenizer.json"
    if tokenizer.is_file() and not (copy.exists() and copy.samefile(tokenizer)):
        with best_effort(f"{copy}, a copy of the data's"):  # a checkpoint is of use without the data
            write_whole(copy, tokenizer.read_bytes())


def total_peak(settings: Settings, mesh: Mesh, place: Place, device: torch.device) -> tuple[float, str]:
    """(FLOP/s of all devices of the run, where the number comes from). Collective."""
    world = mesh.world.size
    if settings.run.peak_tflops:
        return (
            settings.run.peak_tflops * 1e12 * world,
            f"run.peak_tflops = {settings.run.peak_tflops} x {world} processes",
        )
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        one = gpu_peak(name)
        return (
            (one * world, f"{one / 1e12:,.0f} TFLOP/s dense bf16 of {name} x {world}")
            if one
            else (0.0, f"{name} is not in the table; set run.peak_tflops")
        )
    cores = len(os.sched_getaffinity(0))
    mine = measure_cpu_peak(cores) if place.local_rank == 0 else 0.0
    total = torch.tensor([mine, float(place.local_rank == 0)], dtype=torch.float64)
    if world > 1:
        dist.all_reduce(total, group=mesh.files.pg)
    flops, hosts = total.tolist()
    where = f"{cores} cores" + (f" of {hosts:.0f} hosts" if hosts > 1 else "")
    return (
        flops,
        f"{flops / 1e9:,.1f} GFLOP/s: fp32 matmul [512,512]x[512,512] on one core, measured at start, x {where}",
    )


def _close(
    settings: Settings, loop: Loop, outcome: Outcome, peak: tuple[float, str], flops: float, device: torch.device
) -> Closing:
    """The numbers of the closing report. Collective: times and memory of all ranks are brought together."""
    memory = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _resident()
    mine = {**loop.timers.split(), "memory": memory}
    ranks = together(loop.mesh.world, "cannot gather times", lambda: mine)
    return Closing(
        steps=outcome.trained, tokens=outcome.tokens, seconds=outcome.seconds, flops_per_token=flops,
        peak_flops=peak[0], peak_source=peak[1],
        split={part: sum(r[part] for r in ranks) / len(ranks) for part in PARTS},
        peak_memory=max(r["memory"] for r in ranks), memory_sum=sum(r["memory"] for r in ranks),
        train_loss=outcome.train_loss, valid_loss=outcome.valid_loss, vocab_size=settings.model.vocab_size,
        averaged=len(loop.losses), done=outcome.done,
    )  # fmt: skip


def _resident() -> float:
    """Largest resident memory of this process so far, bytes (Linux counts in KiB)."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _add_sample(settings: Settings, closing: Closing, out: Path) -> None:
    """Text from the last checkpoint, on this process alone while the others wait: only of a model that is small enough,
    and whatever goes wrong with it, the run is done and has its report."""
    tokenizer, found = out / "tokenizer.json", checkpoint.find(out / "checkpoints", verify=False)
    size = sum(prod(s) for name, s in found.shapes.items() if name.startswith("model/")) if found else 0
    if not tokenizer.is_file() or size > SAMPLED_PARAMETERS:
        why = f"{size:,} parameters are too many for one process" if tokenizer.is_file() else f"there is no {tokenizer}"
        closing.notes.append(f"no sample: {why}; see megacore sample")
        return
    try:
        closing.sample = continue_text(
            out / "checkpoints", settings.run.sample_prompt, tokens=settings.run.sample_tokens, tokenizer=tokenizer
        )
    except Exception as error:
        closing.notes.append(f"no sample: {type(error).__name__}: {error}")


def _report(settings: Settings, closing: Closing, out: Path, console: Console) -> None:
    with best_effort("report.json"):
        write_report(out / "report.json", closing)
    if settings.run.sample_tokens:
        _add_sample(settings, closing, out)
        with best_effort("report.json"):
            write_report(out / "report.json", closing)
    print_report(console, closing)
    console.print(
        f"written: {out}/metrics.jsonl, tensorboard, report.json, checkpoints",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
