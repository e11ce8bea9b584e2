"""Settings: what a file may say, what is refused, and that each refusal names field, value, rule and remedy."""

import math
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from megacore.comm.mesh import Layout
from megacore.train.check import check
from megacore.train.config import ALIASES, ParallelSettings, Settings, describe, field_names, from_tree, load, nearest

ROOT = Path(__file__).parents[2]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def changed(**fields: object) -> Settings:
    """Settings with fields given as section__field."""
    settings = Settings()
    for name, value in fields.items():
        section, field = name.split("__")
        settings = replace(settings, **{section: replace(getattr(settings, section), **{field: value})})
    return settings


def test_file_over_defaults(tmp_path):
    settings = load(written(tmp_path, "[model]\nlayers = 7\n[optim]\nlr = 1\n"))
    assert (settings.model.layers, settings.model.hidden, settings.optim.lr) == (7, Settings().model.hidden, 1.0)
    assert isinstance(settings.optim.lr, float)


@pytest.mark.parametrize("place", ["", "[parallel]\n", "[model]\n"])
def test_names_that_users_know(tmp_path, place):
    settings = load(written(tmp_path, place + "tensor_model_parallel_size = 2\npipeline_model_parallel_size = 3\n"))
    assert (settings.parallel.tp, settings.parallel.pp) == (2, 3)


def test_every_alias_names_a_field():
    assert set(ALIASES.values()) <= set(field_names())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optim]\nlearning_rat = 1.0\n", ("optim.learning_rat", "nearest valid name: optim.lr")),
        ("[model]\nlayer = 2\n", ("model.layer", "model.layers")),
        ("[model]\nhiden_size = 2\n", ("model.hiden_size", "model.hidden")),
        ("tensor_model_paralel_size = 2\n", ("tensor_model_paralel_size", "parallel.tp")),
        ("[model]\nlayers = 2.5\n", ("model.layers=2.5", "give int")),
        ("[model]\ntied = 1\n", ("model.tied=1", "give bool")),
        ("[parallel]\ntp = true\n", ("parallel.tp=True", "give int")),
        ("[parallel]\ntp = 2\ntensor_model_parallel_size = 2\n", ("parallel.tp", "given twice")),
        ("[model\n", ("not TOML",)),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    for part in said:
        assert part in message


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="absent.toml"):
        load("absent.toml")


def test_nearest_falls_back_to_the_section():
    assert "data.dir" in nearest("data.zzzzzz")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optim.learning_rat", "nearest valid name: optim.lr"),
        ("data.precison", "nearest valid name: run.precision"),
        ("optim.min_lr2", "nearest valid name: optim.min_lr"),
        ("model.num_heads", "nearest valid name: model.heads"),
        ("run.recompute", "no name is near it, there are run.out, run.steps,"),
        ("recompute", "no name is near it; the sections are [model]"),
    ],
)
def test_a_name_is_offered_only_where_it_is_near(name, said):
    assert nearest(name).startswith(said)


NUMBERS = {name: kind for name, kind in field_names().items() if kind in (int, float)}
WRONG = {int: (-2, 2**63, 10**5000), float: (math.inf, -math.inf, math.nan, 1e308)}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range_of_its_own_and_keeps_to_it(name):
    """MB-57. A field without a range is one that a run may be started with and end by a signal, spin, or NaN."""
    section, leaf = name.split(".")
    declared = {f.name: f for f in fields(get_type_hints(Settings)[section])}[leaf].metadata
    assert "range" in declared, f"{name}: declare least and most with within()"
    for value in WRONG[NUMBERS[name]]:
        settings = changed(**{f"{section}__{leaf}": value})
        with pytest.raises(ValueError, match=rf"^{name}=.*; give ") as error:
            check(settings, 1)
        assert "\n" not in str(error.value) and len(str(error.value)) < 200
        with pytest.raises(ValueError, match=f"^here: {name}="):
            from_tree({section: {leaf: value}}, "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optim]\nlr = {}\n", ("optim.lr={} is dict", "give float")),
        ("[optim.lr]\n", ("optim.lr={} is dict",)),
        ("[model.layers.deeper]\nx = 1\n", ("model.layers=", "is dict")),
        ("optim = 3\n", ("optim=3 is int", "give a section [optim]")),
        ("[extra]\ntensor_model_parallel_size = 2\n", ("unknown section [extra]", "[model]")),
        ("[optim]\nlr = inf\n", ("optim.lr=inf is no finite number",)),
        ("[optim]\nlr = nan\n", ("optim.lr=nan is no finite number",)),
        ("[run]\ntimeout_s = inf\n", ("run.timeout_s=inf", "<= 2592000")),
        ("[run]\nthreads = 100000\n", ("run.threads=100000 is above 1024", "<= 1024")),
        ("[parallel]\nbucket_mb = 1e-9\n", ("parallel.bucket_mb=1e-09 is below 0.001",)),
        ("[model]\nhidden = 9223372036854775807\n", ("model.hidden=9223372036854775807 is above 1048576",)),
        ("[optim]\nlr = 1" + "0" * 400 + "\n", ("optim.lr=2^1328 or more is above",)),
        ("[run]\nout = 'a\\u0000b'\n".replace("'", '"'), ("run.out=", "NUL")),
        ("x = " + "[" * 100_000, ("nested too deeply",)),
        ("run.steps = " + "9" * 10_000, ("cannot be read", "4300")),
    ],
)
def test_a_value_that_is_not_meant_is_named(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    for part in said:
        assert part in message


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\r\nlayers = 7\r\n")
    assert load(path).model.layers == 7


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_a_file_that_is_none_is_named_and_not_waited_for(tmp_path, make):
    make(tmp_path / "x.toml")
    with pytest.raises(ValueError, match=r"x.toml' cannot be read \(not a regular file but a"):
        load(tmp_path / "x.toml")
    with pytest.raises(ValueError, match="not a regular file but a device"):
        load("/dev/zero")
    (tmp_path / "big.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ValueError, match="more than 1,048,576"):
        load(tmp_path / "big.toml")


def test_what_is_left_open_is_filled_from_the_world_and_the_length():
    settings = changed(parallel__tp=2, run__steps=5, optim__lr=1e-5)
    check(settings, 8)
    filled = settings.filled(8)
    assert filled.parallel.layout() == Layout(tp=2, dp=4)
    assert (filled.optim.warmup_steps, filled.optim.min_lr) == (5, 1e-5)
    assert filled.filled(8) == filled == from_tree(describe(filled))
    long = Settings().filled(1).optim
    assert (long.warmup_steps, long.min_lr) == (20, 1e-4)  # what they were when they were not open
    with pytest.raises(ValueError, match="optim.warmup_steps=20 is more than run.steps=5"):
        check(changed(run__steps=5, optim__warmup_steps=20), 1)


def test_the_readmes_file_works_with_the_readmes_command(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    settings = replace(load(written(tmp_path, text)), parallel=ParallelSettings(tp=2))
    check(settings, 8)
    assert settings.filled(8).parallel.dp == 4


def test_round_trip():
    settings = changed(model__layers=3, run__out="x", optim__lr=0.5)
    assert from_tree(describe(settings)) == settings


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path):
    settings = load(path)
    check(settings, settings.parallel.layout().world)
    check(settings.serial(), 1)


@pytest.mark.parametrize(
    ("fields", "world", "said"),
    [
        ({"parallel__tp": 2}, 1, ("world=1", "tp*cp*dp*pp", "= 2", "--nproc 2")),
        ({"parallel__dp": 1}, 8, ("world=8", "leave parallel.dp out", "it is then 8")),
        ({"parallel__tp": 2, "parallel__dp": 3}, 8, ("world=8", "= 6", "--nproc 6", "it is then 4")),
        ({"parallel__tp": 3, "model__heads": 6, "model__hidden": 12}, 8, ("world=8", "for any dp", "--nproc 9")),
        ({"model__heads": 5}, 1, ("model.heads=5", "model.hidden=128", "choose one of [1, 2, 4")),
        ({"parallel__tp": 8, "model__heads": 4}, 8, ("parallel.tp=8", "model.heads=4", "<= 4")),
        ({"parallel__pp": 7, "model__layers": 4}, 7, ("parallel.pp=7", "model.layers=4", "<= 6")),
        ({"parallel__dp": 4, "data__global_batch": 3}, 4, ("data.global_batch=3", "parallel.dp=4", ">= 4")),
        ({"parallel__cp": 2}, 2, ("parallel.cp=2", "= 1")),
        ({"parallel__tp": 0}, 1, ("tp=0",)),
        ({"parallel__order": "tp-dp"}, 1, ("order='tp-dp'",)),
        ({"parallel__schedule": "zigzag"}, 1, ("parallel.schedule='zigzag'", "1f1b")),
        ({"run__precision": "fp8"}, 1, ("run.precision='fp8'", "bf16")),
        ({"model__dropout": 1.0}, 1, ("model.dropout=1.0", "[0, 1)")),
        ({"model__kind": "gtp"}, 1, ("model.kind='gtp'", "gpt")),
        ({"optim__min_lr": 1.0}, 1, ("optim.min_lr=1.0", "optim.lr")),
        ({"optim__warmup_steps": 200}, 1, ("optim.warmup_steps=200", "run.steps=100")),
        ({"data__micro_batch": 0}, 1, ("data.micro_batch=0", ">= 1")),
        ({"optim__lr": float("nan")}, 1, ("optim.lr=nan",)),
    ],
)
def test_sizes_that_cannot_work(fields, world, said):
    with pytest.raises(ValueError) as error:
        check(changed(**fields), world)
    message = str(error.value)
    assert "\n" not in message
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel__tp": 3, "model__heads": 4},  # heads split unevenly
        {"parallel__dp": 3, "data__global_batch": 8},  # parts of 3, 3 and 2 samples
        {"parallel__pp": 6, "model__layers": 4},  # embedding and head as stages of their own
    ],
)
def test_uneven_sizes_are_not_refused(fields):
    settings = changed(**fields)
    check(settings, settings.parallel.layout().world)


def test_serial_keeps_the_batches():
    settings = changed(parallel__tp=2, parallel__pp=2, parallel__dp=2, data__global_batch=16, data__micro_batch=2)
    serial = settings.serial()
    assert serial.parallel.layout().world == 1
    assert (serial.data, serial.model, serial.optim, serial.run) == (
        settings.data, settings.model, settings.optim, settings.run,
    )  # fmt: skip
