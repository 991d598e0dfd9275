#!/bin/sh
# One job under torchrun. Start this on every node, with the same key file; docs/schedulers/torchrun.md.
# One node:    NPROC=4 scripts/schedulers/torchrun.sh train --solver=solver.prototxt --gpu=all
# Several:     NNODES=2 NPROC=4 MASTER=node0 scripts/schedulers/torchrun.sh train --solver=solver.prototxt --gpu=all
set -eu
NNODES=${NNODES:-1}
NPROC=${NPROC:-1}                      # tasks on each node: as many workers
MASTER=${MASTER:-127.0.0.1}            # a node that all others reach
PORT=${PORT:-29500}                    # torchrun's own; Poseidon takes the next one
KEY=${KEY:-$HOME/.poseidon.key}        # poseidon worker --new_key=$HOME/.poseidon.key, once
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$NNODES" -eq 1 ]; then
    set -- --standalone --nproc_per_node="$NPROC" -m poseidon worker --key_file="$KEY" "$@"
else
    set -- --nnodes="$NNODES" --nproc_per_node="$NPROC" --rdzv_backend=c10d --rdzv_endpoint="$MASTER:$PORT" \
        --max_restarts=0 -m poseidon worker --key_file="$KEY" "$@"
fi
exec torchrun "$@"
