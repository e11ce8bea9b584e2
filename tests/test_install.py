"""Building and installing, without a network: against which torch, what errors say, what an import needs."""

import importlib.metadata
import json
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch

import megacore
from megacore import cli, installation

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHON = sys.executable
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=200, **options)


def python(code: str, **options) -> subprocess.CompletedProcess:
    return run(PYTHON, "-c", code, cwd=options.pop("cwd", ROOT), **options)


@pytest.fixture
def bare(tmp_path) -> Path:
    """A Python that has no packages but those in tmp_path/site."""
    (tmp_path / "site").mkdir()
    program = tmp_path / "bare-python"
    program.write_text(f'#!/bin/sh\nexec env PYTHONPATH="{tmp_path}/site" "{PYTHON}" -S "$@"\n')
    program.chmod(0o755)
    return program


def give_torch(site: Path, version: str, distribution: str | None) -> None:
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("from torch.version import __version__\n")
    (site / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    if distribution:
        info = site / f"torch-{distribution}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {distribution}\n")


@pytest.fixture
def script(tmp_path) -> Path:
    """tools/setup.sh of a checkout in which it may write."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tools" / "setup.sh"


# the second is what pip knows: an index's file has no local label where torch gives itself one


@pytest.mark.parametrize(
    ("version", "distribution"),
    [
        ("2.14.1+cu130", "2.14.1"),
        ("2.13.0+cpu", "2.13.0+cpu"),
        ("2.13.0a0+git12ab34c", "2.13.0a0+git12ab34c"),
        ("2.15.0", "2.15.0"),
    ],
)
def test_the_constraint_is_what_pip_calls_it(version, distribution, bare, script):
    give_torch(bare.parent / "site", version, distribution)
    done = run(script, "constraint", bare)
    assert (done.returncode, done.stdout) == (0, f"torch=={distribution}\n"), done.stderr


def test_a_torch_that_pip_does_not_know_is_not_installed_over(bare, script):
    give_torch(bare.parent / "site", "2.14.1+cu130", None)
    done = run(script, "constraint", bare)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip does not know the torch" in done.stderr and "make build VENV= PYTHON=" in done.stderr


def test_pips_reason_is_shown(bare, script):
    site = bare.parent / "site"
    give_torch(site, "2.14.1+cu130", "2.14.1")
    (site / "pip.py").write_text(
        "import sys\nif '--version' not in sys.argv:\n"
        "    print('ERROR: No matching distribution found for torch==2.14.1+cu130')\n    sys.exit(1)\n"
    )
    done = run(script, "build", bare)
    assert done.returncode == 1
    assert "ERROR: No matching distribution found for torch==2.14.1+cu130" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("the whole log is build/build.log")
    assert (bare.parent / "build" / "build.log").is_file()


@pytest.mark.parametrize(
    ("given", "words"),
    [((), "has no torch >= 2.11"), (("2.9.1",), "has no torch >= 2.11"), (("2.13.0",), "has no pip")],
)
def test_what_a_build_lacks_is_named(given, words, bare, script):
    for version in given:
        give_torch(bare.parent / "site", version, version)
    done = run(script, "build", bare)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_headers_are_looked_for_before_anything_is_downloaded(bare, script):
    (bare.parent / "site" / "sysconfig.py").write_text("get_path = lambda name: '/nowhere'\n")
    done = run(script, "toolchain", bare)
    assert done.returncode == 1 and "Python.h is missing" in done.stderr and "python3-dev" in done.stderr
    assert run(script, "toolchain", bare.parent / "no-python").stderr.count("no such program") == 1


def test_another_torch_is_another_build(bare, script):
    """`make build` after an upgrade of torch, or with another VENV, must not say that all is up to date."""
    give_torch(bare.parent / "site", "2.13.0+cpu", "2.13.0+cpu")
    package = bare.parent / "megacore"
    package.mkdir()
    assert run(script, "current", bare).returncode == 1  # not built
    (package / EXTENSION).touch()
    record = (package / EXTENSION).with_suffix(".json")
    for built, code in (("2.13.0+cpu", 0), ("2.14.1+cu130", 1), ("2.13.0+cpu", 0)):
        record.write_text(json.dumps({"torch": built}))
        assert run(script, "current", bare).returncode == code, built


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_says_what_it_cannot_do(tmp_path):
    done = run("make", "-n", "build", "VENV=/tmp/with a space", cwd=ROOT)
    assert done.returncode == 2 and "spaces" in done.stderr, done.stderr
    done = run("make", "-n", "-f", ROOT / "Makefile", "build", cwd=tmp_path)
    assert done.returncode == 2 and "make -C" in done.stderr, done.stderr
    assert run("make", "-n", "-C", ROOT, "build", cwd=tmp_path).returncode == 0


# --- pip install


def hook(code: str, site: Path, executable: str = PYTHON) -> subprocess.CompletedProcess:
    """tools/backend.py as pip's isolated build runs it: its path has the build's requirements and nothing else."""
    packages = Path(importlib.metadata.distribution("setuptools").locate_file(""))
    for entry in [packages / "setuptools", packages / "_distutils_hack", *packages.glob("setuptools-*.dist-info")]:
        if not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    # pip's own way to hide the rest, which must not hold outside the build
    (site / "sitecustomize.py").write_text("import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\n")
    begin = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); sys.executable = {executable!r}; import backend; "
    )
    # as pip does: no sites but what PYTHONPATH names
    return run(PYTHON, "-S", "-c", begin + code, cwd=ROOT, env={"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"})


def test_an_isolated_build_takes_the_torch_that_will_run_it(bare):
    done = hook("backend.reach_torch(); import torch; print(torch.__file__)", bare.parent / "site")
    assert done.returncode == 0, done.stderr
    version = importlib.metadata.version("torch")
    assert done.stdout.splitlines() == [f"megacore: building against torch {version}", torch.__file__]


@pytest.mark.parametrize("name", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_a_build_without_torch_stops_before_it_begins(name, bare):
    done = hook(f"backend.{name}()", bare.parent / "site", str(bare))
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "must be built against the torch that runs it" in done.stderr
    assert "`pip install .`" in done.stderr and "--no-build-isolation" in done.stderr


def test_a_torch_that_is_too_old_is_named(bare):
    give_torch(bare.parent / "site", "2.9.1+cu128", "2.9.1")
    done = hook("backend.reach_torch()", bare.parent / "site")
    assert done.returncode == 1 and done.stderr.startswith("megacore: torch 2.9.1 is older than 2.11")


def test_setuptools_that_cannot_read_the_metadata_is_named(bare):
    site = bare.parent / "site"
    begin = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import backend"
    environment = {"PYTHONPATH": str(site)}
    done = run(PYTHON, "-S", "-c", begin, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("megacore: no setuptools for "), done.stderr
    info = site / "setuptools-65.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: setuptools\nVersion: 65.5.0\n")
    (site / "setuptools").mkdir()
    (site / "setuptools" / "__init__.py").touch()
    (site / "setuptools" / "build_meta.py").touch()
    done = run(PYTHON, "-S", "-c", begin, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("megacore: setuptools 65.5.0 of "), done.stderr


def test_no_torch_is_asked_for_by_the_build():
    """It would be the newest, some GB of it, and the wheel would not load beside the one that is there."""
    assert PROJECT["build-system"]["build-backend"] == "backend"
    assert not [word for word in PROJECT["build-system"]["requires"] if word.startswith("torch")]


@pytest.mark.parametrize(
    ("distribution", "wanted"),
    [("2.14.1", "torch==2.14.1"), ("2.13.0+cpu", "torch==2.13.0"), ("2.13.0a0+git12", "torch==2.13.0a0+git12")],
)
def test_the_wheel_requires_the_torch_it_was_built_with(distribution, wanted, tmp_path):
    code = (
        "import importlib.metadata as m, runpy, sys; version = m.version; "
        f"m.version = lambda name: {distribution!r} if name == 'torch' else version(name); "
        f"sys.argv = ['setup.py', '-q', 'egg_info', '--egg-base', {str(tmp_path)!r}]; runpy.run_path('setup.py')"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    requires = (tmp_path / "megacore.egg-info" / "requires.txt").read_text().split("\n\n")[0].split()
    assert sorted(requires) == ["numpy", wanted]
    assert f"\nVersion: {megacore.__version__}\n" in (tmp_path / "megacore.egg-info" / "PKG-INFO").read_text()


def test_the_wheel_has_every_module_and_what_errors_name(tmp_path):
    done = run(PYTHON, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "-d", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for path in [p for p in (ROOT / "megacore").rglob("*.py") if "triton_kernels" not in p.parts]:
        assert (tmp_path / path.relative_to(ROOT)).is_file(), path
    for name in ("triton_kernels/linear.py", "configs/stdlib.toml"):
        assert (tmp_path / "megacore" / name).read_bytes() == (ROOT / name).read_bytes()


# --- what an import says and needs


def installed(folder: Path, built: dict | None, library: str = EXTENSION) -> Path:
    """A package with a library that cannot be loaded."""
    package = folder / "megacore"
    package.mkdir(parents=True)
    for name in ("__init__.py", "installation.py"):
        shutil.copy(ROOT / "megacore" / name, package)
    (package / library).write_text("no library")
    if built:
        (package / library).with_suffix(".json").write_text(json.dumps(built))
    return package


def test_an_extension_of_another_torch_says_so_to_a_pip_user(tmp_path):
    installed(tmp_path, {"torch": "2.14.1+cu130", "python": "3.11.4", "cuda": None})
    done = python("import megacore", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ImportError: megacore._C cannot be loaded: it was built with torch 2.14.1+cu130 and"), line
    assert f"here are torch {torch.__version__} and Python" in line
    assert line.endswith(f"{PYTHON} -m pip install --force-reinstall --no-deps --no-cache-dir .") and "make" not in line


@pytest.mark.parametrize(
    ("built", "library", "words"),
    [
        ({"torch": "2.11.0"}, EXTENSION, "it was built with torch 2.11.0 and Python None; here are torch 9.9"),
        ({"torch": "9.9"}, EXTENSION, "broken; here are torch 9.9"),
        (None, EXTENSION, "broken; here are torch 9.9"),
        (None, "_C.cpython-27-x86_64-linux-gnu.so", "it is built for another Python"),
        (None, "other.so", "it is not built; here are torch 9.9"),
    ],
)
def test_the_reason_and_the_command_of_a_checkout(built, library, words, tmp_path):
    package = installed(tmp_path, built, library)
    (tmp_path / "setup.py").touch()
    line = installation.why_it_cannot_load(ImportError("broken"), "9.9", package)
    assert words in line and f"`make build VENV= PYTHON={PYTHON}` in {tmp_path}" in line


BLOCKED = sorted({name for names in installation.EXTRAS.values() for name in names} | {"transformers", "pytest"})


def without(names: list[str], code: str, *argv: str) -> subprocess.CompletedProcess:
    block = f"import sys; sys.modules.update(dict.fromkeys({names!r})); sys.argv = ['megacore', *{list(argv)!r}]; "
    return python(block + code)


def test_operators_layers_mesh_and_pipeline_need_torch_and_numpy_alone():
    imports = "import megacore, megacore.ops, megacore.parallel.plan, megacore.parallel.layers, megacore.comm.mesh, "
    imports += "megacore.pipeline, megacore.models.gpt, megacore.models.hf_gpt2, torch; "
    done = without(BLOCKED, imports + "print(megacore.ops.linear_gelu(torch.ones(2, 3), torch.ones(4, 3)).shape)")
    assert (done.returncode, done.stdout) == (0, "torch.Size([2, 4])\n"), done.stderr


MAIN = "import runpy; runpy.run_module('megacore', run_name='__main__')"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_needs_no_extra(flag):
    done = without(BLOCKED, MAIN, flag)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"megacore {megacore.__version__} (torch {torch.__version__}, Python ")
    assert done.stdout.count("\n") == 1 and "extension: C++" in done.stdout


@pytest.mark.parametrize(
    ("names", "argv"), [(["tyro", "rich"], ["topo", "--tp", "2"]), (["tensorboard"], ["train", "x.toml"])]
)
def test_a_command_names_the_packages_it_lacks(names, argv):
    done = without(names, MAIN, *argv)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"megacore {argv[0]}: error: ")
    assert all(name in done.stderr for name in names) and "pip install 'megacore[train]'" in done.stderr


def test_verify_names_the_packages_it_lacks():
    done = without(["rich"], "import megacore; megacore.verify")
    assert done.stderr.splitlines()[-1].startswith("ImportError: megacore.verify needs rich, not installed here; pip")


def test_the_extras_are_those_of_pyproject():
    declared = PROJECT["project"]["optional-dependencies"]
    for extra, names in installation.EXTRAS.items():
        assert sorted(names) == sorted(re.match(r"[\w-]+", word)[0] for word in declared[extra])
    assert declared["all"] == [f"megacore[{','.join(installation.EXTRAS)}]"]


def test_the_example_that_errors_name_is_there(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (["train"], ["train", "nothing"]):
        assert cli.main(arguments) == 2
        path = re.search(r"megacore train (\S+\.toml)", capsys.readouterr().err)[1]
        assert Path(path).is_file()
    monkeypatch.chdir(ROOT)
    assert str(installation.example_config()) == "configs/stdlib.toml"


def test_the_command_is_the_module():
    """[project.scripts] names a function that exists and is what `python -m megacore` runs."""
    module, _, name = PROJECT["project"]["scripts"]["megacore"].partition(":")
    assert callable(runpy.run_module(module)[name])
