# make demo    train a small model on two CPU processes and show what came out
# make test    lint, type check and tests; what CI runs
# make lint    only the first two
# make test-slow      the cases that are left out of it, because they take long: more ranks, more of a matrix of cases
# make test-gpu       the tests that need a CUDA device
# make test-gpus      the tests on several ranks through NCCL, on as many GPUs as there are
# make test-gpu-sanitize  one small call of every GPU kernel under memcheck and racecheck of compute-sanitizer
# make bench-cpu      the CPU kernels beside PyTorch's dense attention
# make test-sanitize  the kernel tests under the address and undefined-behaviour sanitizers
# make test-prebuilt  installs with DS_BUILD_OPS=1 into an environment of its own and runs the kernels from there
# make docs    the API reference from docstrings, as HTML in build/docs
# make format  let ruff put the sources into shape
# make clean   remove everything that was made
#
# Each target first makes .venv, from PyPI alone. Options of pip may follow the version of torch, for example
#   make test TORCH="torch==2.11.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := $(CURDIR)/.venv/bin
# Made anew for another torch.
INSTALLED := .venv/installed-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)

# DeepSpeed compiles what it needs when it first needs it, with ninja from .venv; the results are kept here between runs.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
export PATH := $(BIN):$(PATH)
# Nothing is fetched while a model trains or a test runs.
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-slow test-gpu test-gpus test-gpu-sanitize unlock test-sanitize test-prebuilt bench-cpu docs lint format clean

demo: $(INSTALLED)
	@$(BIN)/python train/demo.py

test: lint unlock
	@$(BIN)/python -m pytest -n 2 tests/unit

test-slow: $(INSTALLED) unlock
	@$(BIN)/python -m pytest -n 2 --cases slow tests/unit

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest -n 8 tests/gpu tests/unit/test_select_triton.py

# Each rank has a GPU of its own; tests for which there are too few are skipped, and -rs says so.
test-gpus: $(INSTALLED)
	@$(BIN)/python -m pytest -n 4 -rs --nccl tests/gpu/test_every_plan.py tests/unit/test_ring.py tests/unit/test_parity_gradients.py \
		tests/unit/test_distributed_attention.py tests/unit/test_ulysses.py tests/unit/test_chunked_layers.py tests/unit/test_columns.py \
		tests/unit/test_bench_scaling.py

test-gpu-sanitize: $(INSTALLED)
	@for tool in memcheck racecheck; do PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m tests.gpu.small_case || exit 1; done

test-sanitize: $(INSTALLED)
	@LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest tests/unit/test_kernel.py -k "not 256" --sanitize

test-prebuilt: $(INSTALLED)
	@$(BIN)/python tests/prebuilt.py

bench-cpu: $(INSTALLED)
	@$(BIN)/python -m ds_sparse_ring.bench.cpu

docs: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@$(BIN)/python docs/make_reference.py build/docs

# A build of DeepSpeed's that was killed leaves its lock file, on which the next one would wait for ever. A live build has it open.
unlock:
	@find $(TORCH_EXTENSIONS_DIR) -name lock 2>/dev/null | while read -r lock; do \
		ls -l /proc/[0-9]*/fd 2>/dev/null | grep -qF -- "-> $$lock" || { echo "removing the lock of a build that was killed: $$lock"; rm -f "$$lock"; }; \
	done

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# torch first: DeepSpeed looks at the installed one while it is installed itself.
$(INSTALLED): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	rm -f .venv/installed-*
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[test,dev,eval]"
	touch $@

clean:
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist runs *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
