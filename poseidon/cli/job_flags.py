"""The flags that every job has, whatever it trains, and what is read from them alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from poseidon.cli.encryption import add_encryption_flags
from poseidon.cli.exchange_flags import add_exchange_flags
from poseidon.cli.launching import read_clients
from poseidon.cli.ssh_site import add_ssh_flags, site_of
from poseidon.cli.terminal import Shown
from poseidon.cluster.restarts import RETURN_TIMEOUT_S, RestartSettings
from poseidon.cluster.settings import SignalEffect, SupervisionSettings
from poseidon.engine.preflight import obstacle_to
from poseidon.errors import JobError, UsageError

START_TIMEOUT_S = 180.0


def add_job_flags(flag: Callable[..., None]) -> None:
    """Add the flags of every job.

    Args:
        flag: adds one flag, by its name without dashes and the settings of `add_argument`.
    """
    flag(
        "hostfile",
        metavar="FILE",
        help="the machinefile: <id> <host> <port> a line; default: this machine alone",
    )
    flag(
        "gpu",
        metavar="IDS",
        default="",
        help="GPUs of each client, one worker each: 0,1 or all; default: CPU",
    )
    flag("num_app_threads", type=int, default=1, metavar="T", help="workers of each client on CPU (1)")
    flag("table_staleness", type=count, default=0, metavar="S", help="bound of staleness; 0 (default): none")
    flag(
        "num_rows_per_table",
        type=count,
        default=0,
        metavar="N",
        help="pieces of each table; default: 256 KiB to 2 MiB each",
    )
    flag(
        "num_comm_channels_per_client", type=int, default=1, metavar="C", help="server shards per client (1)"
    )
    add_ssh_flags(flag)
    add_exchange_flags(flag)
    add_encryption_flags(flag)
    effects = [effect.value for effect in SignalEffect]
    flag("sigint_effect", default="stop", choices=effects, help="what Ctrl-C does (stop)")
    flag("sighup_effect", default="snapshot", choices=effects, help="what a hang-up does (snapshot)")
    flag("output", metavar="DIR", help="folder of logs and net outputs; default: output/<job>")
    flag(
        "show_logs",
        default=Shown.FIRST.value,
        choices=[shown.value for shown in Shown],
        help="worker 0's log and everyone's warnings (first), or everyone's, each line after its client (all)",
    )
    flag("threads", type=int, metavar="N", help="CPU threads per worker; default: the machine's, shared out")
    flag(
        "stall_timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="a process that is silent or does nothing for this long has failed (120)",
    )
    flag(
        "term_deadline",
        type=float,
        default=25.0,
        metavar="S",
        help="seconds from SIGTERM to the end of the job, its last snapshot included (25)",
    )
    flag(
        "max_restarts",
        type=count,
        metavar="N",
        help="new starts when a process, a host or the network fails (3 on several hosts, else 0)",
    )
    flag(
        "return_timeout",
        type=float,
        default=RETURN_TIMEOUT_S,
        metavar="S",
        help="how long a new start waits for hosts that are missing; after that it goes on without them where all data "
        f"is shared, else the job ends ({RETURN_TIMEOUT_S:g})",
    )
    flag("background", action="store_true", help="return once the job runs")
    flag("job", metavar="ID", help=argparse.SUPPRESS)


def restart_settings(flags: argparse.Namespace, *, usual: int) -> RestartSettings:
    """How often a job starts again, and how long it waits for hosts.

    Args:
        flags: those of `add_job_flags`.
        usual: the number of new starts where --max_restarts says none.

    Raises:
        UsageError: a time below 0.
    """
    if not flags.return_timeout >= 0:
        raise UsageError(f"--return_timeout={flags.return_timeout:g}: expected 0 seconds or more")
    most = usual if flags.max_restarts is None else flags.max_restarts
    return RestartSettings(most=most, return_timeout_s=flags.return_timeout)


def count(text: str) -> int:
    """A whole number, 0 or more, of a flag."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, 0 or more")
    return int(text)


def leaves_this_machine(flags: argparse.Namespace) -> bool:
    """Whether the job's processes are started elsewhere than as children of the launcher.

    Raises:
        MachinefileError: a line is wrong.
        UsageError: the machines cannot be started as the flags say.
    """
    if getattr(flags, "site", None) is not None:
        return True
    clients = read_clients(flags.hostfile, flags.num_comm_channels_per_client)
    return site_of(flags, clients) is not None


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be written to.

    Raises:
        JobError: names the flag, the folder and what is in the way.
    """
    obstacle = obstacle_to(folder)
    if obstacle:
        raise JobError(f"--{flag}: nothing can be written to {folder}: {obstacle}")


def patience(flags: argparse.Namespace) -> SupervisionSettings:
    """How long a job waits for what, and what signals do to it.

    Raises:
        UsageError: a flag's time is not above 0.
    """
    if not flags.stall_timeout > 0:
        raise UsageError(f"--stall_timeout={flags.stall_timeout:g}: expected more than 0 seconds")
    if not flags.term_deadline > 0:
        raise UsageError(f"--term_deadline={flags.term_deadline:g}: expected more than 0 seconds")
    return SupervisionSettings(
        term_deadline_s=flags.term_deadline,
        start_timeout_s=START_TIMEOUT_S,
        stall_timeout_s=flags.stall_timeout,
        sigint_effect=SignalEffect(flags.sigint_effect),
        sighup_effect=SignalEffect(flags.sighup_effect),
    )
