# Two commands do everything: `make demo` and `make test`. Each makes .venv on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's settings: hand over the local wheel folder and the index, where pip has one.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_HTTP_TIMEOUT ?= 300
# Every run starts a dozen Python processes: without bytecode each would compile torch anew.
export UV_COMPILE_BYTECODE ?= 1

.PHONY: demo test check deploy clean

demo: $(VENV)/.demo
	$(BIN)/python -m flows.grpo $(RECIPE) $(SET)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Registers infra/prefect.yaml and infra/automations.yaml on the server that PREFECT_API_URL names.
deploy: $(VENV)/.demo
	$(BIN)/python -m flows.deploy $(NAMES) $(if $(NOTIFY),--notify $(NOTIFY))

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.demo: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo]"
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo,s3,test]"
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet -e ".[cpu,demo,s3,test,dev]"
	touch $@

clean:
	rm -rf $(VENV) .refrain
