# Every target sets up what it needs: a fresh machine needs Python 3.11 or newer, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := bash

# a stamp is as old as the last installation: it is redone when a pyproject.toml changes
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_DOCS := $(VENV)/.installed-docs
INSTALLED_BROWSER := $(VENV)/.installed-browser

# the packages around the core, each a distribution of its own
PACKAGES := $(wildcard plugins/forge_*/pyproject.toml)
PROJECTS := pyproject.toml $(PACKAGES)

# one line per package while pip works; what goes wrong is shown in full
# (the core is named on its own too: pip looks for it among what is named before it looks at an index)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --editable . $(addprefix --editable ./,$(patsubst %/,%,$(dir $(PACKAGES)))) --editable
SHOW_PACKAGES := sed -n -e 's/^Collecting \([^ ]*\).*/  \1/p' -e 's/^Installing collected.*/  unpacking/p'

# two workers, a file each: fixtures that build a wheel or install a package run once; compiled files are kept, or every
# process would compile forge and its tests anew
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile

# who installs packages of the system
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

# how many runs `make faults` kills
N ?= 1000

ORDER ?= $(shell date +%s)
.PHONY: help quickstart test check test-shuffled test-full test-browser docs faults coverage matrix dist try-dist install chromium clean
.DEFAULT_GOAL := help

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

quickstart: $(INSTALLED)  ## train a small network on handwritten digits
	@$(BIN)/forge fit quickstart
	@echo "These commands are in $(VENV); to have them at hand: source $(BIN)/activate"

test: $(INSTALLED_DEV)  ## run the tests: small profiles with fixed seeds
	@$(PYTEST)

test-shuffled: $(INSTALLED_DEV)  ## run the tests in another order: ORDER=SEED for the one of before
	@echo "ORDER=$(ORDER)"
	@FORGE_ORDER=$(ORDER) $(PYTEST)

test-full: $(INSTALLED_DEV)  ## run everything, with long profiles and fresh seeds
	@FORGE_PROFILE=full $(PYTEST)

test-browser: $(INSTALLED_BROWSER) chromium  ## look at reports and the site in Chromium (Debian's is installed where there is none)
	@FORGE_BROWSER=1 $(BIN)/python -m pytest tests/browser

docs: $(INSTALLED_DOCS)  ## build the site into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The pages are in site/: open site/index.html"

faults: $(INSTALLED_DEV)  ## kill N runs (1000), damage N checkpoints, fail calls, replay crashes; all must end in the same bits
	@$(BIN)/python -m benchmarks.faults --runs $(N) --signals $$(( ($(N) + 4) / 5 )) --damages $(N) \
		--logs $$(( ($(N) + 4) / 5 )) --io $$(( ($(N) + 1) / 2 )) --crashes $$(( ($(N) + 1) / 2 ))

matrix: | $(BIN)/pip  ## run the tests against the oldest and the newest versions, and between; ROWS="oldest newest" for some of them
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet uv
	@$(BIN)/python tests/matrix.py $(ROWS)

check: $(INSTALLED_DEV)  ## look for mistakes without running anything: ruff and pyright
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright

coverage: $(INSTALLED_DEV)  ## run the tests with coverage; build/not-covered.txt lists the lines that none reaches
	@mkdir -p build && rm -f build/.coverage*
	@$(PYTEST) --cov --cov-report=; ended=$$?; \
		$(BIN)/coverage report --skip-covered --show-missing > build/not-covered.txt; tail -n 1 build/not-covered.txt; exit $$ended

dist: $(INSTALLED_DEV)  ## build the wheel and the sdist of every package into dist/, and check them with twine
	@rm -rf dist
	@for project in $(dir $(PROJECTS)); do (cd $$project && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) || exit 1; done
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet twine
	@$(BIN)/python -m twine check --strict dist/*

try-dist: dist  ## install what `make dist` built into bare environments, with and without extras, and use it
	@for extra in '' '[all]'; do echo "forge-trainer$$extra in an environment of its own"; rm -rf build/bare; \
		$(PYTHON) -m venv build/bare && cd build/bare && \
		bin/python -m pip install --disable-pip-version-check --quiet --find-links $(CURDIR)/dist "forge-trainer$$extra" mypy 'pyright[nodejs]' && \
		bin/python -m pip check && bin/forge fit quickstart --smoke && cp $(CURDIR)/tests/fixtures/users_file.py . && \
		echo '{"typeCheckingMode": "strict", "include": ["users_file.py"]}' > pyrightconfig.json && \
		bin/pyright --pythonpath bin/python && bin/mypy --strict users_file.py || exit 1; cd $(CURDIR); done; rm -rf build/bare

install: $(INSTALLED_DOCS) $(INSTALLED_BROWSER) chromium  ## install what all the targets above need, and run nothing

chromium:
	@command -v chromium >/dev/null || { echo "Installing Debian's chromium"; $(SUDO) apt-get -qq update && $(SUDO) apt-get -qq install --no-install-recommends chromium >/dev/null; }

clean:  ## remove what make made: .venv, caches, builds; runs/ stays
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv writes: where it is missing, an attempt was cut short
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or say which one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("forge needs Python 3.11 or newer; $(PYTHON) is %d.%d. Say which one to use: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): $(PROJECTS) | $(BIN)/pip
	@echo "Installing forge into $(VENV): once, and a few minutes if PyTorch must be downloaded"
	@set -o pipefail; $(PIP_INSTALL) . | $(SHOW_PACKAGES)
	@touch $@

$(INSTALLED_DEV): $(PROJECTS) | $(BIN)/pip
	@echo "Installing forge and its development tools into $(VENV): once, and a few minutes if PyTorch must be downloaded"
	@set -o pipefail; $(PIP_INSTALL) '.[dev]' | $(SHOW_PACKAGES)
	@touch $(INSTALLED) $@

$(INSTALLED_DOCS): $(PROJECTS) $(INSTALLED_DEV)
	@set -o pipefail; $(PIP_INSTALL) '.[docs]' | $(SHOW_PACKAGES)
	@touch $@

$(INSTALLED_BROWSER): $(PROJECTS) $(INSTALLED_DEV)
	@set -o pipefail; $(PIP_INSTALL) '.[browser]' | $(SHOW_PACKAGES)
	@touch $@
