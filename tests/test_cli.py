"""The command line in one process, and two jobs under torchrun itself."""

import ast
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
from megacore.comm import wording
from megacore.comm.hosts import crossing, place_ranks
from megacore.train.data.indexed import IndexedDataset
from megacore.train.plain import plain

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
    ended = [line for line in said.splitlines() if line.startswith(("read", "tokenizer", "encode"))]
    assert len(ended) == 3 and all("100%" in line for line in ended), said
    assert "of the 260 asked for" not in said
    (tmp_path / "x.jsonl").write_text("\n" * 5)  # bytes that give no text
    assert cli.main(["prepare", str(tmp_path), "--out", str(tmp_path / "out"), "--vocab-size", "9999"]) == 0
    said = capsys.readouterr().out
    assert "of the 9,999 asked for: the text has no more pairs" in said and said.count("100%") == 3


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
        (["train", "{config}"], "world=1 is not parallel tp*cp*dp*pp = 2*1*dp*1"),
        (["train", "{config}", "--nproc", "3"], "--nproc 4"),
        (["train", "{config}", "--nproc", "2", "--model.vocab-size", "5"], "vocab_size=5"),
        (["sample", "absent"], "absent"),
        (["topo", "--tp", "2", "--dp", "2", "--hosts", "3"], "hosts=3 does not divide world=4"),
        (["topo", "--order", "tp-dp"], "order='tp-dp'"),
        (["topo", "--tp", "1000000000"], "tp=1000000000 is above 65536"),
        (["topo", "--tp", "1000", "--dp", "1000"], "tp*cp*dp*pp=1000000 is above 65536"),
        (["topo", "--tp", "x"], "Error parsing --tp: invalid literal"),
        (["prepare", "{data}"], "--out"),
        (["prepare", "{data}", "--out", "x", "--vocab-size", "1000000000"], "vocab_size=1000000000 is above 1048576"),
        (["sample", "x", "--temperature", "nan"], "temperature=nan is no finite number"),
        (["verify", "--timeout", "inf"], "timeout=inf is no finite number"),
        (["train", "--optim.lr", "-1", "{config}"], "optim.lr=-1.0 is below 0"),
        (["train", "--optim.lr", "-1e-5", "{config}"], "optim.lr=-1e-05 is below 0"),
        (["train", "{config}", "--optim.lr=inf"], "optim.lr=inf is no finite number"),
        (["train", "{config}", "--optim.lr=abc"], "Error parsing --optim.lr: could not convert"),
        (["train", "{config}", "--optim.lr"], "optim.lr has no value"),
        (["train", "{config}", "--optim.lr", "--fresh"], "optim.lr has no value"),
        (["train", "{config}", "--optim.lr", "1", "--learning-rate", "2"], "optim.lr is given twice"),
        (["train", "{config}", "{config}"], "unexpected argument"),
        (["train", "{config}", "--nproc", "-2"], "nproc=-2 is below 0"),
        (["train", "{config}", "--nproc", "1000000"], "nproc=1000000 is above 4096"),
        (["train", "{config}", "--run.recompute", "1"], "no name is near it, there are run.out"),
        (["train", "{config}", "--model.hidden", "9223372036854775807"], "model.hidden=9223372036854775807 is above"),
        (["train", "{config}", "--run.threads", "100000"], "run.threads=100000 is above 1024"),
        (["train", "{config}", "--run.steps", "9" * 5000], "Error parsing --run.steps"),
        (["trian\x1b[31m"], r"unknown command 'trian\x1b[31m'"),
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
    assert command.parallel.dp == 0 and command.filled(8).parallel.dp == 2  # CONFIG says nothing of it
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
    try:
        said, _ = job.communicate(timeout=60)
    finally:
        job.kill()  # and the ranks with it, where Ctrl-C was not heard
    assert "Traceback" not in said and len(said.splitlines()) < 40, said


def test_topo_shows_every_group(capsys):
    assert cli.main(["topo", "--tp", "2", "--pp", "2", "--dp", "2", "--hosts", "2"]) == 0
    said = capsys.readouterr().out
    for groups in ("{0,1} {2,3} {4,5} {6,7}", "{0,2} {1,3} {4,6} {5,7}", "{0,4} {1,5} {2,6} {3,7}"):
        assert groups in re.sub(r"[│\n ]+", " ", said)
    assert "warning" not in said


@pytest.mark.parametrize(("tp", "pp", "dp"), [(8, 2, 4), (8, 8, 8), (1, 1, 512), (16, 8, 512)])
def test_topo_of_many_ranks_stays_readable(capsys, monkeypatch, tp, pp, dp):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["topo", "--tp", f"{tp}", "--pp", f"{pp}", "--dp", f"{dp}"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 40, said
    world = tp * pp * dp
    assert f"{world} ranks" in said and f"{{0..{world - 1}}}" in re.sub(r"[│\n ]+", "", said)
    if (tp, pp, dp) == (8, 8, 8):
        flat = re.sub(r"[│\n ]+", " ", said)
        assert "{0,1,2,3,4,5,6,7} {8,9,10,11,12,13,14,15}" in flat and "{504,505,506,507,508,509,510,511}" in flat
        assert "{0,8,16,24,32,40,48,56}" in flat  # dp


def test_groups_in_words():
    assert wording.members(range(9)) == "{0..8}" and wording.members(range(0, 90, 10)) == "{0,10,..,80}"
    assert wording.members([0, 1, 2, 4, 5, 6, 8, 9, 10]) == "{0,1,2,4,..,10}" and wording.members([3]) == "{3}"
    assert wording.groups([[i] for i in range(9)]) == "{0} {1} {2} ... {8}"


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


MARKUP = ["a[/b]c", "[red]x", ":smile:", "[/INST]", "a\x1b[31mb", os.fsdecode(b"\xff\xfe"), "two\nlines", "[bold"]


@pytest.mark.parametrize("name", MARKUP, ids=range(len(MARKUP)))
def test_mb39_names_are_shown_as_they_are(tmp_path, capsys, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{name.replace('/', '')}.txt").write_text("some text, some more text\n" * 9)
    (tmp_path / "in" / f"{name.replace('/', '')}.cfg").write_text("x")
    (tmp_path / "in/x.jsonl").write_text(json.dumps({name: 1}) + "\n")
    out = tmp_path / name
    assert cli.main(["prepare", str(tmp_path / "in"), "--out", str(out), "--vocab-size", "260"]) == 0
    said = capsys.readouterr().out
    assert f"x.jsonl:1 has {plain(name)})" in said and f"{plain(out)}: 1 files read" in said
    assert "\x1b" not in said and plain(name.replace("/", "")) + ".cfg" in said
    assert cli.main(["train", str(tmp_path / "absent.toml"), "--run.out", name, f"--{name}"]) == 2
    assert cli.main(["train", str(out / "x.toml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and plain(out) in lines[1]


@pytest.mark.timeout(180)
def test_mb39_a_run_in_a_folder_of_such_a_name(tmp_path, data, capsys):
    """And what a README's reader does: a short run, its dp and its warm-up left open."""
    path = Path(config(tmp_path, data))
    path.write_text(path.read_text().replace("warmup_steps = 2\n", "").replace("tp = 2\n", ""))
    out = tmp_path / "runs/a[/b]c:smile:[red]"
    assert cli.main(["train", str(path), "--run.out", str(out), "--run.steps", "3", "--optim.lr", "1e-5"]) == 0
    said = capsys.readouterr().out
    assert f"saved {out}/checkpoints" in said and f"written: {out}/" in said
    assert cli.main(["train", str(path), "--run.out", str(out), "--run.steps", "3", "--optim.lr", "1e-5"]) == 0
    assert f"the run in {out} is complete" in capsys.readouterr().out


def test_no_console_takes_the_words_of_others_for_markup():
    """Whoever makes a console of his own turns markup and emoji on again."""
    found = []
    for folder in ("megacore", "bench", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
                if name == "Console" or name == "from_markup":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [f for f in found if not f.startswith("megacore/train/plain.py")] == []


def test_place_is_torchruns():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    place = cli.place_of(env)
    assert (place.rank, place.world, place.local_rank, place.local_world) == (5, 8, 1, 4)
    assert cli.place_of({}).world == 1
    with pytest.raises(ValueError, match="RANK='x' is no whole number"):
        cli.place_of({"RANK": "x", "WORLD_SIZE": "8"})


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
