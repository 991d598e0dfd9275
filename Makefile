# make setup | cifar10 | test | check | docs | proto | clean
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed

.PHONY: setup cifar10 test check docs proto clean

setup: $(STAMP)

$(STAMP): setup.py constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

cifar10: setup
	$(VENV)/bin/python examples/cifar10/train_cifar10.py $(ARGS)

test: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/test

check: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check

docs: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --config-file website/mkdocs.yml

proto: setup
	$(VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. poseidon/proto/caffe.proto poseidon/caffe2/proto/*.proto

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
