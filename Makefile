# `make demo`: set up .venv and run the first tutorial. `make test`: the whole suite.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test fuzz check smoke notebooks docs wheel oldest clean

demo: .venv/demo
	$(BIN)/python tutorials/01_letters.py

test: .venv/test
	$(BIN)/python -m pytest -n auto

# ten thousand random models against the sum over all paths
fuzz: .venv/test
	$(BIN)/python -m pytest -m slow tests/test_fuzz.py

check: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# every tutorial and every figure script, with fewer steps; tutorials leave nothing behind
smoke: .venv/test
	for script in $(CURDIR)/tutorials/*.py; do echo $$script; folder=$$(mktemp -d); \
		(cd $$folder && PYROHMM_SMOKE=1 MPLBACKEND=agg $(CURDIR)/$(BIN)/python -W error::UserWarning:pyrohmm $$script > /dev/null) \
		&& rmdir $$folder || exit 1; done
	for script in figures/*.py; do echo $$script; MPLBACKEND=agg $(BIN)/python $$script --quick > /dev/null || exit 1; done

# this site, warnings being errors; nothing is run and nothing is fetched
docs: .venv/docs
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# the tutorials with their outputs
notebooks: .venv/test
	for script in tutorials/*.py; do \
		$(BIN)/jupytext --quiet --to ipynb $$script && \
		PYTHONWARNINGS="ignore:IProgress" $(BIN)/jupyter execute --inplace $${script%.py}.ipynb || exit 1; done

.venv/python:
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	touch $@

.venv/demo: .venv/python pyproject.toml constraints.txt
	$(PIP) -e '.[compiled]'
	touch $@

.venv/test: .venv/python pyproject.toml constraints.txt
	$(PIP) -e '.[test]'
	touch $@ .venv/demo

.venv/docs: .venv/python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist docs/_build docs/generated *.egg-info
