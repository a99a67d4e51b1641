# make demo   FedCCFA's Table 2 at smoke size, ours beside the published numbers (figure and notebook under out/)
# make test   everything that must pass before a change is kept; the demo is its last step
# make chaos SEED=1..20   sweeps whose workers, drivers, disk and files are attacked at random; every run must come out whole
# make site               the documentation under out/site, by quarto, which must be installed
# make results            every page that shows stored runs, the README and the shipped answers again, after runs were added
# make smoke              every table and figure at tier smoke, one seed: run, printed and drawn under out/smoke
# make peers              an environment of their own for other simulators: .venv-peers/bin/python -m benchmarks --peers
# make bench              samples a second of every executor, a plain loop, other simulators
# make nightly            5,000 generated inputs a property, every default changed once, what tests repeat, three seeds of chaos, a rehearsal of 400 runs, what every page prints, make smoke
# make versions           the supported versions of Python and torch: each installed (5 GB), then the golden, contract and by-hand tests
# make dist               the sdist and the wheel, in dist/
# make canary             does nbdev 3.3 export the same modules and test the same pages? (an environment of its own)
# All make the environment .venv first: Python 3.11 or newer and a network are all they need. Only versions makes its own, with the
# python3.11, python3.12 and python3.13 of PATH.

VENV    ?= .venv
BIN     := $(VENV)/bin
PY      := $(BIN)/python
READY   := $(VENV)/.ready
PYTHON  ?= $(shell for p in python3.12 python3.11 python3 python; do $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

OUT     ?= out
SPEC    := papers/fedccfa/table2.toml
TIER    := smoke
METHODS := FedAvg,FedProx,FedRep,FedCCFA
PAGE    := nbs/06_methods/14_fedccfa.ipynb
# notebooks whose committed outputs are numbers a reader may rely on: run again and compared by nbval
NUMBERS := $(PAGE) nbs/index.ipynb nbs/12_results/06_checklists.ipynb nbs/12_results/00_summary.ipynb
# with the kernels of an older processor: committed digits must not be those of one machine
OLDER   := MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
RESULTS := $(OUT)/results

# PIP_REQUIRE_VIRTUALENV: without quarto some nbdev commands run pip by themselves; it must never reach the system.
export PIP_REQUIRE_VIRTUALENV := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JUPYTER_PREFER_ENV_PATH := 1
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export PATH := $(abspath $(BIN)):$(PATH)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

SEED    ?= 1

CANARY  := .venv-nbdev3
# what nbdev 3.3 is tried on: plain functions, a method's class, pictures
TRIED   := nbs/01_core/01_trees.ipynb nbs/06_methods/00_objective.ipynb nbs/09_reporting/04_curves.ipynb

step = @printf '\n== %s  %s\n' "$$(date +%H:%M:%S)" "$(1)"

.PHONY: help env demo test check notebooks pytest numbers chaos smoke nightly versions version bench dist canary results readme lab clean site peers
.NOTPARALLEL:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

env: $(READY)

$(PY):
	@test -n "$(PYTHON)" || { echo "fedrepro needs Python 3.11 or newer with its venv module, and found none (Debian, Ubuntu: apt install python3-venv); or name one: make demo PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedrepro needs Python 3.11 or newer, and $(PYTHON) is older or missing" >&2; exit 2; }
	$(call step,environment: $(PYTHON) -m venv $(VENV))
	@$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(PY)
	$(call step,install (once; torch with its CUDA libraries takes about 5 GB on disk))
	$(PY) -m pip install -qq --no-input -c constraints.txt -e '.[dev]'
	@mkdir -p $(VENV)/etc/ipython && echo 'c.Application.log_level = 40  # kernels say only what is an error' > $(VENV)/etc/ipython/ipython_kernel_config.py
	@touch $@

demo: $(READY)
	@mkdir -p $(OUT)
	$(call step,demo: $(SPEC) at tier $(TIER))
	$(BIN)/papermill $(if $(CI),--no-progress-bar,--progress-bar) $(PAGE) $(OUT)/14_fedccfa_table2_$(TIER).ipynb -p spec $(SPEC) -p tier $(TIER) -p methods $(METHODS) -p lessons False -p results $(RESULTS)
	$(BIN)/fedrepro figure $(SPEC) --tier $(TIER) --results $(RESULTS) --out $(OUT)/fedccfa_table2_$(TIER).png
	@echo
	$(BIN)/fedrepro table $(SPEC) --tier $(TIER) --results $(RESULTS)
	@printf '%s\n' "" "executed notebook: $(OUT)/14_fedccfa_table2_$(TIER).ipynb" "figure:            $(OUT)/fedccfa_table2_$(TIER).png" "raw results:       $(RESULTS)/"

# the demo of the test starts from nothing, in a folder of its own, while nbval has the other core
test: $(READY) check notebooks pytest
	@rm -rf $(OUT)/test && mkdir -p $(OUT)/test
	@$(MAKE) --no-print-directory numbers > $(OUT)/test/numbers.txt 2>&1 & numbers=$$!; \
	$(MAKE) --no-print-directory demo OUT=$(OUT)/test; demo=$$?; wait $$numbers; numbers=$$?; cat $(OUT)/test/numbers.txt; \
	exit $$((demo | numbers))
	$(call step,all passed)

check: $(READY)
	$(call step,export and clean leave no difference; repository)
	$(PY) -m pytest tests/repository/test_repository.py

notebooks: $(READY)
	$(call step,nbdev_test: every notebook but those that nbval runs)
	$(BIN)/nbdev_test --n_workers 2 --do_print --timing --skip_file_re '^([_.]|($(subst $() ,|,$(basename $(notdir $(NUMBERS))))).ipynb$$)'
	$(BIN)/nbdev_test --path benchmarks --n_workers 2 --do_print

pytest: $(READY)
	$(call step,pytest)
	$(PY) -m pytest tests --ignore tests/repository/test_repository.py --durations 12 -n 2 --dist loadfile --no-loadscope-reorder

numbers: $(READY)
	$(call step,nbval: the committed numbers come out again)
	$(OLDER) $(PY) -m pytest -p no:cacheprovider --nbval --nbval-current-env -n 2 --dist loadfile $(NUMBERS)

chaos: $(READY)
	$(call step,chaos: seeds $(SEED))
	$(PY) tools/chaos.py --seeds $(SEED)

smoke: $(READY)
	$(call step,smoke: every table and figure)
	$(PY) tools/smoke.py $(OUT)/smoke

nightly: $(READY)
	$(call step,nightly: generated inputs and golden bands)
	FEDREPRO_NIGHTLY=1 $(PY) -m pytest tests/cli/test_input.py tests/methods/test_bands.py --durations 5 -n 2
	FEDREPRO_NIGHTLY=1 $(PY) -m pytest tests -m nightly --durations 12 -n 2 --dist loadfile --no-loadscope-reorder
	@$(MAKE) --no-print-directory chaos SEED=1..3
	$(PY) tools/chaos.py --terms 10
	$(PY) tools/chaos.py --runs 400
	$(call step,nightly: what every page prints)
	$(PY) -m pytest -p no:cacheprovider --nbval --nbval-current-env --nbval-sanitize-with tests/outputs.cfg -n 2 --dist loadfile nbs/*/*.ipynb
	@$(MAKE) --no-print-directory smoke

# Python/torch; without torch: the one of constraints.txt. The interpreters are those of PATH: python3.11 and so on
VERSIONS ?= 3.11/2.6.0 3.11 3.12 3.13
versions:
	@for v in $(VERSIONS); do $(MAKE) --no-print-directory version V=$$v || failed="$$failed $$v"; done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# another torch brings its own torchvision, sympy and setuptools
version: python = python$(firstword $(subst /, ,$(V)))
version: torch = $(word 2,$(subst /, ,$(V)))
version: env = $(abspath $(OUT))/versions/$(subst /,-torch,$(V))
version:
	$(call step,$(python) with torch $(or $(torch),of constraints.txt))
	@$(python) -m venv --clear $(env)
	@grep -v -E '^(#$(if $(torch),|(torch|torchvision|sympy|setuptools)==))' constraints.txt > $(env)/pins.txt
	@$(if $(torch),echo torch==$(torch) >> $(env)/pins.txt)
	@$(env)/bin/python -m pip install -qq --no-input --no-cache-dir -c $(env)/pins.txt -e '.[dev]'
	@$(env)/bin/python -c "import sys, torch, numpy; print(sys.version.split()[0], 'torch', torch.__version__, 'numpy', numpy.__version__)"
	PATH=$(env)/bin:$(PATH) $(env)/bin/python -m pytest -p no:cacheprovider -n 2 tests/methods/test_golden*.py tests/checks/test_contract.py tests/methods/test_by_hand.py
	@rm -rf $(env)

bench: $(READY)
	$(PY) -m benchmarks

# their versions contradict constraints.txt; torch and the like come from .venv, by a path file
PEERS := .venv-peers
peers: $(READY)
	$(call step,environment: $(PEERS) with Flower and pfl-research)
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["peers"], sep="\n")' > $(PEERS)/peers.txt
	$(PEERS)/bin/python -m pip install -qq --no-input -r $(PEERS)/peers.txt

# build/ would keep modules that are gone; the shipped answers are those of this code
dist: $(READY)
	@rm -rf build dist
	$(PY) tools/answers.py
	$(PY) -m build

# a copy of the tree, so that nothing here changes; torch and the like come from .venv, by a path file
canary: $(READY)
	$(call step,environment: $(CANARY) with nbdev 3.3)
	@test -x $(CANARY)/bin/nbdev-export || { $(PYTHON) -m venv $(CANARY) && $(CANARY)/bin/python -m pip install -qq --no-input 'nbdev==3.3.*'; }
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(CANARY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(CANARY)/bin/python -m pip freeze 2>/dev/null | grep -i -E '^(nbdev|fastcore|execnb|ghapi|fastgit)=='
	$(call step,export: fedrepro/ must come out the same)
	@rm -rf $(OUT)/canary && mkdir -p $(OUT)/canary
	@git ls-files -coz --exclude-standard -- nbs fedrepro papers settings.ini pyproject.toml _quarto.yml | xargs -0 cp --parents -P -t $(OUT)/canary
	@find $(OUT)/canary/fedrepro -name '*.py' ! -path '*/fedrepro/__init__.py' ! -name __main__.py -delete
	cd $(OUT)/canary && $(abspath $(CANARY))/bin/nbdev-export
	diff -r -x __pycache__ -x '*.egg-info' fedrepro $(OUT)/canary/fedrepro
	$(call step,test)
	@for page in $(TRIED); do echo $$page; (cd $(OUT)/canary && PATH=$(abspath $(CANARY))/bin:$$PATH $(abspath $(CANARY))/bin/nbdev-test $$page) || exit 1; done
	$(call step,nbdev 3.3 does the same)

site: $(READY)
	$(PY) tools/website.py $(OUT)/site

results: $(READY)
	$(PY) tools/stored_pages.py
	$(BIN)/nbdev_clean
	$(PY) tools/readme.py
	$(PY) tools/answers.py

# README.md is nbs/index.ipynb
readme: $(READY)
	$(PY) tools/readme.py

lab: $(READY)
	$(BIN)/jupyter lab nbs

clean:
	rm -rf $(OUT) _proc _docs build dist
