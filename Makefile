# Everyday commands of the template. `make` alone lists them.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV ?= .venv
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := $(VENV)/bin
# An environment is made anew when its lock changes, and only then: the name of its mark says so.
TOOLS := $(VENV)/.ready-$(shell cksum < requirements.txt | tr ' ' -)
BENCH := build/bench-venv
BENCH_TOOLS := $(BENCH)/.ready-$(shell cksum < benchmarks/requirements.txt | tr ' ' -)

# Demo and tests share one environment for the rendered project; its Makefile fills it from its locks.
PROJECT_VENV := $(CURDIR)/build/venv
PROJECT_LOCK := {{cookiecutter.project_slug}}/requirements/cpu.txt
# A package index that has torch's CPU build, where the ones that pip knows have none.
TORCH_INDEX ?=
# The user's own cookiecutter settings stay out of it: these renders are the template's defaults.
RENDER = DISTRIBUTED_TORCH_QUIET=1 $(BIN)/cookiecutter --no-input --default-config . --output-dir
# By another name than $(MAKE), which `make -n` would run: in a folder that is not rendered yet.
IN_PROJECT = $(MAKE) -C

.DEFAULT_GOAL := help
.PHONY: help demo test test-template test-slow test-gpu docker slurm horovod engines lint format bench bench-memory docs lock clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(TOOLS)  ## render into build/demo, install, train on digits with two processes, test
	rm -rf build/demo
	$(RENDER) build/demo
	$(IN_PROJECT) build/demo/my-project setup VENV=$(PROJECT_VENV)
	cd build/demo/my-project && $(PROJECT_VENV)/bin/python -m my_project fit --config configs/digits.yaml --trainer.devices 2
	cd build/demo/my-project && $(PROJECT_VENV)/bin/python -m my_project test --config configs/digits.yaml --checkpoint runs/*
	@echo "The project lies in build/demo/my-project, the run in" build/demo/my-project/runs/*

test: lint test-template  ## check and test the template, then a rendered project
	rm -rf build/test
	$(RENDER) build/test
	$(IN_PROJECT) build/test/my-project setup VENV=$(PROJECT_VENV)
	$(IN_PROJECT) build/test/my-project lint typecheck test VENV=$(PROJECT_VENV)
	PROJECT_PYTHON=$(PROJECT_VENV)/bin/python $(BIN)/python -m pytest -m trains tests/test_update.py

test-template: $(TOOLS)  ## run the template's own tests
	$(BIN)/python -m pytest --numprocesses 2 -m "not trains" --ignore tests/docker --ignore tests/slurm

test-slow: $(TOOLS)  ## run the tests of a rendered project that take long
	rm -rf build/test
	$(RENDER) build/test
	$(IN_PROJECT) build/test/my-project test-slow VENV=$(PROJECT_VENV)

docker: export TORCH_INDEX := $(TORCH_INDEX)
docker: $(TOOLS)  ## build a rendered project's image, look into it and train in it
	bash docker/smoke.sh $(BIN)/python

slurm: export PROJECT_PYTHON := $(PROJECT_VENV)/bin/python
slurm: engines  ## run a rendered project's jobs on a real SLURM cluster of this machine (as root)
	$(BIN)/python -m pytest tests/slurm --numprocesses 2 --dist loadfile --durations 10

horovod: $(TOOLS)  ## install Horovod for the tests of a rendered project; its first build takes minutes
	rm -rf build/test
	$(RENDER) build/test
	$(IN_PROJECT) build/test/my-project horovod VENV=$(PROJECT_VENV)

engines: horovod  ## install all engines for these tests: Horovod, FairScale, DeepSpeed
	$(IN_PROJECT) build/test/my-project fairscale deepspeed VENV=$(PROJECT_VENV)

test-gpu: $(TOOLS)  ## run the tests of a rendered project that need a GPU
	rm -rf build/test
	$(RENDER) build/test
	$(IN_PROJECT) build/test/my-project fairscale deepspeed test-gpu VARIANT=cuda VENV=$(CURDIR)/build/venv-cuda

# What is rendered is checked as a render: scripts, Dockerfile and workflow hold Jinja before. actionlint hands the
# scripts in workflows to the shellcheck that it finds.
lint: $(TOOLS)  ## check Python, shell, Dockerfile and workflows, the template's own and rendered ones
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf build/lint
	$(RENDER) build/lint
	$(BIN)/shellcheck --external-sources .ci/run docker/*.sh slurm/*.sh
	cd build/lint/my-project && $(CURDIR)/$(BIN)/shellcheck --external-sources requirements/*.sh slurm/*.sh
	$(BIN)/hadolint build/lint/my-project/Dockerfile
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/actionlint .github/workflows/*.yml build/lint/my-project/.github/workflows/*.yml

format: $(TOOLS)  ## bring the template's own Python into form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_TOOLS)  ## compare with Lightning, Accelerate and a hand-written loop (half an hour)
	$(BENCH)/bin/python benchmarks/run.py $(ARGS)

# In the project's own environment, which has the engines; ARGS=--quick for a smoke run.
bench-memory: $(TOOLS)  ## compare the memory of a rank under the strategies that divide it (half an hour)
	rm -rf build/bench-memory
	$(RENDER) build/bench-memory
	$(IN_PROJECT) build/bench-memory/my-project setup VENV=$(PROJECT_VENV)
	$(PROJECT_VENV)/bin/python benchmarks/memory.py $(ARGS)

docs: $(TOOLS)  ## write the table of options into docs/options.md
	$(BIN)/python tests/options_table.py

lock: $(TOOLS)  ## make requirements.txt anew from requirements.in
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet pip-tools
	build/lock/bin/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options \
		--output-file requirements.txt requirements.in
	sed -i '1i # Exact versions with their hashes, for Python 3.11 on Linux. Made from requirements.in by `make lock`.' requirements.txt

clean:  ## remove all that these commands have made
	rm -rf build $(VENV)

$(TOOLS): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --require-hashes -r requirements.txt
	@rm -f $(VENV)/.ready-*
	@touch $@

# torch comes from the rendered project's lock, first and alone: nothing else is looked up on its index.
$(BENCH_TOOLS): benchmarks/requirements.txt $(PROJECT_LOCK)
	$(PYTHON) -m venv $(BENCH)
	sed -n '/^torch==/,/[^\\]$$/p' '$(PROJECT_LOCK)' > $(BENCH)/torch.txt
	@$(BENCH)/bin/pip install -qq --require-hashes --no-deps --retries 1 \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $(BENCH)/torch.txt 2> $(BENCH)/torch.log || { \
		if grep -q 'No matching distribution' $(BENCH)/torch.log; \
		then echo 'pip finds no CPU build of torch: name an index that has it by make … TORCH_INDEX=URL (see pytorch.org, "Get started", CPU)'; \
		else cat $(BENCH)/torch.log; fi >&2; exit 1; }
	$(BENCH)/bin/pip install -qq --require-hashes --no-deps -r benchmarks/requirements.txt
	@rm -f $(BENCH)/.ready-*
	@touch $@
