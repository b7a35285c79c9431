# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
PY := .venv/bin/python
HEADROOM_HOME ?= $(CURDIR)/.headroom
export HEADROOM_HOME
# without it each process would compile the program anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo up down status test test-fast check format fuzz audit docs lock clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything the program needs
	@bash tools/setup.sh

setup-test:
	@bash tools/setup.sh --test
	@bash tools/test_programs.sh

demo: setup  ## fine-tune a chat model inside a budget that plain training exceeds, and check every claim
	@$(PY) -m worker.stack up --if-needed
	@$(PY) -m headroom.demo

up: setup  ## start the service in the background and say where it is
	@$(PY) -m worker.stack up

down:  ## stop it; running jobs save first
	@test -x $(PY) || { echo "nothing to stop: .venv is not there"; exit 0; }; $(PY) -m worker.stack down

status:  ## say what runs, and where
	@$(PY) -m worker.stack status

# One process for each core and one more, since many tests wait for servers of their own; who has nothing left takes half of what
# another has. More than eight would need more memory than time. A single file is quicker without: `.venv/bin/python -m pytest tests/...`.
SPREAD := -n $(shell echo $$(( $$(nproc) + 1 ))) --maxprocesses 8 --dist worksteal
PYTEST := $(PY) -m pytest $(SPREAD)

# Of claims that are shown for many cases the commit's last digit draws an eighth; `make test BREADTH=0/1` runs all.
BREADTH ?= $(shell echo $$(( 0x0$$(git rev-parse HEAD 2>/dev/null | tail -c 2) % 8 )))/8

test: setup-test check  ## everything: set-up, linters, all tests (of broad ones a share, see BREADTH)
	@bash tools/run_tests.sh $(SPREAD) --breadth $(BREADTH)

test-fast: setup-test  ## tests that start no browser, no PostgreSQL and no whole job
	@$(PYTEST) -m "not slow and not browser and not postgres"

check: setup-test  ## linters, types, import arrows, migrations, deployment check
	$(PY) -m ruff check .
	.venv/bin/lint-imports --no-cache
	$(PY) -m mypy
	@home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT && \
	    HEADROOM_HOME=$$home $(PY) manage.py makemigrations --check --dry-run && \
	    HEADROOM_HOME=$$home HEADROOM_PRODUCTION=1 $(PY) manage.py check --deploy --fail-level WARNING

format:  ## let ruff fix what it can
	$(PY) -m ruff check --fix .

# 88 operations; 570 examples of each are 50,000 requests
fuzz: setup-test  ## hostile uploads and requests for hours: a million files, 50,000 requests
	$(PY) -m benchmarks.hostile
	HEADROOM_API_EXAMPLES=570 $(PYTEST) tests/webapp/api/test_openapi.py

audit: setup  ## ask the vulnerability database about every pinned dependency; needs the internet
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && $(PY) -m venv "$$work/venv" && \
	    "$$work/venv/bin/pip" install --quiet --disable-pip-version-check pip-audit && \
	    "$$work/venv/bin/pip-audit" --requirement requirements.lock --require-hashes --disable-pip

docs:  ## build the documentation as a site, with the API reference, in build/docs/site
	@bash tools/docs.sh

lock: setup-test  ## resolve the dependencies of pyproject.toml afresh
	bash tools/lock.sh

clean:  ## remove .venv and caches; never HEADROOM_HOME
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.headroom/*' -prune -exec rm -rf {} +
