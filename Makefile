# Everything here needs Python >= 3.10 with its venv module, and make. The rest comes into .venv, once.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
ARGS ?=

# Ranks are processes: a thread each keeps them from getting in each other's way. Set it to override.
test soak: export OMP_NUM_THREADS := $(or $(OMP_NUM_THREADS),1)

.DEFAULT_GOAL := help
.PHONY: help demo test install lint format bench soak coverage

help:
	@echo "make demo      train a small GPT on two ranks, once with each hook, and write a report"
	@echo "make test      run the tests"
	@echo "make lint      check format, style and types"
	@echo "make format    apply the format and what style can mend by itself"
	@echo "make bench     measure codecs and training steps on this machine"
	@echo "make soak      run the long tests: minutes to hours"
	@echo "make coverage  run the tests and say which lines none of them reached"
	@echo "make install   make .venv alone; every other target does so when it has to"
	@echo 'ARGS="..." is passed on: make demo ARGS="--ranks 4", make test ARGS="-k int8"'

demo: $(INSTALLED)
	@$(BIN)/tensorplay demo $(ARGS)

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(ARGS)

soak: $(INSTALLED)
	@$(BIN)/python -m pytest -m soak $(ARGS)

coverage: $(INSTALLED)
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest $(ARGS)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report

lint: $(INSTALLED)
	@failed=; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/ruff check --output-format concise . || failed=1; \
	$(BIN)/mypy || failed=1; \
	test -z "$$failed"

format: $(INSTALLED)
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

bench: $(INSTALLED)
	@$(BIN)/python benchmarks/bench_codec.py $(ARGS)
	@$(BIN)/python benchmarks/bench_step.py $(ARGS)

install: $(INSTALLED)

# The constraints pin torch too, so pip never considers another release of it.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { \
	    echo "$(PYTHON) is not on the PATH; install Python 3.10 or newer, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; \
	    exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) -c 'import platform; print(platform.python_version())'); name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	    echo "$(PYTHON) has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv), or name a Python that has it: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; \
	    exit 1; }
	@echo "making .venv (PyTorch and the development set; once)"
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
