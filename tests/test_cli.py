"""The command line in one process, and two jobs under torchrun itself."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore import cli
from megacore.comm.hosts import crossing, place_ranks
from megacore.train.data.indexed import IndexedDataset

ROOT = Path(__file__).parents[1]
CONFIG = """
[model]
layers = 2
hidden = 16
heads = 2
seq_length = 8
[parallel]
tp = 2
[data]
dir = "{data}"
global_batch = 4
micro_batch = 2
[optim]
warmup_steps = 2
[run]
out = "{out}"
steps = {steps}
eval_every = 0
sample_tokens = 0
peak_tflops = 1.0
tensorboard = false
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Prepared by the command itself."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(["red", "green", "blue"]) for _ in range(80)))
    arguments = [
        "prepare",
        str(folder),
        "--out",
        str(folder / "data"),
        "--vocab-size",
        "270",
        "--valid-fraction",
        "0.2",
    ]
    assert cli.main(arguments) == 0
    return folder / "data"


def config(tmp_path: Path, data: Path, steps: int = 4) -> str:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(data=data, out=tmp_path / "run", steps=steps))
    return str(path)


def test_prepare_writes_what_it_says(data, capsys):
    for side in ("train", "valid"):
        dataset = IndexedDataset(data / side)
        assert dataset.num_tokens > 100
        sidecar = json.loads((data / f"{side}.json").read_text())
        assert sidecar["largest_token_id"] == int(dataset.tokens.max()) < sidecar["vocab_size"] <= 270
    assert (data / "tokenizer.json").is_file()


def test_prepare_shows_progress(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two three " * 50)
    (tmp_path / "b.txt").write_text("four five six " * 50)
    assert cli.main(["prepare", str(tmp_path), "--out", str(tmp_path / "out"), "--vocab-size", "260"]) == 0
    said = capsys.readouterr().out
    for phase in ("read", "tokenizer", "encode", "100%", "2 files read, 0 skipped"):
        assert phase in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepare", "absent", "--out", "x"], "absent"),
        (["prepare", "{data}/tokenizer.json", "--out", "{config}/x"], "run.toml is a file; give a folder"),
        (["train", "absent.toml"], "absent.toml"),
        (["train"], "CONFIG is missing"),
        (["train", "--nproc", "4", "x.cfg"], "CONFIG='x.cfg' is no .toml file"),
        (["train", "{config}", "False"], "unexpected argument 'False'"),
        (["train", "{config}", "--run.tensorboard=maybe"], "neither true nor false"),
        (
            ["train", "{config}", "--parallel.tp", "1", "--data.dir", "nope"],
            "'nope' does not exist; run megacore prepare",
        ),
        (["train", "{config}", "--parallel.tp", "1", "--run.out", "{data}"], "is data.dir"),
        (["train", "{config}", "--parallel.tp", "1", "--run.out", "{config}"], "is a file"),
        (["train", "{config}", "--model.layer", "3"], "nearest valid name: model.layers"),
        (["train", "{config}", "--modle.layers=3"], "model.layers"),
        (["train", "{config}"], "world=1 is not"),
        (["train", "{config}", "--nproc", "3"], "--nproc 2"),
        (["train", "{config}", "--nproc", "2", "--model.vocab-size", "5"], "vocab_size=5"),
        (["sample", "absent"], "absent"),
        (["topo", "--tp", "2", "--dp", "2", "--hosts", "3"], "hosts=3 does not divide world=4"),
        (["topo", "--order", "tp-dp"], "order='tp-dp'"),
        (["trian"], "choose one of prepare, train, topo, verify, sample"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(tmp_path, data, capsys, arguments, said):
    arguments = [a.format(config=config(tmp_path, data), data=data) for a in arguments]
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_options_win_over_the_file_and_known_names_are_kept(tmp_path, data):
    path = config(tmp_path, data)
    command = cli._parse_train(["--nproc", "4", path, "--tensor-model-parallel-size=4", "--optim.lr", "0.5", "--fresh"])
    assert (command.parallel.tp, command.optim.lr, command.model.hidden) == (4, 0.5, 16)
    assert (command.nproc, command.fresh) == (4, True)
    assert cli._without_nproc(["a.toml", "--nproc", "4", "--nproc=5", "--fresh"]) == ["a.toml", "--fresh"]


def test_switches_take_true_and_false(tmp_path, data):
    path = config(tmp_path, data)

    def tensorboard(*arguments: str) -> bool:
        command = cli._parse_train([*arguments, path])
        assert command.fresh
        return command.run.tensorboard

    assert tensorboard("--fresh", "--run.tensorboard") and tensorboard("--fresh=true", "--run.tensorboard", "True")
    assert not tensorboard("--fresh", "--run.tensorboard", "False")
    assert not tensorboard("--fresh", "--run.tensorboard=false") and not tensorboard("--fresh", "--run.no-tensorboard")


def test_a_wrong_section_and_a_spoilt_sidecar_are_named(tmp_path, data, capsys):
    path = Path(config(tmp_path, data))
    path.write_text(path.read_text().replace("[model]", "[modle]"))
    assert cli.main(["train", str(path)]) == 2
    assert "unknown section [modle]; nearest valid section: [model]" in capsys.readouterr().err
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    (copy / "train.json").write_text("{")
    assert cli.main(["train", config(tmp_path, copy), "--parallel.tp=1"]) == 2
    assert "train.json cannot be read" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_ctrl_c_during_the_start_is_no_page_of_tracebacks(tmp_path, data):
    job = started("train", config(tmp_path, data, steps=100_000), "--nproc", "2")
    time.sleep(6)  # wherever the ranks are: torchrun starts, they import, they train
    job.send_signal(signal.SIGINT)
    said, _ = job.communicate(timeout=60)
    assert "Traceback" not in said and len(said.splitlines()) < 40, said


def test_topo_shows_every_group(capsys):
    assert cli.main(["topo", "--tp", "2", "--pp", "2", "--dp", "2", "--hosts", "2"]) == 0
    said = capsys.readouterr().out
    for groups in ("{0,1} {2,3} {4,5} {6,7}", "{0,2} {1,3} {4,6} {5,7}", "{0,4} {1,5} {2,6} {3,7}"):
        assert groups in re.sub(r"[│\n ]+", " ", said)
    assert "warning" not in said


def test_topo_warns_when_tp_crosses_hosts(capsys):
    assert cli.main(["topo", "--tp", "2", "--dp", "2", "--order", "dp-cp-tp-pp", "--hosts", "a:2,b:2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: 2 of 2 tp groups cross hosts: (0, 2) on ['a', 'b']" in said


def test_placing_ranks():
    assert place_ranks("2", 4) == ["host0", "host0", "host1", "host1"]
    assert place_ranks("a:1, b:3", 4) == ["a", "b", "b", "b"]
    assert crossing([(0, 1), (1, 2)], ["a", "b", "b"]) == [(0, 1)]
    for hosts in ("0", "3", "a:2", "a", "a:0,b:4", ":4"):
        with pytest.raises(ValueError, match="hosts"):
            place_ranks(hosts, 4)


def test_place_is_torchruns():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = cli.place_of(env)
    assert (place.rank, place.world, place.local_rank, place.local_world) == (5, 8, 1, 4)
    assert cli.place_of({}).world == 1


def started(*arguments: str) -> subprocess.Popen:
    """`python -m megacore ...` in a process of its own, both outputs in one pipe."""
    command = [sys.executable, "-m", "megacore", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(180)
def test_sigterm_under_torchrun_saves_and_ends_with_0(tmp_path, data):
    job = started("train", config(tmp_path, data, steps=100_000), "--nproc", "2", "--run.log-every", "1")
    said = []
    for line in job.stdout:
        said.append(line)
        if line.startswith("step 3/"):
            job.send_signal(signal.SIGTERM)
            break
    rest, _ = job.communicate(timeout=60)
    assert job.returncode == 0, "".join(said) + rest
    assert "asked to stop" in rest and "saved" in rest
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 3
    assert (tmp_path / f"run/checkpoints/step-{len(steps):08d}").is_dir()


@pytest.mark.timeout(180)
def test_a_failure_under_torchrun_shows_its_cause_first(tmp_path, data):
    """The data are spoilt so that the start finds nothing wrong: the sidecar's largest id is not true."""
    copy = tmp_path / "data"
    copy.mkdir()
    for file in data.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tokens = IndexedDataset(copy / "train").tokens
    spoilt = tokens.copy()
    spoilt[len(spoilt) // 2 :] = 60000
    (copy / "train.bin").write_bytes(spoilt.tobytes())
    began = time.monotonic()
    job = started("train", config(tmp_path, copy, steps=100), "--nproc", "2")
    said, _ = job.communicate(timeout=60)
    assert job.returncode not in (0, None), said
    assert re.search(r"rank \d failed: .*60000", said), said
    assert "ChildFailedError" not in said, said
    assert said.index("60000") < (said.find("stops: rank") if "stops: rank" in said else len(said)), said
    assert time.monotonic() - began < 60
    assert not os.path.exists(tmp_path / "run/report.json")
