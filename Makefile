# What people and CI run. Needs Python 3.11 or newer with venv and pip, and a C compiler; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most of PyTorch's never are, and pip takes half a minute for all.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

# Some containers set this, and each of hundreds of processes would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

# LOCKED=1: exactly the files that requirements/ names, by hash; PyTorch comes last, with whatever its build needs.
LOCKED ?=
install-locked = $(PIP) --no-deps --require-hashes -r requirements/$(1) && $(PIP) -r requirements/torch.txt && \
	$(PIP) --no-deps --no-build-isolation -e . && $(BIN)/python -m pip check --disable-pip-version-check

.PHONY: train test process-tests unit-tests types test-fast check style docs gpu-check clean services lock sbom
.DEFAULT_GOAL := help

help:
	@echo "make train   set up .venv and train on real text: about three minutes, no GPU; again: goes on"
	@echo "make test    set up .venv, check style, types and import order, and run all tests that need no GPU"
	@echo "make test-fast   style, types, import order, and the unit tests that take no seconds: under four minutes"
	@echo "make check   style, types and import order only"
	@echo "make docs    the documentation as a site, into build/site"
	@echo "make gpu-check   on a machine with GPUs: what runs on them, part by part, into gpu-check/ (20 minutes for one)"
	@echo "make lock    renew requirements/lock*.txt; LOCKED=1 with any of these: install what they name, by hash"
	@echo "make sbom    a list of all packages and scripts that it needs, with hashes (CycloneDX), into build/sbom.json"
	@echo "make clean   remove .venv and caches; runs/ stays"

train: $(VENV)/.installed
	@$(BIN)/myriad train

# The file in which the pace of a link shows that it is slow, and no other may seem so, has the machine to itself.
# Then three run at once: files whose tests start processes wait for them for a fifth of the time, and the unit tests
# and mypy use that time at a low priority. What these two print is in build/ until they end. All three run to their end.
#
# A file of tests/unit needs one core, with one thread: as many run at once as there are cores, those with slow tests
# first (tests/unit/conftest.py). Of files whose tests start processes three run at once, the longest first
# (tests/conftest.py), so that none is last; a fourth would cost processor time, as processes of a test wait for each
# other's time slices. Threads that wait do not spin there, as there are fewer cores. What drives a browser leaves its
# loop running, so it runs after them.
#
# A test that fails beside others runs once more, one after another, as in CPython's own runner: on a machine that is
# busy with something else, processes of a test may come too late. Both results are printed; only the second decides.
# `pytest` alone runs everything, one after another.
ALONE := tests/hosts/test_link_alarms.py
run-tests = $(BIN)/python -m pytest $(1) $(2) || \
	{ [ $$? = 1 ] && echo "what failed, once more:" && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(2); }
beside = @mkdir -p build; { $(2); } >build/$(1).txt 2>&1; ended=$$?; echo; cat build/$(1).txt; exit $$ended
test: style services
	@$(call run-tests,,tests/gpu $(ALONE))
	@$(MAKE) --no-print-directory -k -j 3 process-tests unit-tests types

process-tests:
	@export OMP_WAIT_POLICY=passive; $(call run-tests,-n 3 --dist loadfile --no-loadscope-reorder,\
		$(addprefix --deselect ,$(ALONE)) tests/services tests/hosts tests/processes)
	@$(call run-tests,-n 3 --dist loadfile,tests/browser)

# A tenth of the usual share of a core that others want too; tests whose threads get less would give up. So the unit
# tests have three times as long: those of the network compile its simulators first, for half a minute of a whole core.
unit-tests types: BIN := nice -n 10 $(BIN)

# Which tests failed is noted in a folder of its own: the other call of pytest would overwrite it.
unit-tests:
	$(call beside,unit,export OMP_NUM_THREADS=1; $(call run-tests,-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder,\
		-o timeout=900 -o cache_dir=.pytest_cache/unit tests/unit))

types:
	$(call beside,mypy,$(BIN)/mypy)

test-fast: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m "not slow" tests/unit

# tests/services and tests/browser use these; where they cannot be installed the tests are skipped and say so. No
# service is started.
services:
	@{ command -v redis-server && command -v mkfs.ext4 && command -v fsfreeze && command -v slurmctld && command -v slurmd \
		&& command -v srun && command -v chromium; } >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
		{ echo "installing redis-server, e2fsprogs, util-linux and Slurm for tests/services, Chromium for tests/browser"; \
		RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server e2fsprogs util-linux \
		slurmctld slurmd slurm-client munge chromium >/dev/null 2>&1; } || true

# The site in build/site; a link or an anchor that leads nowhere fails.
docs: $(VENV)/.installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

check: style
	@$(BIN)/mypy

style: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python scripts/check_imports.py
	@$(BIN)/python scripts/check_unpickling.py

sbom: $(VENV)/.installed
	@$(BIN)/python scripts/sbom.py build/sbom.json

# With uv, from the ranges in pyproject.toml, for Python 3.11 to 3.14 on every platform.
lock:
	@$(PYTHON) -m venv build/lock && build/lock/bin/python -m pip install -q 'uv>=0.9,<1' packaging
	@build/lock/bin/python scripts/lock.py build/lock/bin/uv
	@rm -r build/lock

# PyTorch in .venv must be a build for CUDA.
gpu-check: $(VENV)/.installed-dev
	@$(BIN)/python scripts/gpu_check.py

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info

# The package is installed in place: a changed source file needs no new installation.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("myriad needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; make PYTHON=/path/to/python3.11")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.created
	@echo "installing myriad (PyTorch is the large part)"
	@$(if $(LOCKED),$(call install-locked,lock.txt),$(PIP) -e '.[watch,png]')
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.created
	@echo "installing myriad with what its tests need"
	@$(if $(LOCKED),$(call install-locked,lock-dev.txt),$(PIP) -e '.[dev]')
	@touch $@ $(VENV)/.installed
