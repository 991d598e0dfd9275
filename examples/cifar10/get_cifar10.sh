#!/bin/sh
# Fetch the published CIFAR-10 archive (170 MB) into examples/cifar10/data; an interrupted download continues.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m poseidon prepare_cifar10 --download_only "$@"
