# Everything runs in one virtual environment with pinned packages. Stamp files inside it remember what is
# installed, so nothing is done twice; editing a C++ file recompiles it at the next target that needs it.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
RUN ?= runs/ml-100k
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format bench docs build sanitize aarch64 clean

CMAKE := $(BIN)/cmake -S csrc -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
CORE_ONLY := -DTRTPU_BUILD_PYTHON=OFF -DTRTPU_BUILD_TESTS=ON
CTEST := $(BIN)/ctest --output-on-failure --no-tests=error

help: ## say what there is
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.package ## train DLRM v2 on MovieLens ml-100k and compare it with plain TorchRec
	$(BIN)/python examples/dlrm_v2/train.py --data ml-100k --epochs 3 --compare-torchrec --out $(RUN)

test: $(VENV)/.package ## the fast tests, a few minutes
	$(BIN)/pytest -m "not slow"

test-slow: $(VENV)/.package ## the tests that take minutes each
	$(BIN)/pytest -m slow

lint: $(VENV)/.package ## formatting, style, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files -z '*.cc' '*.h' '*.inc' | xargs -0r $(BIN)/clang-format --dry-run --Werror
	$(BIN)/python -m torchrec_tpu.sparsecore.rules --check

format: $(VENV)/.package ## rewrite files in the project's style and regenerate the optimizer functors
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m torchrec_tpu.sparsecore.rules --write
	git ls-files -z '*.cc' '*.h' '*.inc' | xargs -0r $(BIN)/clang-format -i

bench: $(VENV)/.package ## measure preprocessing and execution on this machine, beside what is installed
	for script in preprocess execution; do $(BIN)/python "benchmarks/$$script.py" || exit 1; done

docs: $(VENV)/.docs ## build the documentation site into build/site
	$(BIN)/mkdocs build --strict

build: $(VENV)/.packages ## compile the extension beside its stub, for `PYTHONPATH=. python` with nothing installed
	$(CMAKE) -B build/dev -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	$(BIN)/cmake --build build/dev -j $(JOBS)

sanitize: sanitize-address,undefined sanitize-thread ## the C++ tests under ASan + UBSan, then TSan

sanitize-%: $(VENV)/.packages
	$(CMAKE) -B "build/$*" $(CORE_ONLY) "-DTRTPU_SANITIZE=$*"
	$(BIN)/cmake --build "build/$*" -j $(JOBS)
	$(CTEST) --test-dir "build/$*"

# Debian: apt-get install g++-aarch64-linux-gnu qemu-user
aarch64: $(VENV)/.packages ## cross-compile the C++ core and run its tests under emulation
	$(CMAKE) -B build/aarch64 $(CORE_ONLY) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"
	$(BIN)/cmake --build build/aarch64 -j $(JOBS)
	$(CTEST) --test-dir build/aarch64

clean: ## remove what this file made
	rm -rf $(VENV) build sparsecore/_native*.so

# The environment. The order matters: torch first and exactly, else torchrec's or another package's range
# brings a CUDA build of several gigabytes.
PINNED := cpu build test lint
$(VENV)/.packages: $(PINNED:%=requirements/%.txt) requirements/no-deps.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PINNED:%=-r requirements/%.txt)
	$(PIP) install --quiet --no-deps -r requirements/no-deps.txt
	touch $@

# Editable: Python files are used where they are; `pip install` compiles the C++ core, incrementally.
CORE := $(wildcard csrc/CMakeLists.txt csrc/*.cc csrc/bindings/*.cc csrc/bindings/*.h csrc/include/trtpu/*)
$(VENV)/.package: $(VENV)/.packages pyproject.toml $(CORE)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install --quiet --no-build-isolation --no-deps \
	  --config-settings=cmake.define.TRTPU_WERROR=ON --editable .
	touch $@

$(VENV)/.docs: $(VENV)/.package requirements/docs.txt
	$(PIP) install --quiet -r requirements/docs.txt
	touch $@
