#!/bin/sh
# Divide a database or a list among clients that share no file system: client k then reads <DB_PATH>_k.
# Edit these lines, or set them in the environment, or pass arguments of `poseidon partition_data`.
DB_PATH=${DB_PATH:-examples/cifar10/cifar10_train_lmdb} # absolute, or relative to the repository
BACKEND=${BACKEND:-}                                    # lmdb or leveldb; empty: what the folder holds
NUM_PARTITIONS=${NUM_PARTITIONS:-2}
HOSTFILE=${HOSTFILE:-}                                  # a machinefile: a part for each client, copied to it over SFTP

set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -eq 0 ]; then
    cd "$root"
    if [ -n "$HOSTFILE" ]; then
        set -- --hostfile="$HOSTFILE" --distribute
    else
        set -- --num_partitions="$NUM_PARTITIONS"
    fi
    set -- ${BACKEND:+--backend="$BACKEND"} "$@" "$DB_PATH"
fi
exec "$python" -m poseidon partition_data "$@"
