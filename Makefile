# One word for each thing that a person does. `make` alone lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One path to texts of your own, a file or a folder; it may have spaces.
DATA   ?=
# A folder or a bucket's URL; the model goes beside the folder, or to demo/model.
RUN    ?= demo/run
MODEL  ?= $(if $(findstring ://,$(RUN)),demo/model,$(patsubst %/,%,$(RUN)).model)

.DEFAULT_GOAL := help
.PHONY: help install demo test simulate bench-link bench-quality bench-peers bench-speed lint format clean

help:  ## list the words
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed  ## create .venv and install everything for development

demo: $(VENV)/.installed  ## train a small language model on three islands that share one folder
	$(BIN)/diloco-blob launch --islands 3 --run "$(RUN)" --settings workers/demo.toml --export "$(MODEL)" \
	    workers/train.py $(if $(DATA),--data "$(DATA)")

test: $(VENV)/.installed  ## run every test, real servers included
	$(BIN)/pytest

simulate: $(VENV)/.installed  ## play 100,000 histories of the protocol under faults, and count every fault
	$(BIN)/diloco-blob simulate protocol --seeds $(or $(SEEDS),100000) --from $(or $(FROM),0)

bench-link: $(VENV)/.installed  ## islands on thin links, beside DistributedDataParallel; needs Linux and root
	$(BIN)/python benchmarks/link/bench.py

bench-peers: $(VENV)/.installed  ## the same training through hivemind, torchft, flwr and others; needs Linux and root
	$(BIN)/python benchmarks/peers/compare.py

bench-quality: $(VENV)/.installed  ## loss of every method at equal tokens, against bytes; BENCH=quick: minutes
	PYTHONPATH=benchmarks $(BIN)/python -m quality $(if $(filter quick,$(BENCH)),--quick) --processes $(or $(PROCESSES),1)

bench-speed: $(VENV)/.installed  ## ratios to a copy, merges of up to 253 M parameters, what training waits for; 6 GB of disk
	PYTHONPATH=benchmarks $(BIN)/python -m speed $(if $(ONLY),--only $(ONLY))

lint: $(VENV)/.installed  ## ruff, mypy strict, and the import contracts of the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, caches and the demo's run
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
