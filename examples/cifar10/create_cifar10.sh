#!/bin/sh
# Make cifar10_train_lmdb, cifar10_test_lmdb and mean.binaryproto here. Options, for example:
#   --data DIR           a folder that has CIFAR-10
#   --backend leveldb    LevelDB instead; with --clients N also its parts _0 to _<N-1>
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m poseidon prepare_cifar10 "$@"
