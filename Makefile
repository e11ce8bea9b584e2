# Each target does its own set-up, and only what is missing. `make train` and `make test` are the two to try first.
#
#   make build        the extension megacore._C, in the checkout (the default)
#   make train        a GPT on real text, NPROC=8 processes
#   make test         every test
#   make fuzz         10,500 damaged inputs: refused in one line, or read rightly; ARGS="--seed 7 --only index"
#   make bits         the tests that compare bits, with the libraries held to other CPUs' instructions
#   make lint         ruff and clang-format: does it hold?       make format   make it hold
#   make kernels      every kernel compiled for sm_80, sm_90 and arm64; fails on spills
#   make cuda-build   the extension with CUDA, in an environment and a folder of its own; no GPU needed
#   make bench        ours against rivals and limits; ARGS="bounds" judges what must hold
#   make bench-docs   bench/results/*.json -> docs/benchmarks.md and its figures
#   make clean        removes what was built
#
#   make VENV=/path/to/venv ...       use that environment; a torch in it stays as it is
#   make PYTHON=python3.12 ...        make the environment with that Python
#   make build PYTHON=python3 VENV=   no environment, nothing installed: build with what that Python has (no network needed)
#   make test ARGS="-k mesh"          ARGS goes to the program behind a target
#   make cuda-build CUDA_VENV=path    the environment with torch's CUDA build (default .venv-cuda)

VENV ?= .venv
CUDA_VENV ?= .venv-cuda
ifeq ($(wildcard setup.py),)
$(error this is not the checkout's folder; run make there, or make -C /path/to/checkout)
endif
ifneq ($(words $(VENV) $(CUDA_VENV)),$(words $(firstword $(VENV)) $(firstword $(CUDA_VENV))))
$(error VENV=$(VENV): make cannot build a path with spaces; link it, ln -s "$(VENV)" .venv, and leave VENV out)
endif
ifeq ($(strip $(VENV)),)
PY := $(or $(PYTHON),python3)
INSTALLED :=
BUILT := build/built-in-place
CLANG_FORMAT := clang-format
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
BUILT := build/built$(subst /,-,$(VENV))
CLANG_FORMAT := $(VENV)/bin/clang-format
endif

MEGACORE := $(PY) -m megacore
NPROC ?= 8
DATA := runs/stdlib/data
SOURCES := pyproject.toml setup.py tools/backend.py $(shell find csrc -type f 2>/dev/null)
PYTHONS := megacore triton_kernels bench tests tools setup.py
CXX := $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp' 'tests/*.h' 2>/dev/null)

# One thread a process: `make train` starts 8 of them, and tests as many.
train test fuzz bits: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := build
.PHONY: build train test fuzz bits lint format kernels cuda-build bench bench-docs clean

build: $(BUILT)

# What a build needs is looked for before anything is downloaded.
$(VENV)/.installed: pyproject.toml tools/setup.sh
	@$(if $(filter-out lint format,$(or $(MAKECMDGOALS),build)),tools/setup.sh toolchain $(or $(wildcard $(PY)),$(PYTHON)))
	tools/setup.sh install $(VENV) $(PYTHON)
	@touch $@

# Built anew when the torch of that Python is not the one it was built with: after an upgrade, or for another VENV.
.PHONY: FORCE
$(BUILT): $(INSTALLED) $(SOURCES) $(if $(wildcard $(BUILT)),$(shell tools/setup.sh current $(PY) || echo FORCE))
	tools/setup.sh build $(PY)
	@mkdir -p $(@D)
	@touch $@

train: $(BUILT) $(DATA)/.prepared
	$(MEGACORE) train configs/stdlib.toml --nproc $(NPROC) $(ARGS)

# Text that is on every machine and needs no download: the sources of Python's own standard library. Installed packages
# are left out because they differ from machine to machine, tests because they are mostly data.
LEFT_OUT := site-packages dist-packages __pycache__ test tests idle_test
$(DATA)/.prepared: | $(BUILT)
	OMP_NUM_THREADS=1 $(MEGACORE) prepare "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
		--out $(DATA) --vocab-size 4096 --suffixes .py --exclude $(LEFT_OUT)
	@touch $@

test: $(BUILT)
	$(PY) -m pytest -q $(ARGS)

fuzz: $(BUILT)
	$(PY) -m tests.fuzz $(ARGS)

bits: $(BUILT)
	$(PY) tools/bits.py $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check $(PYTHONS)
	$(PY) -m ruff format --check $(PYTHONS)
	$(if $(CXX),$(CLANG_FORMAT) --dry-run -Werror $(CXX))

format: $(INSTALLED)
	$(PY) -m ruff check --fix $(PYTHONS)
	$(PY) -m ruff format $(PYTHONS)
	$(if $(CXX),$(CLANG_FORMAT) -i $(CXX))

kernels: $(BUILT)
	@tools/setup.sh cross
	$(PY) tools/kernels.py $(ARGS)

# Its objects and its library lie in build/, away from the checkout's own; ARGS=--allow-missing passes without nvcc.
cuda-build:
	tools/setup.sh cuda $(CUDA_VENV) $(ARGS)

bench: $(BUILT)
	$(PY) -m bench $(or $(ARGS),all)

bench-docs: $(BUILT) # bench/results/*.json -> docs/benchmarks.md and its figures
	$(PY) -m bench render

clean: # what was built; runs/ and the environment stay
	rm -rf build *.egg-info megacore/*.so megacore/_C*.json .pytest_cache .ruff_cache .hypothesis
