#!/bin/sh
# The CNN on two workers of this machine, both ways.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
test -x "$root/.venv/bin/poseidon" && PATH="$root/.venv/bin:$PATH"
poseidon run --hostfile="$root/machinefiles/localserver" "$here/train.py" "$@"
poseidon run --hostfile="$root/machinefiles/localserver" "$here/train.py" --torch_optimizer "$@"
