"""Whether the lines between a job's processes are encrypted, and the keys for it (docs/security.md).

Law: a job with a process on another machine encrypts, whatever the flags; what cannot be encrypted is refused unless its
own flag names it. Keys are made here, anew for each start, and travel on standard input alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from enum import Enum

from poseidon.cluster.machinefile import Host, has_remote_hosts
from poseidon.cluster.plan import JobPlan, ShardPlan, WorkerPlan
from poseidon.errors import UsageError
from poseidon.exchange.cost import ExchangeKind
from ps_server.keys import JobKeys


class Encrypt(Enum):
    """What --encrypt asks for."""

    AUTO = "auto"
    """Where a process is on another machine."""
    ON = "on"
    """Always: other users of this machine are kept out, too."""


def is_encrypted(flags: argparse.Namespace, clients: Sequence[Host]) -> bool:
    """Whether the job's own sockets are."""
    return flags.encrypt == Encrypt.ON.value or has_remote_hosts(clients)


def check_encryption(flags: argparse.Namespace, kind: ExchangeKind, clients: Sequence[Host]) -> None:
    """Refuse what would have to be encrypted and cannot be.

    Raises:
        UsageError: in one sentence, what and what to do.
    """
    if kind is ExchangeKind.ALLREDUCE and is_encrypted(flags, clients) and not flags.allreduce_in_clear:
        raise UsageError(
            "--exchange=allreduce cannot be encrypted: whoever reaches the machines' ports can read and change what "
            "it sends; take --exchange=hybrid, or say --allreduce_in_clear on a network that you trust"
        )


def new_keys(flags: argparse.Namespace, plan: JobPlan) -> JobKeys | None:
    """Keys for one start of a job; None where it needs none."""
    if not plan.shards or not is_encrypted(flags, plan.hosts):
        return None
    return JobKeys.new(workers=plan.working_hosts, shards=plan.shard_count)


def told_keys(keys: JobKeys | None, role: WorkerPlan | ShardPlan) -> str:
    """The keys that one process is told, as its document has them; of a machine's workers one speaks for all."""
    if keys is None:
        return ""
    if isinstance(role, ShardPlan):
        return keys.of_shard(role.index).to_json()
    return keys.of_worker(role.position).to_json() if role.local_rank == 0 else ""
