#!/bin/sh
# Make mnist_siamese_train_lmdb and mnist_siamese_test_lmdb here from the four published .gz files in the folder that is given.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m poseidon convert_mnist_siamese "$@"
