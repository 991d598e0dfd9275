#!/bin/sh
# The transformer on two workers of this machine.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
test -x "$root/.venv/bin/poseidon" && PATH="$root/.venv/bin:$PATH"
exec poseidon run --hostfile="$root/machinefiles/localserver" "$here/train.py" "$@"
