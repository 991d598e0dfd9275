"""`poseidon partition_data`: divide a database or a list among clients that share no file
system, and send it to them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from poseidon.caffe.data.databases.kinds import Backend, require_kind
from poseidon.caffe.data.prepare.split import is_divided, partition_data
from poseidon.caffe.data.progress_reports import Report
from poseidon.caffe.launch.data_distribution import distribute
from poseidon.cli.progress_bar import progress_bar
from poseidon.cluster.machinefile import Host, read_machinefile
from poseidon.cluster.ssh.settings import SshSettings
from poseidon.errors import UsageError

DEFAULT_PARTS = 2


def run(arguments: argparse.Namespace) -> int:
    """Divide, and distribute if asked to; 0 when all parts are in place."""
    # A trailing slash would end up inside the names of the parts.
    source = Path(str(arguments.db_path).rstrip("/") or "/")
    if arguments.backend is not None:
        require_kind(source, Backend.parse(arguments.backend), by_flag=True)
    clients = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    parts = _parts(arguments, clients)
    with progress_bar(arguments.progress) as report:
        _divide(source, parts, arguments, report)
        if arguments.distribute:
            root, replace = arguments.root_folder, arguments.replace
            ssh = SshSettings.from_flag(arguments.ssh_config)
            sentences = distribute(
                source, clients, root=root, replace=replace, report=report, ssh=ssh
            )
    if arguments.distribute:
        print("\n".join(sentences))
    print(f"Done: {source}_0 to {source}_{parts - 1}.")
    return 0


def _divide(source: Path, parts: int, arguments: argparse.Namespace, report: Report) -> None:
    if arguments.distribute and not arguments.replace and is_divided(source, parts):
        print(f"{source} is divided already.")
        return
    count = partition_data(source, parts, replace=arguments.replace, report=report)
    print(f"{source} has {count} records.")


def _parts(arguments: argparse.Namespace, clients: Sequence[Host]) -> int:
    asked: int | None = arguments.num_partitions
    if not clients:
        if arguments.distribute:
            raise UsageError("--distribute needs --hostfile, which says where to")
        return DEFAULT_PARTS if asked is None else asked
    working = sum(client.works for client in clients)
    if asked not in (None, working):
        raise UsageError(
            f"--num_partitions={asked}, but {arguments.hostfile} has {working} clients that work; "
            "expected as many"
        )
    return working
