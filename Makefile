# `make demo`: set up .venv and run the first tutorial. `make test`: the whole suite.
PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

.PHONY: demo test slow check smoke notebooks docs wheel oldest clean

demo: .venv/demo
	$(BIN)/python tutorials/01_letters.py

test: .venv/test
	$(BIN)/python -m pytest -n auto

# what takes minutes: twenty thousand random models against the sum over all paths, fits that are
# killed again and again, searches, calibration of samplers
slow: .venv/test
	$(BIN)/python -m pytest -n auto -m slow

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

# the site, warnings being errors; the code of its pages is run, nothing is fetched
docs: .venv/docs
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# the wheel and the source distribution; the wheel is imported from where it was installed
wheel: .venv/test
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel dist/*.whl
	cd build && PYTHONPATH=wheel ../$(BIN)/python -c \
		"import pyrohmm; assert '/build/wheel/' in pyrohmm.__file__; print(pyrohmm.__version__)"

# the suite, or TESTS, with the lower bounds of pyproject.toml; for Python 3.11 or 3.12. What they
# import themselves is newer, and they are warned of it
oldest:
	$(PYTHON) -m venv .venv-oldest
	$(PYTHON) .ci/oldest.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .venv-oldest/constraints.txt -e '.[test]'
	.venv-oldest/bin/python -m pytest -n auto -W ignore::DeprecationWarning $(TESTS)

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
