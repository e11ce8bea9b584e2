"""Whole training jobs on four processes: parallel equals serial, stops and resumes repeat every loss, one failure ends
all."""

import json
import random
from math import prod
from pathlib import Path

import pytest

from megacore.train.data.prepare import prepare
from megacore.train.metrics import read
from tests.train.jobs import JobServer

TP_DP, TP_PP, PP4, ALL = ("tp=2", "dp=2"), ("tp=2", "pp=2"), ("pp=4",), ("tp=2", "pp=2", "dp=2")
TOML = """
[model]
layers = 4
hidden = 16
heads = 4
seq_length = 8
dropout = 0.1
[data]
dir = "{data}"
global_batch = 8
micro_batch = 2
[optim]
lr = 1e-2
min_lr = 1e-3
warmup_steps = 2
[run]
out = "{out}"
steps = 8
save_every = 2
eval_every = 4
eval_steps = 2
tensorboard = false
peak_tflops = 1.0
sample_tokens = 8
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    server = JobServer(tmp_path_factory.mktemp("jobs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A small corpus, prepared by our own command's function."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for number in range(20):
        words = " ".join(draw.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(60))
        (folder / f"{number}.txt").write_text(words)
    prepare([folder], folder / "data", vocab_size=280, valid_fraction=0.2)
    return folder / "data"


@pytest.fixture
def config(tmp_path, data) -> str:
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(data=data, out=tmp_path / "run"))
    return str(path)


def options(layout=(), out=None, **run) -> list[str]:
    """Command-line options; `run` names fields of [run]."""
    chosen = [f"--parallel.{size}" for size in layout] + [f"--run.{k.replace('_', '-')}={v}" for k, v in run.items()]
    return chosen + ([f"--run.out={out}"] if out else [])


def losses(out: Path) -> dict[int, float]:
    rows = [row for row in read(out / "metrics.jsonl") if "loss" in row]
    assert len({row["step"] for row in rows}) == len(rows), "a step has two lines"
    return {row["step"]: row["loss"] for row in rows}


def whole(jobs, config, tmp_path, layout, name="whole", **run) -> dict[int, float]:
    """The losses of a run that nothing interrupts."""
    world = prod(int(axis[-1]) for axis in layout)
    ended = jobs.run(world, "train", config, *options(layout, tmp_path / name, **run))
    assert ended.codes == [0] * world, ended.output
    return losses(tmp_path / name)


@pytest.mark.parametrize("layout", [TP_DP, TP_PP, PP4, ALL], ids="-".join)
def test_losses_equal_those_of_one_process(jobs, config, tmp_path, layout):
    parallel = whole(jobs, config, tmp_path, layout)
    ended = jobs.run(1, "train", config, "--nproc", "1", *options(layout, tmp_path / "serial"))
    assert ended.codes == [0] and "becomes 1 x 1 x 1" in ended.output, ended.output
    serial = losses(tmp_path / "serial")
    assert sorted(parallel) == sorted(serial) == list(range(1, 9))
    assert max(abs(parallel[s] - serial[s]) for s in serial) < 1e-5
    assert serial[8] < serial[1] - 0.2  # it learns
    valid = [
        [row["valid_loss"] for row in read(tmp_path / name / "metrics.jsonl") if "valid_loss" in row]
        for name in ("whole", "serial")
    ]
    assert valid[0] == pytest.approx(valid[1], abs=1e-5) and len(valid[0]) == 2


def test_report_and_files(jobs, config, tmp_path):
    ended = jobs.run(4, "train", config, *options(TP_PP))
    assert ended.codes == [0] * 4, ended.output
    run = tmp_path / "run"
    report = json.loads((run / "report.json").read_text())
    assert report["tokens"] == 8 * 8 * 8 and report["steps"] == 8
    assert set(report["split_seconds"]) >= {"compute", "tensor", "pipeline", "data_parallel", "data", "checkpoint"}
    assert report["split_seconds"]["tensor"] > 0 and report["split_seconds"]["pipeline"] > 0
    assert report["mfu"] == pytest.approx(report["tokens_per_s"] * report["flops_per_token"] / 4e12)
    for said in (
        "tokens/s",
        "MFU",
        "peak memory",
        "validation loss",
        "time split",
        "sample of generated text",
        "step 8/8",
    ):
        assert said in ended.said[0], ended.said[0]
    assert not any(ended.said[1:]), "only rank 0 speaks"
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "consumed"} <= set(read(run / "metrics.jsonl")[0])
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]
    sampled = jobs.run(1, "sample", str(run), "--prompt", "alpha", "--tokens", "5", "--temperature", "0")
    assert sampled.codes == [0] and sampled.said[0].startswith("alpha"), sampled.output
    again = jobs.run(4, "train", config, *options(TP_PP))
    assert again.codes == [0] * 4 and "complete at step 8" in again.said[0], again.output
    assert "fused loss: 0.0 of 0.0 MiB of logits of a micro-batch at a time, 0.0 MiB saved" in ended.said[0]
    fresh = jobs.run(4, "train", config, "--fresh", *options(TP_PP, steps=2, fused_loss="false"))
    assert fresh.codes == [0] * 4 and "fused loss" not in fresh.said[0], fresh.output
    assert sorted(losses(run)) == [1, 2] and sorted(losses(tmp_path / "run.1")) == list(range(1, 9))


@pytest.mark.parametrize(("layout", "precision"), [(TP_PP, "fp32"), (TP_DP, "bf16")], ids=["tp-pp-fp32", "tp-dp-bf16"])
def test_a_killed_run_resumes_bit_for_bit(jobs, config, tmp_path, layout, precision):
    undisturbed = whole(jobs, config, tmp_path, layout, precision=precision)
    killed = jobs.run(4, "train", config, *options(layout, precision=precision), fault="killed")
    assert killed.codes[1] == -9 and all(killed.codes), killed.output
    assert max(losses(tmp_path / "run")) == 5  # past the checkpoint of step 4
    resumed = jobs.run(4, "train", config, *options(layout, precision=precision))
    assert resumed.codes == [0] * 4 and "at step 4" in resumed.said[0], resumed.output
    assert losses(tmp_path / "run") == undisturbed


def test_a_run_resumes_at_another_layout(jobs, config, tmp_path):
    undisturbed = whole(jobs, config, tmp_path, TP_PP)
    stopped = jobs.run(4, "train", config, *options(TP_PP, stop_at=4))
    assert stopped.codes == [0] * 4 and sorted(losses(tmp_path / "run")) == [1, 2, 3, 4], stopped.output
    for layout, last in ((TP_DP, 6), ((), 8)):
        ended = jobs.run(4 if layout else 1, "train", config, *options(layout, stop_at=last))
        assert set(ended.codes) == {0}, ended.output
    resumed = losses(tmp_path / "run")
    assert sorted(resumed) == sorted(undisturbed)
    assert max(abs(resumed[s] - undisturbed[s]) for s in undisturbed) < 1e-6


def test_sigterm_to_one_rank_stops_all_at_one_step(jobs, config, tmp_path):
    undisturbed = whole(jobs, config, tmp_path, TP_PP)
    ended = jobs.run(4, "train", config, *options(TP_PP), fault="asked to stop")
    assert ended.codes == [0] * 4 and "asked to stop" in ended.said[0], ended.output
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()  # no save was due in the step that it interrupted
    resumed = jobs.run(4, "train", config, *options(TP_PP))
    assert resumed.codes == [0] * 4 and "at step 6" in resumed.said[0], resumed.output
    assert losses(tmp_path / "run") == undisturbed


FAILURES = {
    "dataset raises": (1, "ValueError: sample 7"),
    "iterator ends early": (2, "StopIteration: no more samples"),
    "folder cannot be written": (0, "Permission denied"),
    "loss raises": (3, "ZeroDivisionError: the loss function broke"),
    "bad id": (0, "1000000"),
    "stuck peer": (1, "ValueError: sample 7"),
}


@pytest.mark.parametrize("layout", [TP_DP, PP4], ids="-".join)
@pytest.mark.parametrize("fault", FAILURES)
def test_one_rank_fails_all_stop(jobs, config, tmp_path, fault, layout):
    """MB-22: every process ends within 60 s with a non-zero code, and the log shows the first cause with its rank."""
    rank, cause = FAILURES[fault]
    ended = jobs.run(4, "train", config, *options(layout), fault=fault)
    assert all(code not in (0, -9) for code in ended.codes), ended.output
    blamed = [r for r in range(4) if cause in ended.said[r]]
    if fault == "loss raises" and layout == TP_DP:  # one stage: the loss is computed, and breaks, everywhere
        assert blamed, ended.output
    else:
        assert rank in blamed, ended.output
        assert "Traceback" in ended.said[rank] or "error:" in ended.said[rank]
    for other in set(range(4)) - set(blamed):
        assert "Traceback" not in ended.said[other], ended.output


@pytest.mark.parametrize("layout", [TP_DP, PP4], ids="-".join)
def test_a_checkpoint_that_one_rank_does_not_see_ends_all(jobs, config, layout):
    first = jobs.run(4, "train", config, *options(layout, stop_at=2))
    assert first.codes == [0] * 4, first.output
    ended = jobs.run(4, "train", config, *options(layout), fault="checkpoint not seen")
    assert all(code not in (0, -9) for code in ended.codes), ended.output
    assert "rank 3" in ended.said[0] and "No such file" in ended.said[0], ended.output


def test_a_checkpoint_of_another_model_is_one_line(jobs, config):
    first = jobs.run(4, "train", config, *options(TP_DP, stop_at=2))
    assert first.codes == [0] * 4, first.output
    for change, said in (
        ("--model.hidden=32", "hidden=16"),
        ("--data.global-batch=4", "data.global_batch=8 there"),
    ):
        ended = jobs.run(4, "train", config, change, *options(TP_DP))
        assert ended.codes == [2] * 4, ended.output
        [line] = "".join(ended.said).splitlines()  # what all ranks find, one says
        assert said in line, ended.output


def _truncate(data: Path) -> None:
    file = data / "train.bin"
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("spoil", "change", "said"),
    [
        (lambda data: (data / "train.idx").unlink(), (), "train.idx is missing"),
        (_truncate, (), "truncated"),
        (lambda data: None, ("--model.vocab-size=20",), "vocab_size=20"),
        (lambda data: None, ("--parallel.tp=4",), "world=4 is not"),
        (lambda data: None, ("--model.heads=3",), "model.heads=3"),
        (lambda data: None, ("--model.layer=3",), "unknown field 'model.layer'"),
        (lambda data: None, ("--data.dir=nowhere",), "nowhere"),
    ],
    ids=["missing", "truncated", "vocabulary", "world", "heads", "field", "folder"],
)
def test_what_cannot_work_ends_every_rank_with_one_line(jobs, config, tmp_path, data, spoil, change, said):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in data.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    spoil(copy)
    ended = jobs.run(4, "train", config, f"--data.dir={copy}", *options(TP_DP), *change, limit=30)
    assert ended.codes == [2] * 4, ended.output
    [line] = "".join(ended.said).splitlines()
    assert said in line, ended.output


def _flip(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def test_a_corrupt_checkpoint_costs_no_good_one(jobs, config, tmp_path):
    folder = tmp_path / "run/checkpoints"
    for last, spoilt in ((4, 4), (6, 6)):  # 2 and 4 kept, 4 spoilt; on from 2: 4 and 6 kept, 6 spoilt
        ended = jobs.run(2, "train", config, *options(("tp=2",), stop_at=last))
        assert ended.codes == [0] * 2, ended.output
        _flip(folder / f"step-{spoilt:08d}")
    sampled = jobs.run(1, "sample", str(tmp_path / "run"), "--tokens", "2")
    assert sampled.codes == [0] and "step-00000006" in sampled.said[0] and "text from step 4" in sampled.said[0]
    ended = jobs.run(2, "train", config, *options(("tp=2",)))
    assert ended.codes == [0] * 2 and "at step 4" in ended.said[0], ended.output
    assert "step-00000006 is now step-00000006.skipped" in ended.said[0], ended.output
    names = [f"step-{n}" for n in ("00000004.skipped", "00000006", "00000006.skipped", "00000008")]
    assert sorted(p.name for p in folder.iterdir()) == names
    for name in ("step-00000006", "step-00000008"):
        _flip(folder / name)
    lost = jobs.run(2, "train", config, *options(("tp=2",)))
    assert all(lost.codes) and "no checkpoint in" in lost.said[0] and len(lost.said[0].splitlines()) == 1, lost.output
