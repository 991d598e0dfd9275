#!/usr/bin/env python3
"""Train cifar10_quick with the system parameters below: edit them, then

    python examples/cifar10/train_cifar10.py
    python examples/cifar10/run_local.py [client_id] [machinefile] [flags of `poseidon train`]

Both use these parameters. The first also makes the databases; the second expects them
(get_cifar10.sh, create_cifar10.sh). One command starts all clients; client_id is taken as the
original's script has it, and only 0 starts anything. Paths are absolute or relative to the
repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout works without being installed

from poseidon.cli.entry import use_environment

use_environment()

from poseidon.cli.main import main as poseidon
from poseidon.cli.main import parse_arguments

# The solver definition.
solver = ROOT / "prototxt" / "cifar10" / "cifar10_quick_solver.prototxt"
# GPUs of each client, one worker each: [0, 1]; empty for the CPU.
device = []
# Workers of each client on the CPU.
num_app_threads = 1
# The bound of staleness; 0 gives the same weights as one process with all workers' batches.
table_staleness = 0
# Pieces that each table is cut into; 0: pieces of 256 KiB to 2 MiB, by the size of the model.
num_rows_per_table = 0
# True: fully-connected layers as sufficient factors; False: all through the server; "auto": the
# cheaper of both.
svb = "auto"
# Server shards on each client.
num_comm_channels_per_client = 1
# SSPPush (shards send values unasked) or SSP (workers ask for values).
consistency_model = "SSPPush"
# Losses and scores, averaged over all workers.
net_outputs = ROOT / "output" / "cifar10" / "cifar-netoutputs"

# The machines, unless a command names another file.
HOSTFILE = ROOT / "machinefiles" / "localserver"


def train_flags(words: list[str]) -> dict[str, str]:
    """Return the parameters above as flags of `poseidon train`: values by name.

    Those that say what it does anyway are left out, so that the job's last lines are short.

    Args:
        words: flags that follow; --exchange replaces svb.
    """
    flags = {
        "solver": str(ROOT / solver),
        "gpu": str(device or ""),
        "num_app_threads": str(num_app_threads),
        "table_staleness": str(table_staleness),
        "num_rows_per_table": str(num_rows_per_table),
        "svb": str(svb),
        "num_comm_channels_per_client": str(num_comm_channels_per_client),
        "consistency_model": consistency_model,
        "net_outputs": str(ROOT / net_outputs),
    }
    if svb == "auto" or any(word.lstrip("-").startswith("exchange") for word in words):
        del flags["svb"]
    usual = parse_arguments(["train", "--solver=none"])
    changed = {}
    for name, value in flags.items():
        given = parse_arguments(["train", "--solver=none", f"--{name}={value}"])
        given.argv = usual.argv
        if given != usual:
            changed[name] = value
    return changed


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
    if words and words[0].lower() in ("true", "false"):  # the original's third word, for Hadoop
        words.pop(0)
    flags = {**train_flags(words), "hostfile": hostfile}
    return poseidon(["train", *(f"--{name}={value}" for name, value in flags.items()), *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
