"""The flags that every job has, whatever it trains, and what is read from them alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon.cluster.supervision.restarts import RestartSettings
from poseidon.cluster.supervision.settings import SignalEffect, SupervisionSettings
from poseidon.engine.tools.preflight import obstacle_to
from poseidon.errors import JobError, UsageError
from poseidon.launch.site import read_clients
from poseidon.launch.ssh_site import site_of

START_TIMEOUT_S = 180.0


def restart_settings(flags: argparse.Namespace, *, usual: int) -> RestartSettings:
    """How often a job starts again, and how long it waits for hosts.

    Args:
        flags: those of the command.
        usual: the number of new starts where --max_restarts says none.

    Raises:
        UsageError: a time below 0.
    """
    if not flags.return_timeout >= 0:
        raise UsageError(f"--return_timeout={flags.return_timeout:g}: expected 0 seconds or more")
    most = usual if flags.max_restarts is None else flags.max_restarts
    return RestartSettings(most=most, return_timeout_s=flags.return_timeout)


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
