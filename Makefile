# Everything a newcomer needs: `make demo`, `make test`, `make check`.
# Needs only make and a python3 of 3.11 - 3.13; all else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
TORCH := torch==2.13.0
TEST_JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS)

.PHONY: help venv test test-all check format demo clean

help:
	@echo 'make demo      fetch a small model, verify its products, chat, bench, tune, compare'
	@echo 'make test      the tests without the slow ones, in TEST_JOBS=2 processes'
	@echo 'make test-all  all tests; the slow ones fetch models'
	@echo 'make check     ruff and mypy'
	@echo 'make format    ruff format, and the fixes ruff is sure of'
	@echo 'make venv      $(VENV) with everything these need'
	@echo 'make clean     remove $(VENV) and caches'

venv: $(STAMP)

# torch first and alone: nothing that follows may choose another build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"$(PYTHON) is Python {v[0]}.{v[1]}; Tilewright needs 3.11 - 3.13: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing $(TORCH) into $(VENV)'
	@$(PIP) -c constraints.txt $(TORCH)
	@echo 'installing tilewright and its tools into $(VENV)'
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

# A file's tests stay in one process: what they compile, they compile once.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile -m 'not slow'

test-all: $(STAMP)
	$(BIN)/python -m pytest -q

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

DEMO := .demo

# A verdict of tune or compare (exit codes 4 to 6) is a result here; errors and wrong numbers are not.
demo: $(STAMP)
	@$(BIN)/tilewright demo-model
	$(BIN)/tilewright info smollm2
	$(BIN)/tilewright verify --model smollm2
	$(BIN)/tilewright run smollm2 'What is the capital of France?' --max-tokens 40
	$(BIN)/tilewright bench smollm2 -p 128 -n 32 -r 3
	@mkdir -p $(DEMO)
	$(BIN)/tilewright tune smollm2 --budget 60 --out $(DEMO)/tiles.json --html $(DEMO)/report.html || test $$? -ge 4
	@test -e $(DEMO)/tiles.json || echo 'No tile is faster than the default for certain, so there is no table; the default is compared with itself.'
	$(BIN)/tilewright compare smollm2 --table none --table "$$(test -e $(DEMO)/tiles.json && echo $(DEMO)/tiles.json || echo none)" --test pp512 --blocks 8 --html $(DEMO)/compare.html || test $$? -ge 4
	@echo 'open $(DEMO)/report.html (the tuning) and $(DEMO)/compare.html (tuned beside default)'

clean:
	rm -rf $(VENV) $(DEMO) .pytest_cache .mypy_cache .ruff_cache
