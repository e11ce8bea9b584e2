"""Every rule of the house holds over every file, and is shown to fail on a file that breaks it."""

import pytest

from tests.rules import (
    FILE_LINES,
    FLOOR,
    FUNCTION_LINES,
    File,
    builds_for_any_machine,
    committed,
    files_are_short,
    function_lengths,
    functions_are_short,
    imports_go_down,
    kernels_are_a_leaf,
    models_know_no_layout,
    narrow_includes,
    no_bare_triton_kernels,
    no_machine_paths,
    no_module_named_utils,
    no_state_below_train,
    only_cli_imports_tyro,
    only_cli_reads_the_environment,
    python,
)

OURS = ("megacore", "triton_kernels", "bench")
RULES = {
    imports_go_down: OURS,
    kernels_are_a_leaf: OURS,
    no_bare_triton_kernels: (*OURS, "tests", "tools"),
    only_cli_imports_tyro: OURS,
    only_cli_reads_the_environment: OURS,
    no_state_below_train: OURS,
    no_module_named_utils: (*OURS, "tests", "tools"),
    models_know_no_layout: OURS,
    functions_are_short: OURS,
    files_are_short: None,
    narrow_includes: None,
    builds_for_any_machine: None,
    no_machine_paths: None,
}  # rule -> folders whose Python it reads; None: every file of the project


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_holds_everywhere(rule):
    folders = RULES[rule]
    files = committed() if folders is None else python(*folders)
    if rule is builds_for_any_machine:
        files = [f for f in files if f.path in ("setup.py", "Makefile") or f.path.startswith(("csrc/", "tools/"))]
    assert files
    breaches = [line for file in files for line in rule(file)]
    assert not breaches, "\n".join(breaches)


def test_reads_every_package():
    read = {file.module[1] for file in python(*OURS) if file.module[0] == "megacore" and len(file.module) > 1}
    unknown = read - set(FLOOR) - {"__main__"}
    assert not unknown, f"no floor is named for {sorted(unknown)}; give each its place in FLOORS"


def test_reports_the_longest(record_property):
    worst = sorted((entry for file in python(*OURS) for entry in function_lengths(file)), reverse=True)[:5]
    record_property("longest functions", worst)
    assert worst[0][0] <= FUNCTION_LINES, worst


ROOTED = "/" + "root/data"
BREACHES = [
    (imports_go_down, "megacore/comm/mesh.py", "from megacore.ops import dropout"),
    (imports_go_down, "megacore/comm/mesh.py", "from ..ops import dropout"),
    (imports_go_down, "megacore/comm/mesh.py", "from .. import ops"),
    (imports_go_down, "megacore/comm/__init__.py", "from ..train import loop"),
    (imports_go_down, "megacore/ops/dropout.py", "def f():\n    import megacore.parallel.record"),
    (imports_go_down, "megacore/ops/dropout.py", "if TYPE_CHECKING:\n    from megacore.models.gpt import GPT"),
    (imports_go_down, "megacore/parallel/plan.py", "from megacore.pipeline.schedule import Action"),
    (imports_go_down, "megacore/pipeline/execute.py", "from megacore.parallel import batch"),
    (imports_go_down, "megacore/train/loop.py", "from megacore import cli"),
    (imports_go_down, "megacore/train/loop.py", "from megacore import verify"),
    (imports_go_down, "megacore/train/loop.py", "import megacore"),
    (imports_go_down, "megacore/verify.py", "import importlib\nimportlib.import_module('megacore.cli')"),
    (imports_go_down, "triton_kernels/dropout.py", "from megacore.ops import dispatch"),
    (kernels_are_a_leaf, "triton_kernels/dropout.py", "import numpy"),
    (kernels_are_a_leaf, "triton_kernels/dropout.py", "from megacore.comm.mesh import Group"),
    (no_bare_triton_kernels, "megacore/ops/dropout.py", "import triton_kernels"),
    (no_bare_triton_kernels, "tests/ops/test_dropout.py", "def test():\n    from triton_kernels.dropout import f"),
    (only_cli_imports_tyro, "megacore/train/config.py", "import tyro"),
    (only_cli_imports_tyro, "bench/__main__.py", "from tyro.conf import arg"),
    (only_cli_reads_the_environment, "megacore/train/loop.py", "import os\nx = os.environ['RANK']"),
    (only_cli_reads_the_environment, "megacore/ops/dispatch.py", "from os import getenv"),
    (only_cli_reads_the_environment, "megacore/verify.py", "import sys\nx = sys.argv[1]"),
    (no_state_below_train, "megacore/ops/dispatch.py", "registry = {}"),
    (no_state_below_train, "megacore/comm/mesh.py", "made: dict = dict()"),
    (no_state_below_train, "megacore/comm/mesh.py", "def f():\n    global made\n    made = 1"),
    (no_state_below_train, "megacore/models/gpt.py", "SEEN = []\ndef f(x):\n    SEEN.append(x)"),
    (no_state_below_train, "megacore/models/gpt.py", "SEEN = {}\ndef f(x):\n    SEEN[x] = 1"),
    (no_module_named_utils, "megacore/train/utils.py", ""),
    (models_know_no_layout, "megacore/models/gpt.py", "def f(tp_size):\n    return tp_size"),
    (functions_are_short, "megacore/models/gpt.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
    (files_are_short, "csrc/cpu/dropout.cpp", "\n" * (FILE_LINES + 1)),
    (narrow_includes, "csrc/cpu/dropout.cpp", "#include <torch/extension.h>"),
    (narrow_includes, "csrc/bind.cpp", '#include "torch/all.h"'),
    (narrow_includes, "csrc/cuda/dropout.cu", "# include <ATen/ATen.h>"),
    (builds_for_any_machine, "setup.py", 'flags = ["-O3", "-march=native"]'),
    (no_machine_paths, "docs/ops.md", f"see {ROOTED}"),
]
FINE = [
    (imports_go_down, "megacore/train/loop.py", "from megacore.parallel import plan\nfrom .optim import MixedAdamW"),
    (imports_go_down, "megacore/ops/dropout.py", "from megacore import _C\nfrom . import dispatch"),
    (imports_go_down, "megacore/cli.py", "from megacore.verify import verify"),
    (imports_go_down, "megacore/__init__.py", "from megacore.verify import verify"),
    (
        kernels_are_a_leaf,
        "triton_kernels/dropout.py",
        "import torch\nimport triton.language as tl\nfrom .philox import draw",
    ),
    (only_cli_reads_the_environment, "megacore/cli.py", "import os\nx = os.environ"),
    (
        no_state_below_train,
        "megacore/ops/dispatch.py",
        "TABLE = {'a': 1}\nchosen = ContextVar('chosen')\ndef f():\n    seen = []\n    seen.append(1)",
    ),
    (no_machine_paths, "docs/ops.md", "/usr/bin/env, https://example.org/work/x, $HOME/work/x, ../shared/root/"),
]


def named(case):
    return case.__name__ if callable(case) else None


@pytest.mark.parametrize(("rule", "path", "text"), BREACHES, ids=named)
def test_sees_a_breach(rule, path, text):
    assert list(rule(File(path, text)))


@pytest.mark.parametrize(("rule", "path", "text"), FINE, ids=named)
def test_lets_the_rest_pass(rule, path, text):
    assert not list(rule(File(path, text)))


def test_every_rule_is_shown_to_fail():
    assert {rule for rule, *_ in BREACHES} == set(RULES)
