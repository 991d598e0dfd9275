#!/bin/sh
# Extract features on every client of a machinefile: client c, thread t writes them to <DATABASES>_c_t.
# Edit these lines, or set them in the environment, or pass arguments of `poseidon extract_features`.
MODEL=${MODEL:-examples/_temp/imagenet_val.prototxt}
WEIGHTS=${WEIGHTS:-models/bvlc_reference_caffenet/bvlc_reference_caffenet.caffemodel}
BLOBS=${BLOBS:-fc7}                          # parted by commas
DATABASES=${DATABASES:-examples/_temp/features} # one for each blob
BACKEND=${BACKEND:-leveldb}                  # or lmdb
HOSTFILE=${HOSTFILE:-machinefiles/localserver}
NUM_APP_THREADS=${NUM_APP_THREADS:-1}        # workers of each client on CPU
GPU=${GPU:-}                                 # GPUs of each client, one worker each: 0,1; empty: CPU
NUM_MINI_BATCHES=${NUM_MINI_BATCHES:-0}      # most batches of a worker; 0: all of the data

set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -eq 0 ]; then
    cd "$root"
    set -- --model="$MODEL" --weights="$WEIGHTS" --extract_feature_blob_names="$BLOBS" \
        --save_feature_dataset_names="$DATABASES" --backend="$BACKEND" --hostfile="$HOSTFILE" \
        --workers="$NUM_APP_THREADS" --gpu="$GPU" --num_mini_batches="$NUM_MINI_BATCHES"
fi
exec "$python" -m poseidon extract_features "$@"
