#!/usr/bin/env python3
"""Train cifar10_quick with the system parameters below: edit them, then

    python examples/cifar10/run_local.py [machinefile]

The databases must be there (get_cifar10.sh, create_cifar10.sh). Paths are absolute or relative to the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.checkout import use_environment

use_environment()

from poseidon.cli.main import main

# The solver definition.
solver = ROOT / "prototxt" / "cifar10" / "cifar10_quick_solver.prototxt"
# GPUs of each client, one worker each: "0,1"; empty for the CPU.
devices = ""
# The bound of staleness; 0 gives the same weights as one process with all workers' batches.
table_staleness = 0
# Pieces that each table is cut into; 0: pieces of 2 MiB.
num_rows_per_table = 0
# Server shards on each client.
num_comm_channels_per_client = 1
# SSPPush (values come unasked) or SSP (values are asked for).
consistency_model = "SSPPush"
# Losses and scores, averaged over all workers, go to <prefix>.netoutputs.
net_outputs = ROOT / "output" / "cifar10" / "cifar"

if __name__ == "__main__":
    hostfile = sys.argv[1] if len(sys.argv) > 1 else ROOT / "machinefiles" / "localserver"
    sys.exit(
        main(
            [
                "train",
                f"--solver={solver}",
                f"--hostfile={hostfile}",
                f"--gpu={devices}",
                f"--table_staleness={table_staleness}",
                f"--num_rows_per_table={num_rows_per_table}",
                f"--num_comm_channels_per_client={num_comm_channels_per_client}",
                f"--consistency_model={consistency_model}",
                f"--net_outputs={net_outputs}",
            ]
        )
    )
