#!/bin/sh
# One job under Open MPI's mpirun: HOSTS=node0,node1 scripts/schedulers/mpirun.sh train --solver=solver.prototxt;
# docs/schedulers/mpi.md.
set -eu
HOSTS=${HOSTS:-localhost}              # node0:1,node1:1; the first one has rank 0
TASKS=${TASKS:-$(echo "$HOSTS" | tr ',' '\n' | wc -l)}
MASTER_ADDR=${MASTER_ADDR:-$(echo "$HOSTS" | sed 's/[,:].*//')}
MASTER_PORT=${MASTER_PORT:-29500}
KEY=${KEY:-$HOME/.poseidon.key}        # poseidon worker --new_key=$HOME/.poseidon.key, once, for all hosts
export MASTER_ADDR MASTER_PORT

# Open MPI only places the processes; nothing is sent through it. One task on each host, bound to nothing.
exec mpirun -n "$TASKS" --host "$HOSTS" --map-by node --bind-to none -x MASTER_ADDR -x MASTER_PORT -x PATH \
    poseidon worker --key_file="$KEY" "$@"
