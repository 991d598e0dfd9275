# make setup | cifar10 | test | check | claims | docs | proto | clean
PYTHON ?= python3
VENV   := .venv
EXTRA  ?= dev
STAMP  := $(VENV)/.installed-$(EXTRA)
# What each process of a job imports: with PYTHONDONTWRITEBYTECODE, as in many containers, every start would compile it.
COMPILED = poseidon ps_server $(foreach name,torch numpy zmq google,$(VENV)/lib/python*/site-packages/$(name))

.PHONY: setup cifar10 test check claims docs proto clean

setup: $(STAMP)

$(STAMP): setup.py constraints.txt $(wildcard ps_server/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Poseidon needs Python 3.10 or newer, but $(PYTHON) is %d.%d; run, for example: make setup PYTHON=python3.11" % sys.version_info[:2])'
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "make: installing Poseidon, torch and the tools of development ($(EXTRA)) into $(VENV): about 2 GB, some 5 minutes; the lines of pip follow"
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --no-compile -c constraints.txt -e '.[$(EXTRA)]'
	@echo "make: installed; compiling what each process imports, up to a minute"
	$(VENV)/bin/python -m compileall -q -j 0 -x /testing/ $(COMPILED)
	touch $@

cifar10: setup
	$(VENV)/bin/python examples/cifar10/train_cifar10.py $(ARGS)

test: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/test

check: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

claims: setup
	$(VENV)/bin/python benchmarks/claims.py

docs: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --config-file website/mkdocs.yml

proto: setup
	$(VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. poseidon/caffe/proto/caffe.proto poseidon/caffe2/proto/*.proto

clean:
	rm -rf $(VENV) build dist *.egg-info ps_server/native/codecs.so .mypy_cache .ruff_cache .pytest_cache
