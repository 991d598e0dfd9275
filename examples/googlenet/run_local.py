#!/usr/bin/env python3
"""Train GoogLeNet on the GPUs of two clients, with the system parameters below: edit them, then

    python examples/googlenet/run_local.py [client_id] [machinefile] [flags of `poseidon train`]

The databases are ImageNet's (prototxt/googlenet/README.md); train_googlenet.py tries the job on
drawn pictures. One command starts all clients. Paths are absolute or relative to the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.cli.main import main as poseidon

# The solver definition.
solver = "prototxt/googlenet/solver.prototxt"
# GPUs of each client, one worker each; empty for the CPU.
device = [0, 1]
# Workers of each client on the CPU.
num_app_threads = 2
# The bound of staleness; 0 gives the same weights as one process with all workers' batches.
table_staleness = 0
# auto: per layer the fastest of ps, svb and allreduce; or one of them, or hybrid.
exchange = "auto"
# Losses and scores, averaged over all workers.
net_outputs = "output/googlenet/googlenet-netoutputs"

# The machines: two clients. Replace their addresses by those of yours.
HOSTFILE = ROOT / "machinefiles" / "localserver"


def train_flags() -> list[str]:
    """Return the parameters above as flags of `poseidon train`."""
    on_cpu = ["--solver_mode=CPU", f"--workers={num_app_threads}"]
    return [
        f"--solver={ROOT / solver}",
        *([f"--gpu={','.join(map(str, device))}"] if device else on_cpu),
        f"--staleness={table_staleness}",
        f"--exchange={exchange}",
        f"--net_outputs={ROOT / net_outputs}",
    ]


def main(words: list[str]) -> int:
    """Train; returns the exit code.

    Args:
        words: `[client_id] [machinefile] [flags of poseidon train]`.
    """
    client = int(words.pop(0)) if words and words[0].isdecimal() else 0
    if client:
        print(f"run_local.py: client {client} is started by the command of client 0; nothing to do")
        return 0
    hostfile = words.pop(0) if words and not words[0].startswith("-") else HOSTFILE
    return poseidon(["train", *train_flags(), f"--hostfile={hostfile}", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
