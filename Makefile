# What people do with Tutti. `make demo` and `make test` set everything up themselves.
.DEFAULT_GOAL := help
PY := .venv/bin/python
SEED ?= 0
SECONDS ?= 300
DIR ?= .

.PHONY: help env env-core demo test test-core lint fmt types bench sanitize mutations gpu-check soak soak-sglang fuzz fuzz-tools clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env:             ## .venv with everything: the core, its tools, SGLang on a CPU
	@bash scripts/setup.sh full

env-core:        ## .venv without SGLang
	@bash scripts/setup.sh core

demo: env        ## a real SGLang server keeps its prefixes through a SIGKILL
	$(PY) integration/sglang_cpu/demo.py

test: env lint types  ## all tests, SGLang's included
	$(PY) -m pytest

test-core: env-core   ## the tests that need no SGLang
	$(PY) -m pytest --ignore tests/sglang

lint: env-core   ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

fmt: env-core    ## format the sources
	$(PY) -m ruff format .
	clang-format -i csrc/include/tutti/*.h csrc/*/*.cc

types: env-core  ## mypy --strict on both packages
	$(PY) -m mypy

bench: env       ## ratios against fio and SGLang's file backend, in DIR
	.venv/bin/tutti bench io --dir $(DIR)
	.venv/bin/tutti bench index --dir $(DIR)
	.venv/bin/tutti bench tiers --dir $(DIR)
	.venv/bin/tutti bench linker --dir $(DIR)
	.venv/bin/tutti bench overlap --dir $(DIR)
	.venv/bin/tutti bench gio

sanitize: env-core    ## native tests plain and under ASan/UBSan and TSan
	bash tests/native/sanitize.sh

mutations: env-core   ## break the NVMe queues and rings on purpose; a test has to catch each break
	$(PY) tests/native/mutations.py

gpu-check: env   ## what needs a GPU, and says so where there is none
	bash integration/gpu/check.sh

soak: env-core   ## every trial and the randomised tests, for SECONDS in all with SEED
	TUTTI_SOAK_SECONDS=$(SECONDS) TUTTI_SOAK_SEED=$(SEED) $(PY) -m pytest tests/soak -s -o faulthandler_timeout=$$(($(SECONDS) + 3600))

soak-sglang: env ## a server on each route, with faults on the way, for SECONDS with SEED
	$(PY) integration/sglang_cpu/soak.py --route hicache --seconds $(SECONDS) --seed $(SEED)
	$(PY) integration/sglang_cpu/soak.py --route linker --seconds $(SECONDS) --seed $(SEED)

fuzz: env-core   ## every decoder, the native planner and the whole API, for SECONDS with SEED
	$(PY) tests/fuzz/run.py --seconds $(SECONDS) --seed $(SEED)

fuzz-tools: env-core  ## atheris, which guides `make fuzz` by coverage
	$(PY) -m pip --disable-pip-version-check install -q --no-deps -r requirements-fuzz.txt

clean:           ## remove what was built; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
