# make demo | test | build | venv ...: each alone, on a bare Debian 12 or later, as root or with sudo. Everything is made once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

PYTHON ?= python3
JOBS ?= $(shell nproc)
VENV := .venv
PY := $(VENV)/bin/python
BUILD := build
SANITIZED := build-sanitize
NO_LLVM := build-nollvm
CXX_FILES = $(shell git ls-files 'csrc/*.cpp' 'csrc/*.h' 'tests/*.cpp' 'tests/*.h' 'tools/*.cpp')
# These time kernels, or are about texts and scripts.
UNGUARDED = $(addprefix tests/python/test_,benchmarks.py docs.py scripts.py)
CONFIGURE = cmake -G Ninja -DPython3_EXECUTABLE=$(abspath $(PY)) -DDEPLO_WERROR=ON

.PHONY: help system venv configure build demo test quick docs bench sass soak mutants opinfo opinfo-inductor fuzz exhaustive architectures guard wheel clean
.PHONY: lint tidy test-cpp test-golden test-python test-sanitize test-dump test-wheel test-nollvm test-side-by-side format peers vllm transformers5

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

system: ## Debian packages (compiler, LLVM 22, hwloc, ...); root or sudo
	@scripts/install_system.sh

venv: $(VENV)/.ready ## Python environment in .venv, with torch
$(VENV)/.ready: requirements.txt requirements-dev.txt | system
	@PYTHON=$(PYTHON) scripts/make_venv.sh $(VENV)
	@touch $@

$(BUILD)/build.ninja: | venv
	@$(CONFIGURE) -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@mv $(BUILD).log $(BUILD)/configure.log

build: venv $(BUILD)/build.ninja ## the extension, deplo_opt and the C++ tests
	@ninja -C $(BUILD) -j $(JOBS)
	@scripts/install_editable.sh $(PY)

demo: build ## a Llama block and ResNet-50 beside eager mode, and a softmax at every IR level
	@$(PY) examples/demo.py

# The C++ tests run sanitized, and without LLVM.
test: build lint docs tidy test-sanitize test-golden test-nollvm test-side-by-side test-python ## everything that CI checks

quick: build ## the tests that notice most mistakes for their time (docs/howto.md says how they were chosen)
	@scripts/quick.sh $(PY) $(BUILD) $(JOBS)

docs: venv ## the manual as a site, build/site/index.html; warnings are errors
	@echo "== docs"; $(PY) -m mkdocs build --strict --quiet

lint: build ## clang-format, ruff, mypy
	@echo "== clang-format"; clang-format-22 --dry-run --Werror $(CXX_FILES)
	@echo "== ruff"; $(PY) -m ruff check . && $(PY) -m ruff format --check .
	@echo "== mypy"; $(PY) -m mypy

tidy: build ## clang-tidy on all C++ but the tests
	@echo "== clang-tidy"; scripts/tidy.sh $(PY) $(BUILD) $(JOBS)

test-cpp: build ## C++ tests
	@echo "== C++ tests"; scripts/test_cpp.sh $(BUILD)/tests/cpp/deplo_tests $(JOBS)

test-golden: build ## golden files of every pass
	@echo "== golden files"; $(PY) -m pytest -q -n $(JOBS) tests/ir

test-python: build ## Python tests, with the IR verified after every pass
	@echo "== Python tests"; DEPLO_VERIFY=1 $(PY) -m pytest -q -n $(JOBS) tests/python

# intercept_tls_get_addr: GCC 12's runtime takes what lies before a thread's block of a library such as NVRTC for a header that glibc no longer
# writes, and its search for leaks then crashes by chance ("Tracer caught signal 11").
test-sanitize: venv ## C++ tests under ASan and UBSan
	@echo "== C++ tests under ASan and UBSan"
	@mkdir -p $(SANITIZED)
	@test -e $(SANITIZED)/build.ninja || $(CONFIGURE) -S . -B $(SANITIZED) -DDEPLO_SANITIZE=ON -DDEPLO_PYTHON=OFF -DCMAKE_BUILD_TYPE=Debug \
	  -DCMAKE_CXX_FLAGS_DEBUG=-Og > $(SANITIZED)/configure.log
	@ninja -C $(SANITIZED) -j $(JOBS) deplo_tests
	@ASAN_OPTIONS=detect_container_overflow=0:intercept_tls_get_addr=0:malloc_context_size=4:quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1 \
	  scripts/test_cpp.sh $(SANITIZED)/tests/cpp/deplo_tests $(JOBS)

test-wheel: venv ## the wheel where neither LLVM nor a compiler is, and beside another LLVM
	@echo "== wheel"; scripts/test_wheel.sh $(PY)

test-nollvm: venv ## a build with -DDEPLO_LLVM=OFF
	@echo "== without LLVM"
	@mkdir -p $(NO_LLVM)
	@test -e $(NO_LLVM)/build.ninja || $(CONFIGURE) -S . -B $(NO_LLVM) -DDEPLO_LLVM=OFF -DDEPLO_EXTENSION_DIR=$(abspath $(NO_LLVM))/deplo -DCMAKE_BUILD_TYPE=Release \
	  > $(NO_LLVM)/configure.log
	@ninja -C $(NO_LLVM) -j $(JOBS)
	@scripts/test_nollvm.sh $(PY) $(NO_LLVM)

test-dump: build ## models and cases with every dump switched on: dumps are complete and read back
	@echo "== every dump on"; scripts/test_dump.sh $(PY)

# Each mostly keeps one core busy.
test-side-by-side: build
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-dump test-wheel

opinfo: build ## all samples of every PyTorch operator in all dtypes, forward and backward (hours; goes on where it stopped; OPINFO="--special --fresh" puts NaN, infinities and extremes into them)
	@DEPLO_CACHE_DIR=off PYTHONPATH=tests/python $(PY) -m opinfo -n $(JOBS) --output $(BUILD)/opinfo.jsonl --beside $(BUILD)/opinfo-inductor.jsonl $(OPINFO)

opinfo-inductor: build ## the same by Inductor, which `make opinfo` then prints beside (a compilation with g++ for each sample; OPINFO="--limit 1 --dtype float32" for less)
	@PYTHONPATH=tests/python $(PY) -m opinfo -n $(JOBS) --engine inductor --output $(BUILD)/opinfo-inductor.jsonl $(OPINFO)

fuzz: build ## random PyTorch programs, Tensor and Loop IR against a reference, for SECONDS=600; what fails is shrunk and written to build/fuzz
	@DEPLO_CACHE_DIR=off PYTHONPATH=tests/python $(PY) -m fuzz --seconds $(or $(SECONDS),600) --output $(BUILD)/fuzz $(FUZZ)

soak: build ## threads, shapes, compilations, caches, packages, weights, memory, forks and signals at once, for SECONDS=600 (SOAK="--seed 1" for the same actions again)
	@PYTHONPATH=tests/python $(PY) -m soak --seconds $(or $(SECONDS),600) $(SOAK)

exhaustive: architectures guard ## those two, and errors in ulp of every function at all 2^32 values of float32 (hours: 3 to 15 minutes for each)
	@$(PY) -m deplo numerics --exhaustive

mutants: build ## changes passes and rules one place at a time: at least 90 % must be noticed by the tests (hours; goes on where it stopped)
	@$(PY) scripts/mutants --jobs $(JOBS) $(MUTANTS)

architectures: build ## every architecture of tests/python/architectures.py at many lengths, forward and backward, and generating (half an hour)
	@$(PY) -m pytest -q -n $(JOBS) tests/architectures

guard: build ## the tests with every buffer between guard pages
	@DEPLO_GUARD=1 $(PY) -m pytest -q -n $(JOBS) $(filter-out $(UNGUARDED),$(wildcard tests/python/test_*.py)) tests/ir

bench: build ## eager, Inductor and deplo side by side
	@$(PY) benchmarks/run.py

sass: build ## figures of all CUDA kernels of cases and models for an A100, an H100 and an RTX 5090, and which limits they break (an hour; SASS="--match softmax" for less)
	@$(PY) benchmarks/sass.py $(SASS)

peers: venv ## ONNX Runtime, OpenVINO, zentorch (in .peers) and matplotlib, for benchmarks with --peers and --plot
	@$(PY) -m pip install -q -r requirements-peers.txt || { echo "deplo: pip could not install requirements-peers.txt: check the network" >&2; exit 1; }
	@test "$$(uname -sm)" != "Linux x86_64" || { rm -rf .peers && $(PY) -m pip install -q --no-deps --target .peers -r requirements-zentorch.txt; } || \
	  { echo "deplo: pip could not install requirements-zentorch.txt: check the network" >&2; exit 1; }

vllm: build ## vLLM for CPUs with deplo's plugin in .venv-vllm (docs/vllm.md): its tests, and its throughput beside its own modes (VLLM="--dtype float32" for more)
	@PYTHON=$(PYTHON) scripts/make_vllm_venv.sh .venv-vllm
	@.venv-vllm/bin/python -m pytest -q tests/python/test_vllm.py tests/python/test_vllm_server.py
	@.venv-vllm/bin/python benchmarks/vllm.py $(VLLM)

transformers5: build ## language models of transformers 5 (in .transformers5): the tests of generate()
	@rm -rf .transformers5 && $(PY) -m pip install -q --no-deps --target .transformers5 -r requirements-transformers5.txt || \
	  { echo "deplo: pip could not install requirements-transformers5.txt: check the network" >&2; exit 1; }
	@PYTHONPATH=.transformers5:$$PWD $(PY) -m pytest -q -n 2 tests/python/test_generate.py tests/python/test_generate_kinds.py

wheel: venv ## a self-contained wheel in dist/
	@$(PY) -m pip wheel --no-build-isolation --no-deps -w dist .

format: ## rewrite all files in the house style
	@clang-format-22 -i $(CXX_FILES)
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .

clean: ## remove what was built, but not .venv
	@rm -rf $(BUILD) $(SANITIZED) $(NO_LLVM) build-wheel dist deplo/_C.*.so
