# make accept   the acceptance suite on all GPUs of this machine, or a rehearsal of level quick on CPU ranks;
#               ARGS="--gpus 4" adds options
# make quick    for daily work, under a minute: lint, and tests that hardly start anything, those of recorded runs first; and
#               those of the modules that changed since the last commit
# make oldest   quick rehearsals with the oldest releases that pyproject.toml allows (not of torch and matplotlib: large)
# make test     the project's own tests
# make release  what a release needs beside: translations, generated pages, and packages that hold what they should
# make pages    whether recorded pages pass html-validate and axe: needs npm and chromium
# make hosts    faults of nodes, on hosts made of namespaces, by srun's variables and by Ray: as root, and with nothing else at work
# What is missing is installed first. TORCH=cpu at the first make takes torch without CUDA: a fifth of the disk.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Device files of GPUs; in WSL2 there is but one for all. A container may have any of them.
GPUS   := $(wildcard /dev/nvidia[0-9]* /dev/dxg)
# The tests run side by side, but where there is a GPU: one run at a time may have it. One more than there are cores:
# tests of what hangs or comes late wait most of their time. A test that hangs itself must not hold up all others.
WORKERS := $(if $(GPUS),0,$(shell expr $$(nproc) + 1))
SIDE_BY_SIDE := -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --timeout 900
QUICK  = tests/test_structure.py $(addprefix tests/,recorded verdict model machine) $(shell $(BIN)/python -m tests.affected)
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --disable-pip-version-check
# pip does not know which builds of torch there are; uv does.
INSTALL := $(if $(TORCH),$(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend $(TORCH),$(PIP))

OLDEST := $(shell sed -n 's/^ *"\([a-z0-9-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml | grep -v -e torch -e matplotlib)

.PHONY: accept oldest quick test release pages hosts lint

accept: $(READY)
	GPUFLEET_STARTED_BY="make accept" $(BIN)/pytest acceptance/ $(if $(GPUS),,--fleet-level quick) $(ARGS)

oldest: $(READY)
	$(PIP) --upgrade --target build/oldest $(OLDEST)
	for what in "acceptance/ --rehearse" "acceptance/test_4_each_gpu.py --rehearse=1 --nodes=2"; do \
	  PYTHONPATH=$(CURDIR)/build/oldest $(BIN)/python -m pytest $$what --fleet-level quick -q $(ARGS) || exit; \
	done

quick: lint
	$(BIN)/pytest -q $(QUICK) $(SIDE_BY_SIDE) $(ARGS)

test: $(READY)
	$(BIN)/pytest tests/ $(SIDE_BY_SIDE) $(ARGS)

release: $(READY)
	$(BIN)/pytest tests/release.py $(ARGS)

pages:
	npm install --silent --no-save --prefix build/pages html-validate@10 axe-core@4 puppeteer-core@24
	cd build/pages && CHROMIUM=$$(command -v chromium) node $(CURDIR)/tests/report/pages.mjs $(CURDIR)/docs/results/*/report.html

hosts: $(READY)
	GPUFLEET_ALONE=1 $(BIN)/pytest tests/nodes/test_faults_of_nodes.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/size.py

$(READY): pyproject.toml
	@echo "Installing what is missing into $(VENV): torch and its CUDA libraries are gigabytes, this takes minutes"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[dev]'
	touch $@
