"""The rules of the house: each takes a file and yields one line for each breach. test_floors.py enforces them.

Imports go down:  _C, triton_kernels -> comm -> ops -> parallel, pipeline -> models -> train, plan -> verify -> cli.
Two packages of one floor do not import each other. An import in a function or under TYPE_CHECKING counts too.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = (
    ("_C", "triton_kernels", "installation"),
    ("comm",),
    ("ops",),
    ("parallel", "pipeline"),
    ("models",),
    ("train", "plan"),
    ("subject",),  # what verify runs,
    ("probe",),  # whether that can be compared at all,
    ("serial", "compare"),  # with what it compares,
    ("judge",),  # and step by step where a trajectory left the other
    ("verify",),
    ("cli",),
)
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
TOP = len(FLOORS)  # megacore/__init__.py and __main__.py: what a user imports stands above everything
FILE_LINES, FUNCTION_LINES = 350, 80  # the house aims at 250 and 40
MUTABLE = {"list", "dict", "set", "defaultdict", "OrderedDict", "Counter", "deque", "bytearray"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


@dataclass(frozen=True)
class File:
    path: str  # from the root, with forward slashes
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> tuple[str, ...]:
        """("megacore", "ops", "dropout"); triton_kernels counts as what it is installed as."""
        parts = self.path.removesuffix(".py").split("/")
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        return ("megacore", *parts) if parts[0] == "triton_kernels" else tuple(parts)

    @property
    def floor(self) -> int:
        return FLOOR.get(self.module[1], TOP) if len(self.module) > 1 else TOP

    def imports(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(line, absolute dotted name) of everything imported anywhere in the file."""
        package = self.module if self.path.endswith("__init__.py") else self.module[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                base += tuple(node.module.split(".")) if node.module else ()
                yield from ((node.lineno, (*base, alias.name)) for alias in node.names)
            elif (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
            ):
                yield from (
                    (node.lineno, tuple(a.value.split("."))) for a in node.args[:1] if isinstance(a, ast.Constant)
                )


@cache  # read and parsed once, not once a rule
def _folder(folder: str) -> list[File]:
    return [File(p.relative_to(ROOT).as_posix(), p.read_text()) for p in sorted((ROOT / folder).rglob("*.py"))]


def python(*folders: str) -> list[File]:
    return [file for folder in folders for file in _folder(folder)]


def committed() -> list[File]:
    """Every text file that is the project's own: folders by name, so that no environment or build product is read."""
    folders = ("megacore", "triton_kernels", "csrc", "tests", "bench", "tools", "configs", "docs", ".ci")
    paths = [p for folder in folders for p in sorted((ROOT / folder).rglob("*"))] + sorted(ROOT.iterdir())
    kept = [
        p
        for p in paths
        if p.is_file()
        and "__pycache__" not in p.parts
        and p.suffix not in (".so", ".png", ".pyc")
        and p.name != ".git"  # of a worktree: a file that names a folder of this machine
    ]
    return [File(p.relative_to(ROOT).as_posix(), p.read_text(errors="replace")) for p in kept]


def imports_go_down(file: File) -> Iterator[str]:
    if file.module[0] != "megacore" or file.floor == TOP:
        return
    own = file.module[1]
    for line, name in file.imports():
        if name[0] != "megacore":
            continue
        target = name[1] if len(name) > 1 else ""
        floor = FLOOR.get(target, TOP)
        if target != own and floor >= file.floor:
            yield f"{file.path}:{line}: {own} imports {'.'.join(name)}; floor {file.floor} may not import floor {floor}"


def kernels_are_a_leaf(file: File) -> Iterator[str]:
    if file.module[:2] != ("megacore", "triton_kernels"):
        return
    for line, name in file.imports():
        ours = name[:2] == ("megacore", "triton_kernels")
        if not ours and name[0] not in {"torch", "triton", *sys.stdlib_module_names}:
            yield f"{file.path}:{line}: triton_kernels imports {'.'.join(name)}; it is a leaf, beside torch and triton"


def no_bare_triton_kernels(file: File) -> Iterator[str]:
    for line, name in file.imports():
        if name[0] == "triton_kernels":
            yield f"{file.path}:{line}: triton_kernels is another package's name; import megacore.triton_kernels"


def only_cli_imports_tyro(file: File) -> Iterator[str]:
    for line, name in file.imports():
        if name[0] == "tyro" and file.module[:2] != ("megacore", "cli"):
            yield f"{file.path}:{line}: imports tyro; only megacore.cli does"


def only_cli_reads_the_environment(file: File) -> Iterator[str]:
    if file.module[0] != "megacore" or file.module[:2] in {("megacore", "cli"), ("megacore", "__main__")}:
        return  # __main__: the program, which may find that cli cannot be imported
    names = {("sys", "argv"), ("os", "environ"), ("os", "environb"), ("os", "getenv"), ("os", "putenv")}
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in names:
            yield f"{file.path}:{node.lineno}: {node.value.id}.{node.attr}; only cli reads argv and the environment"
    for line, name in file.imports():
        if name in names:
            yield f"{file.path}:{line}: imports {'.'.join(name)}; only cli reads argv and the environment"


def _roots(target: ast.expr) -> Iterator[str]:
    while isinstance(target, ast.Subscript | ast.Attribute):
        target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def no_state_below_train(file: File) -> Iterator[str]:
    if file.module[0] != "megacore" or file.floor >= FLOOR["train"]:
        return
    constants = set()
    for node in file.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        called = getattr(node.value, "func", None)
        mutable = isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
        if not mutable and getattr(called, "id", getattr(called, "attr", "")) not in MUTABLE:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            name = getattr(target, "id", "?")
            constants.add(name)
            if name != "__all__" and not name.isupper():
                yield f"{file.path}:{node.lineno}: module-level mutable {name}; pass it as an argument"
    for function in (n for n in ast.walk(file.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield f"{file.path}:{node.lineno}: global {', '.join(node.names)}; pass it as an argument"
            changed = []
            if isinstance(node, ast.Assign | ast.Delete):
                changed = [name for target in node.targets for name in _roots(target)]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in MUTATORS:
                changed = list(_roots(node.func))
            for name in constants.intersection(changed):
                yield f"{file.path}:{node.lineno}: {function.name} changes the module's {name}; pass it as an argument"


def no_module_named_utils(file: File) -> Iterator[str]:
    if {"utils", "util", "helpers", "misc"} & set(file.module):
        yield f"{file.path}: a drawer without a label; find the noun"


def models_know_no_layout(file: File) -> Iterator[str]:
    if file.module[:2] == ("megacore", "models"):
        for number, line in enumerate(file.text.splitlines(), 1):
            if re.search(r"\btp_size\b|tensor_model_parallel_size", line):
                yield f"{file.path}:{number}: a model knows the size of a layout; the plan table says how it is split"


def files_are_short(file: File) -> Iterator[str]:
    lines = file.text.count("\n")
    if file.path.endswith((".py", ".cpp", ".cu", ".h", ".cuh")) and lines > FILE_LINES:
        yield f"{file.path}: {lines} lines, more than {FILE_LINES}; which second idea lives there?"


def function_lengths(file: File) -> list[tuple[int, str]]:
    functions = [n for n in ast.walk(file.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(n.end_lineno - n.lineno + 1, f"{file.path}:{n.lineno}: {n.name}") for n in functions]


def functions_are_short(file: File) -> Iterator[str]:
    for lines, where in function_lengths(file):
        if lines > FUNCTION_LINES:
            yield f"{where} has {lines} lines, more than {FUNCTION_LINES}"


def narrow_includes(file: File) -> Iterator[str]:
    for number, line in enumerate(file.text.splitlines(), 1):
        included = re.match(r'\s*#\s*include\s*[<"]([^>"]+)', line)
        if not included:
            continue
        if included[1] in ("torch/extension.h", "torch/all.h"):
            yield f"{file.path}:{number}: {included[1]} takes most of a minute to compile; include ATen/ops headers"
        elif file.path.endswith((".cu", ".cuh", "cuda/launch.h")) and re.match(r"(torch|ATen|c10)/", included[1]):
            yield f"{file.path}:{number}: {included[1]} in device code, which nvcc must compile alone"


def builds_for_any_machine(file: File) -> Iterator[str]:
    for number, line in enumerate(file.text.splitlines(), 1):
        if re.search(r"-m(arch|tune|cpu)=native", line.split("#")[0]):
            yield f"{file.path}:{number}: code for the building machine alone; choose at load time"


def no_machine_paths(file: File) -> Iterator[str]:
    for number, line in enumerate(file.text.splitlines(), 1):
        if re.search(r"(^|[^\w.$}])/(work|farm|root|home)/\w", line):
            yield f"{file.path}:{number}: a path of one machine: {line.strip()[:80]}"
