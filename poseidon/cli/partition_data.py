"""`poseidon partition_data`: divide a database or a list among clients that share no file system, and bring it to them.

poseidon partition_data --hostfile=machinefiles/cluster --distribute examples/cifar10/cifar10_train_lmdb
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from poseidon.cli.distribution import distribute
from poseidon.cli.progress import progress_bar
from poseidon.cluster.machinefile import Client, read_machinefile
from poseidon.cluster.ssh_config import SshSettings
from poseidon.data.database import Backend, require_kind
from poseidon.data.part_files import is_divided
from poseidon.data.progress import Report
from poseidon.data.split import partition_data
from poseidon.errors import UsageError

DEFAULT_PARTS = 2


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "partition_data",
        help="divide a database or a list into <DB_PATH>_0, <DB_PATH>_1, ... for clients without a shared file system",
        description=(
            "Record i of DB_PATH (of a database in key order, of a list of pictures its line i, of HDF5 files row i of all) "
            "goes to <DB_PATH>_(i mod n). Client k of a job whose data layer says shared_file_system: false reads "
            "<DB_PATH>_k. With --distribute each part is copied to its client. Nothing is overwritten without --replace."
        ),
    )

    def flag(name: str, **settings: object) -> None:
        parser.add_argument(f"--{name}", f"-{name}", **settings)  # type: ignore[arg-type]

    flag(
        "backend",
        type=str.lower,
        choices=[backend.suffix for backend in Backend],
        help="kind of the database (default: what the folder holds)",
    )
    flag(
        "num_partitions",
        type=int,
        metavar="N",
        help="number of parts, one for each client that works (default: those of --hostfile, else 2)",
    )
    flag("hostfile", metavar="FILE", help="the machinefile: one part for each of its clients that works")
    flag(
        "distribute",
        action="store_true",
        help="copy part k to the k-th of them over SFTP, checksummed; the same command goes on from where it broke off",
    )
    flag("root_folder", metavar="DIR", default="", help="of a list of pictures: what stands before each path")
    flag("replace", action="store_true", help="let earlier parts, here and there, make way for the new ones")
    flag("ssh_config", metavar="FILE", help="read this instead of ~/.ssh/config, as ssh -F does")
    parser.add_argument("db_path", metavar="DB_PATH", type=Path, help="folder of the database, or list file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Divide, and distribute if asked to; 0 when all parts are in place."""
    # A trailing slash would end up inside the names of the parts.
    source = Path(str(arguments.db_path).rstrip("/") or "/")
    if arguments.backend is not None:
        require_kind(source, Backend.parse(arguments.backend))
    clients = read_machinefile(Path(arguments.hostfile)) if arguments.hostfile else ()
    parts = _parts(arguments, clients)
    with progress_bar() as report:
        _divide(source, parts, arguments, report)
        if arguments.distribute:
            root, replace = arguments.root_folder, arguments.replace
            ssh = SshSettings(config=Path(arguments.ssh_config) if arguments.ssh_config else None)
            said = distribute(source, clients, root=root, replace=replace, report=report, ssh=ssh)
    if arguments.distribute:
        print("\n".join(said))
    print(f"Done: {source}_0 to {source}_{parts - 1}.")
    return 0


def _divide(source: Path, parts: int, arguments: argparse.Namespace, report: Report) -> None:
    if arguments.distribute and not arguments.replace and is_divided(source, parts):
        print(f"{source} is divided already.")
        return
    count = partition_data(source, parts, replace=arguments.replace, report=report)
    print(f"Processed {count} files.")


def _parts(arguments: argparse.Namespace, clients: Sequence[Client]) -> int:
    """How many parts there are to be.

    Raises:
        UsageError: flags contradict each other.
    """
    asked: int | None = arguments.num_partitions
    if not clients:
        if arguments.distribute:
            raise UsageError("--distribute needs --hostfile, which says where to")
        return DEFAULT_PARTS if asked is None else asked
    working = sum(client.works for client in clients)
    if asked not in (None, working):
        raise UsageError(
            f"--num_partitions={asked}, but {arguments.hostfile} has {working} clients that work; expected as many"
        )
    return working
