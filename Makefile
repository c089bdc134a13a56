# make demo   sets everything up, builds an engine from the bundled checkpoint, serves it, streams from it
# make test   sets everything up, runs the tests but those of CUDA, TensorRT, Triton's server and the page
# make check  what CI runs: format, lint, types, arrows, and all tests, those left out above included
# make quick  format, lint, types, arrows and the tests that build no engine: for every change
# make help   lists the rest

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST_WORKERS ?= 2
# A worker takes whole files, so that what a file's tests share is made once; slow files first.
PYTEST := -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder
# Those that need compilers for GPUs, and all that need more than the virtual environment.
COMPILING := tests/cuda tests/tensorrt
OTHERS := $(COMPILING) tests/triton tests/browser

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick check static environments format-check lint types arrows tests test-here test-install test-cuda test-tensorrt test-triton test-browser chromium format proto bench clean

help:
	@sed -n 's/^# \{0,1\}make/make/p' Makefile
	@printf 'make setup   a virtual environment in $(VENV) with trtc, its builder and its tools\n'
	@printf 'make format  rewrite the sources in the project style\n'
	@printf 'make test-install  pip resolves all extras for every Python: asks the package index\n'
	@printf 'make test-cuda  the CUDA target'\''s own tests, in the same environment as test-tensorrt\n'
	@printf 'make test-tensorrt  the TensorRT target'\''s own tests, in an environment with its wheels\n'
	@printf 'make test-triton  packaged models in a real Triton server, in an environment with its wheel\n'
	@printf 'make test-browser  the page of a server in Chromium, which has to be installed\n'
	@printf 'make proto   regenerate the messages of protos/\n'
	@printf 'make bench   decode speed beside Transformers on this machine\n'

# lm-eval with half of what it asks for: all that tests import.
LM_EVAL := lm-eval==0.4.13 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19 \
  sacrebleu==2.6.0 portalocker==4.4.2 tabulate==0.10.0 colorama==0.4.6 lxml==6.1.3 \
  pytablewriter==1.2.1 DataProperty==1.1.1 mbstrdecoder==1.1.5 tabledata==1.3.5 tcolorpy==0.1.7 \
  typepy==1.3.5 pathvalidate==3.3.1 chardet==6.0.0.post1 python-dateutil==2.9.0.post0 pytz==2026.6

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'trtc needs Python 3.11 or newer: make setup PYTHON=python3.12' >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo 'trtc compiles engines with a C++20 compiler and found none: install g++ (Debian: apt-get install g++) or set CXX' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo 'could not make a virtual environment: install the venv module (Debian: apt-get install python3-venv)' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[build,dev,kv-events,opentelemetry,sign]'
	$(BIN)/python -m pip install --quiet --no-deps tritonclient==2.73.0 python-rapidjson==1.25  # asks for an older ml_dtypes
	$(BIN)/python -m pip install --quiet --no-deps instructor==1.17.0  # asks for an older jiter, and so an older openai
	$(BIN)/python -m pip install --quiet --no-deps $(LM_EVAL)
	@touch $(STAMP)

demo: setup
	$(BIN)/python -m examples.demo

test: tests

# Tests of contracts, scheduling, sampling, text and the command line. `make test` runs all but those
# of GPU targets, of Triton's server and of the page, which need more; `make check` those too.
QUICK := tests/protos tests/runtime/scheduling tests/runtime/sampling tests/runtime/requests \
  tests/runtime/text tests/runtime/engine/test_step_builder.py tests/cli/test_pages.py tests/test_house.py

quick: static
	$(BIN)/python $(PYTEST) -m 'not slow' $(QUICK)

# Each takes one core, or waits for the package index.
TWO_AT_A_TIME := --jobs=2 --output-sync=target --no-print-directory

# Tests last, in one session for each environment: at the end of a session a core waits. Those that
# mostly wait for the package index are beside the longest.
check: setup chromium
	$(MAKE) $(TWO_AT_A_TIME) types lint format-check arrows $(TENSORRT_STAMP) test-triton
	$(MAKE) --jobs=2 --no-print-directory test-install test-here
	$(TENSORRT_VENV)/bin/python $(PYTEST) $(COMPILING)

test-here: setup
	$(BIN)/python $(PYTEST) $(COMPILING:%=--ignore=%) --ignore=tests/triton --ignore=tests/test_install.py

static: setup
	$(MAKE) $(TWO_AT_A_TIME) types lint format-check arrows

environments: setup
	$(MAKE) $(TWO_AT_A_TIME) $(TENSORRT_STAMP) $(TRITON_STAMP)

format-check:
	$(BIN)/ruff format --check .

lint:
	$(BIN)/ruff check .

types:
	$(BIN)/mypy -p trtc -p tests -p examples

arrows:
	$(BIN)/lint-imports

tests: setup
	$(BIN)/python $(PYTEST) $(OTHERS:%=--ignore=%)

test-install: setup
	$(BIN)/python -m pytest tests/test_install.py

# $(call venv_beside,DIR): an environment that sees the packages of $(VENV), this directory, and before
# them its own.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
define venv_beside
	test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
	{ $(BIN)/python $(PURELIB); echo '$(CURDIR)'; } > "$$($(1)/bin/python $(PURELIB))/trtc-main.pth"
endef

# Everything that builds for every target, in one environment: that of $(VENV), which stays without
# the compilers for GPUs and so is a CPU-only installation, and those compilers.
TENSORRT_VENV  ?= .venv-tensorrt
TENSORRT_STAMP := $(TENSORRT_VENV)/.installed
TENSORRT_PIP   := $(TENSORRT_VENV)/bin/python -m pip install --quiet --no-deps

$(TENSORRT_STAMP): $(STAMP)
	$(call venv_beside,$(TENSORRT_VENV))
	$(TENSORRT_PIP) 'setuptools>=77' wheel
	$(TENSORRT_PIP) triton==3.7.1 cuda-bindings==13.5.0 cuda-pathfinder==1.9.0 \
	  nvidia-cuda-nvrtc==13.0.88 tensorrt-cu13-bindings==11.4.0.106 \
	  tensorrt-rtx-cu13-libs==1.7.1.116 tensorrt-rtx-cu13-bindings==1.7.1.116
	$(TENSORRT_PIP) --no-build-isolation tensorrt-cu13==11.4.0.106 tensorrt-rtx-cu13==1.7.1.116
	@touch $(TENSORRT_STAMP)

# The CUDA target's kernels need the same compilers.
test-cuda: $(TENSORRT_STAMP)
	$(TENSORRT_VENV)/bin/python $(PYTEST) tests/cuda

test-tensorrt: $(TENSORRT_STAMP)
	$(TENSORRT_VENV)/bin/python $(PYTEST) tests/tensorrt

# Apart from $(VENV), because the server's Python backend was built for NumPy 1.
TRITON_VENV  ?= .venv-triton
TRITON_STAMP := $(TRITON_VENV)/.installed

$(TRITON_STAMP): $(STAMP)
	$(call venv_beside,$(TRITON_VENV))
	$(TRITON_VENV)/bin/python -m pip install --quiet --no-deps nvidia-pytriton==0.7.0 tritonclient==2.73.0 \
	  python-rapidjson==1.25 'numpy==1.26.4; python_version < "3.13"'
	@touch $(TRITON_STAMP)

test-triton: $(TRITON_STAMP)
	$(TRITON_VENV)/bin/python -m pytest tests/triton

# Any Chromium or Chrome: its executable.
export CHROMIUM ?= $(firstword $(shell command -v chromium chromium-browser google-chrome))

chromium:
	@test -x '$(CHROMIUM)' || \
	  { echo 'the tests of the page need Chromium: install it (Debian: apt-get install chromium) or set CHROMIUM' >&2; exit 1; }

test-browser: setup chromium
	$(BIN)/python $(PYTEST) tests/browser

format:
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

proto:
	$(BIN)/python -m trtc.protos.generate

bench: setup
	$(BIN)/python -m examples.bench.transformers_decode

clean:
	rm -rf $(VENV) $(TENSORRT_VENV) $(TRITON_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
