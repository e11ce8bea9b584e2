#!/usr/bin/env bash
# The environment of a fresh clone, and nothing that is already there.
#
#   tools/setup.sh python                 print a Python >= 3.11 of this machine
#   tools/setup.sh install VENV [PYTHON]  make VENV if missing, then torch, then the rest of pyproject.toml into it
#   tools/setup.sh toolchain [PYTHON]     is there what a build needs: a compiler, Python.h
#   tools/setup.sh build PYTHON           build megacore._C with that Python and put the checkout on its path
#   tools/setup.sh current PYTHON         was megacore._C built with the torch of that Python?
#   tools/setup.sh constraint PYTHON      print its torch as pip names it
#   tools/setup.sh cross                  Debian's C++ compiler for arm64, for `make kernels`
#   tools/setup.sh cuda VENV [--allow-missing]
#                                         build megacore._C with CUDA into build/cuda, in an environment of its own, and
#                                         import it; no GPU needed. Without nvcc: an error, or a line with the flag
#
# torch comes first and every later pip call is constrained to the installed one, with build isolation off: an open
# requirement of some package would otherwise fetch a second torch, of several GB, and the extension would be built
# against that one. What they print goes into a log; where one fails, the end of its log comes here.
set -euo pipefail
cd "$(dirname "$0")/.."

CPU_TORCH=2.13.0                            # what the project is tested with where there is no GPU
CUDA_TORCH=2.14.1                           # and what the CUDA part is built against: CUDA 13.0
LINTERS="ruff==0.17.6 clang-format==23.1.5" # another version formats otherwise
PEERS="megatron-core==0.16.1"               # reads our data files in a test; a rival in bench/step.py

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

quietly() { # LOG COMMAND...: the command with its output in the log; where it fails, what went wrong and the end of it
    local log=$1
    shift
    mkdir -p "$(dirname "$log")"
    "$@" >"$log" 2>&1 && return
    grep -m 8 -nE '(error|ERROR|undefined reference|megacore|setup\.py):' "$log" >&2 || true
    echo "    ..." >&2
    tail -n 15 "$log" | cut -c 1-400 | sed 's/^/    /' >&2
    die "failed: $*; the whole log is $log"
}

usable() { # PYTHON: runs, is new enough, can make environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in python3 python3.11 python3.12 python3.13 python3.14; do
        if usable "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no Python >= 3.11 with venv and ensurepip found; install one (Debian: python3-venv and python3-dev) or name it, make PYTHON=/path/to/python"
}

has_torch() { # PYTHON: a torch that is new enough
    "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' >/dev/null 2>&1
}

constraint() { # PYTHON: its torch, by the name pip knows: torch.__version__ is 2.14.1+cu130 where pip has 2.14.1
    "$1" - <<'PY'
import importlib.metadata, sys

try:
    print("torch==" + importlib.metadata.version("torch"))
except importlib.metadata.PackageNotFoundError:
    sys.exit(
        f"setup: pip does not know the torch of {sys.executable}, so whatever needs torch would install another; "
        f"make build VENV= PYTHON={sys.executable} installs nothing"
    )
PY
}

current() { # PYTHON: what lies in the checkout loads beside its torch, as far as versions tell; torch is not imported
    "$1" - <<'PY' 2>/dev/null
import json, re, sys, sysconfig
from importlib.util import find_spec
from pathlib import Path

library = Path("megacore") / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
version = (Path(find_spec("torch").origin).parent / "version.py").read_text()
torch = re.search(r"^__version__ = ['\"](.+)['\"]", version, re.M)[1]
sys.exit(not library.exists() or json.loads(library.with_suffix(".json").read_text())["torch"] != torch)
PY
}

has_pip() { # PYTHON
    "$1" -m pip --version >/dev/null 2>&1
}

toolchain() { # [PYTHON]: what the extension is compiled with
    local python=${1:-$(find_python)}
    command -v "$python" >/dev/null || die "PYTHON=$python: no such program"
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "Python.h is missing for $python; install its headers (Debian: python3-dev)"
    command -v "${CXX:-c++}" >/dev/null || die "no C++ compiler found; install one (Debian: g++)"
}

requirements() { # PYTHON: what pyproject.toml asks for, torch excepted, one requirement a line
    "$1" - <<'PY'
import re, tomllib

with open("pyproject.toml", "rb") as f:
    table = tomllib.load(f)
project = table["project"]
wanted = ["numpy", *table["build-system"]["requires"]]
for group, found in project["optional-dependencies"].items():
    if group != "rivals":  # only benchmarks want those, and they drag in much else
        wanted += found
print("\n".join(w for w in wanted if re.match(r"[\w-]+", w)[0] not in ("torch", "megacore")))
PY
}

install_torch() { # PYTHON LOG
    if has_torch "$1"; then
        return
    fi
    echo "setup: installing torch"
    if command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then
        quietly "$2" "$1" -m pip install -q numpy 'torch>=2.11'
    else
        # The plain name may be a CUDA build on Linux: ask for the CPU build by its full version first. Where pip does not
        # know torch's index of CPU builds, PIP_EXTRA_INDEX_URL names it.
        "$1" -m pip install -q numpy "torch==$CPU_TORCH+cpu" >"$2" 2>&1 || {
            echo "setup: pip finds no CPU build of torch $CPU_TORCH for $("$1" --version); installing torch $CPU_TORCH as it is there, maybe with CUDA"
            quietly "$2" "$1" -m pip install -q numpy "torch==$CPU_TORCH"
        }
    fi
    has_torch "$1" || die "torch did not install; install torch >= 2.11 into the environment by hand and run make again; the log is $2"
}

environment() { # VENV [PYTHON]: made if missing, with a pip of its own
    local venv=$1 python=${2:-}
    if [ ! -x "$venv/bin/python" ]; then
        python=${python:-$(find_python)}
        echo "setup: making $venv with $("$python" --version)"
        "$python" -m venv "$venv" || die "$python cannot make $venv; install its venv (Debian: python3-venv), or name another, make PYTHON=/path/to/python"
    fi
    # one that uv made has none
    has_pip "$venv/bin/python" || "$venv/bin/python" -m ensurepip >/dev/null 2>&1 || true
    has_pip "$venv/bin/python" || die "$venv has no pip and its Python cannot make one; run: uv pip install --python $venv/bin/python pip"
}

install() { # VENV [PYTHON]
    local venv=$1 python=$1/bin/python
    environment "$@"
    install_torch "$python" "$venv/setup-torch.log"
    echo "setup: installing the rest"
    constraint "$python" >"$venv/constraints.txt"
    requirements "$python" >"$venv/requirements.txt"
    quietly "$venv/setup.log" "$python" -m pip install -q -c "$venv/constraints.txt" -r "$venv/requirements.txt" $LINTERS $PEERS
}

build() { # PYTHON
    command -v "$1" >/dev/null || die "PYTHON=$1: no such program"
    has_torch "$1" || die "$1 has no torch >= 2.11; run make, which installs one into .venv, or name a Python that has one"
    toolchain "$1"
    has_pip "$1" || die "$1 has no pip; install one (Debian: python3-pip; uv: uv pip install --python $1 pip)"
    echo "setup: building megacore._C"
    # PIP_BREAK_SYSTEM_PACKAGES: with VENV= the Python may be the system's; a link to this checkout is all that is added to it.
    PIP_BREAK_SYSTEM_PACKAGES=1 quietly build/build.log "$1" -m pip install --no-index --no-build-isolation --no-deps -e .
}

cross() {
    if command -v aarch64-linux-gnu-g++ >/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing g++-aarch64-linux-gnu"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y g++-aarch64-linux-gnu; } >/dev/null 2>&1 || true
    fi
    command -v aarch64-linux-gnu-g++ >/dev/null ||
        echo "setup: aarch64-linux-gnu-g++ is missing, so csrc/cpu is not compiled for arm64 here; install g++-aarch64-linux-gnu (Debian, as root)"
}

cuda() { # VENV [--allow-missing]
    local venv=$1 flag=${2:-} python
    if ! command -v nvcc >/dev/null; then
        [ "$flag" = --allow-missing ] || die "no nvcc found, so csrc/cuda cannot be built; install the CUDA toolkit (nvcc 13.0), or pass ARGS=--allow-missing"
        echo "setup: no nvcc found; csrc/cuda is not built here"
        return
    fi
    toolchain
    environment "$venv"
    python=$venv/bin/python
    if ! has_torch "$python"; then
        echo "setup: installing torch $CUDA_TORCH with CUDA, 5.5 GB"
        quietly "$venv/setup-torch.log" "$python" -m pip install -q numpy "torch==$CUDA_TORCH"
    fi
    "$python" -c 'import torch, sys; sys.exit(torch.version.cuda is None)' ||
        die "the torch in $venv is no CUDA build; remove $venv, or name another environment with CUDA_VENV="
    constraint "$python" >"$venv/constraints.txt"
    quietly "$venv/setup.log" "$python" -m pip install -q -c "$venv/constraints.txt" numpy 'setuptools>=77' wheel ninja
    echo "setup: building megacore._C with CUDA into build/cuda"
    mkdir -p build
    rm -rf build/cuda # the objects stay in build/, in a folder named by Python and torch
    "$python" setup.py -q build --build-lib build/cuda >build/cuda.log 2>&1 || {
        grep -E 'error|undefined|setup.py:' build/cuda.log | head -20 >&2
        die "the build failed; the whole log is build/cuda.log"
    }
    "$python" tools/cuda_check.py build/cuda
}

command=${1:-}
[ $# -gt 0 ] && shift
case "$command" in
python) find_python ;;
install) install "$@" ;;
toolchain) toolchain "$@" ;;
build) build "$@" ;;
current) current "$@" ;;
constraint) constraint "$@" ;;
cross) cross ;;
cuda) cuda "$@" ;;
*) die "usage: tools/setup.sh python | install VENV [PYTHON] | toolchain [PYTHON] | build PYTHON | current PYTHON | constraint PYTHON | cross | cuda VENV [--allow-missing]" ;;
esac
