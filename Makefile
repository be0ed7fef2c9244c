# Every verb makes its own environment on a machine that has nothing but Python 3.11 or newer.
VENV ?= .venv
PYTHON ?= $(shell for name in python3.12 python3.11 python3; do \
	command -v $$name >/dev/null 2>&1 || continue; \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$name; break; }; done)
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu)
CONFIG ?= deployments/configs/$(if $(GPU),gpu,cpu).yaml
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check -q -c constraints.txt
TESTS ?=
# The whole suite runs in as many processes; files named by TESTS run in one.
JOBS ?= 2
# Real clients, each in an environment of its own under .venv-contract: files tests/contract/test_<client>.py.
CLIENTS ?= openai cohere lm_eval langchain llama_index litellm node pydantic_ai rerankers haystack instructor \
	promptfoo load_tools embeddings assay_client docs
PROMETHEUS := .prometheus/usr/bin
PICTURES ?=
KERNELS := tests/gpu_sampler/kernels
IN_THE_LOOP := tests/engine/test_kernels_in_the_loop.py tests/engine/test_invariant_numerics.py
# Without a GPU their tests run in Triton's interpreter, which is chosen for a whole process as Triton is imported.
INTERPRETED := $(if $(GPU),,$(filter Linux,$(shell uname)))
INTERPRETER := TRITON_INTERPRET=1 TRITON_DEFAULT_FP_FUSION=1
comma := ,
# Targets for tests marked gpu stand below these. `make test-gpu PYTHON=python3` takes that interpreter as it is, without an
# environment of ours: for a machine with GPUs and without a package index. The longest come first: each worker begins at
# the front of its share.
GPU_TESTS := tests/on_gpu tests/engine tests/gpu_sampler
AS_IT_IS := $(filter command,$(firstword $(origin PYTHON)))
GPU_RUN := $(if $(AS_IT_IS),$(PYTHON),$(RUN))
# There pytest may lack plugins whose options we set, and have others: both warn, and warnings are errors.
GPU_OPTIONS := -p no:cacheprovider -p no:benchmark -W ignore
OUTCOMES ?= .gpu-outcomes.jsonl
RESUME ?=
HAS_FLASHINFER := import importlib.util, sys; sys.exit(importlib.util.find_spec("flashinfer") is None)

.PHONY: serve test test-all test-gpu lint bench contract chaos dashboards

serve: $(VENV)/.serve
	exec $(RUN) -m deployments.cli serve $(CONFIG)

# Every guarantee once, but for what takes seconds of a core: seven to eight minutes on two idle cores, the aim being six.
test: TIER := --fast
test: test-all

# Everything: all planted faults, full sample sizes, all architectures and variants.
test-all: $(VENV)/.test
ifeq ($(and $(INTERPRETED),$(findstring $(KERNELS),$(TESTS))),)
	$(RUN) -m pytest $(TIER) $(if $(INTERPRETED),--ignore=$(KERNELS)) $(or $(TESTS),-n $(JOBS) --dist loadfile)
endif
ifneq ($(and $(INTERPRETED),$(if $(TESTS),$(findstring $(KERNELS),$(TESTS)),all)),)
	$(INTERPRETER) $(RUN) -m pytest $(TIER) $(or $(TESTS),-n $(JOBS) --dist worksteal $(KERNELS) $(IN_THE_LOOP))
endif

# All GPUs of the machine. FlashInfer's modules are compiled beside the tests, which wait for its locks and compile those
# with windows and soft caps themselves.
test-gpu: $(if $(AS_IT_IS),,$(VENV)/.test)
	@if [ -z "$(TESTS)" ] && $(GPU_RUN) -c '$(HAS_FLASHINFER)'; then \
		$(GPU_RUN) -m engine.warmup.precompile_flashinfer --sampling --urgent & \
	fi; \
	OMP_NUM_THREADS=2 $(GPU_RUN) -m pytest -q -p tests.gpus -m gpu -n auto --dist worksteal $(GPU_OPTIONS) \
		--outcomes $(OUTCOMES) $(RESUME:%=--resume %) $(or $(TESTS),$(GPU_TESTS)); \
	status=$$?; [ $$status -eq 2 ] || wait; exit $$status  # 2: interrupted

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

contract: $(VENV)/.test
	$(RUN) -m pytest $(or $(TESTS),$(CLIENTS:%=tests/contract/test_%.py)) -m contract

# Faults and overload, for minutes.
chaos: $(VENV)/.test
	$(RUN) -m pytest $(or $(TESTS),tests/chaos) -m slow

# Debian's own Prometheus, installed or fetched beside us: the dashboards and alerts are asked of it. PICTURES=docs/img
# draws them anew.
dashboards: $(VENV)/.test $(if $(shell command -v promtool),,$(PROMETHEUS)/promtool)
	ASSAY_PROMETHEUS=$(PROMETHEUS) ASSAY_PICTURES=$(PICTURES) $(RUN) -m pytest $(or $(TESTS),tests/prometheus) -m prometheus

$(PROMETHEUS)/promtool: k8s/fetch_prometheus.sh
	sh $< .prometheus
	@touch $@

# ONLY=engine-0.6b,verify; `python -m benchmarks --list` names them.
bench: $(VENV)/.test
	$(RUN) -m benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed (python3.12, python3.11 or python3)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[$(if $(GPU),gpu,serve)]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[test$(if $(GPU),$(comma)gpu)]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev$(if $(GPU),$(comma)gpu)]'
	@touch $@
