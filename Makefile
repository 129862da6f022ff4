# make demo    trains two small models on 4 local ranks, and shows plan, prediction and proof
# make test    the test suite
# make lint    formatter, linter, import floors, types
# make bench   this runtime against eager, DDP and torch.distributed.pipelining
#
# Everything runs in .venv, made on first use. TORCH names the build that goes in first:
# on a machine with GPUs, say, make TORCH="torch>=2.11" test

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install demo test lint bench clean

install: $(READY)

# torch goes in first and by name, so that what depends on it finds it there.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" numpy
	@touch $@

$(READY): $(VENV)/.torch setup.cfg pyproject.toml
	$(BIN)/pip install --quiet -e ".[test,lint]"
	@touch $@

demo: $(READY)
	$(BIN)/python -m efftra_fx demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/step_time.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
