#!/bin/sh
# The script on two workers, with a worker lost and without: the final weights are the same bits.
set -e
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
test -x "$root/.venv/bin/poseidon" && PATH="$root/.venv/bin:$PATH"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run() {
    name=$1
    shift
    poseidon run --hostfile="$root/machinefiles/localserver" --output="$logs/$name" "$@"
    grep -o 'weights [0-9a-f]*' "$logs/$name/worker_0.log" > "$logs/$name.digest"
}
run lost --max_restarts=1 "$here/train.py" --lose_at=45
run whole "$here/train.py"
cmp "$logs/lost.digest" "$logs/whole.digest"
echo "the same bits: $(cat "$logs/whole.digest")"
