"""Settings: what a file may say, what is refused, and that each refusal names field, value, rule and remedy."""

from dataclasses import replace
from pathlib import Path

import pytest

from megacore.train.check import check
from megacore.train.config import ALIASES, Settings, describe, field_names, from_tree, load, nearest

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
        ({}, 8, ("world=8",)),
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
