"""A Slurm cluster of one node, this host: its controller, daemon and munge, with keys, ports and
files of the test.

Law: nothing of the machine's own Slurm is read or changed, and nothing is left when the block ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.free_ports import free_ports
from tests.support.polling import until

START_S = 60.0
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def small_slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start it. Yield the variables with which `srun` finds it.

    Args:
        folder: a short path: munge's socket lies there.
    """
    configuration = _furnish(folder)
    variables = {"SLURM_CONF": str(configuration)}
    with ExitStack() as stack:
        munge = [
            f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")
        ]
        keys = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"]
        _start(stack, folder, ["munged", "--foreground", "--force", *keys, *munge])
        until((folder / "munge.sock").exists, "munged made no socket", START_S)
        _start(stack, folder, ["slurmctld", "-D", "-f", str(configuration)])
        _start(stack, folder, ["slurmd", "-D", "-f", str(configuration)])
        until(
            lambda: _said(variables, "sinfo", "-h", "-o", "%t") == "idle",
            "the node is not idle",
            START_S,
        )
        stack.callback(_cancel_all, variables)
        yield variables


def _furnish(folder: Path) -> Path:
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    (folder / "plugstack.conf").touch()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    controller_port, daemon_port = free_ports(2)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            cores=os.cpu_count() or 1,
            controller_port=controller_port,
            daemon_port=daemon_port,
        )
    )
    return configuration


def _start(stack: ExitStack, folder: Path, words: Sequence[str]) -> None:
    environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin"}
    with (folder / f"{words[0]}.out").open("wb") as log:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


def _said(variables: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        words,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip()


def _cancel_all(variables: Mapping[str, str]) -> None:
    _said(variables, "scancel", "--partition=all")
    until(
        lambda: not _said(variables, "squeue", "-h"),
        "a job of the test's Slurm does not end",
        START_S,
    )
