"""The processes of a job: their environment, keys and specs (docs/security.md on the keys).

Law: a job with a process on another machine encrypts, whatever the flags. New keys are made here
for each start, and travel on standard input alone.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from poseidon.base.settings import inherited_environment
from poseidon.cluster.job_plan import JobPlan, ShardPlan, WorkerPlan
from poseidon.cluster.machinefile import Host, has_remote_hosts
from poseidon.cluster.process import ProcessSpec
from poseidon.cluster.python_command import module_arguments
from poseidon.cluster.supervision.restarts import StartingPoint
from poseidon.engine.document import WorkerDocument, WorkKind
from poseidon.launcher.request import Encrypt
from ps_server.json_fields import fields_of, plain
from ps_server.keys import JobKeys, Keyring
from ps_server.network import ShardDocument
from ps_server.process_environment import environment

PROCESS = "poseidon.engine"
"""The module that every worker runs."""
IMPORTS = {
    WorkKind.SOLVER: ("poseidon.caffe.solver.worker",),
    WorkKind.SCRIPT: ("poseidon.torch.script",),
    WorkKind.EXTRACTION: ("poseidon.caffe.tools.extractor",),
}
"""What the workers of a job import, besides what its shards do."""
SHARD_IMPORTS = ("ps_server.rounds", "ps_server.transport.zmq_sockets")
MERGE_AT_ONCE = "glibc.malloc.mxfast=0"
"""A tunable of glibc: small freed blocks are merged with free neighbours at once."""
PAST_CACHES = "glibc.cpu.x86_non_temporal_threshold=0x100000"
"""A tunable of glibc: copies of 1 MiB and more write past the caches.

By itself glibc takes the whole last cache for its own, however many share it, and reads every line
from memory that it then overwrites; so a chunk's copy takes about half the time.
"""


def child_environment(threads: int) -> dict[str, str]:
    """Return what a child needs beyond the environment of its agent.

    The malloc settings keep large freed blocks in the process: activations and gradients are
    allocated in each iteration, and giving them back to the system means touching fresh pages
    every time. They also merge small freed blocks with their neighbours at once: glibc would put
    that off until a thread frees or asks for something large, which a thread that works on small
    tensors alone never does, and its memory would grow with each of them. Large copies go past the
    caches.
    """
    inherited = inherited_environment()
    return {
        **environment(threads, inherited),
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**26),
        "GLIBC_TUNABLES": _tunables(inherited.get("GLIBC_TUNABLES", "")),
    }


def _tunables(inherited: str) -> str:
    """Join ours and the user's; the user's are last, so they win."""
    own = inherited.split(":") if inherited else []
    return ":".join(dict.fromkeys([MERGE_AT_ONCE, PAST_CACHES, *own]))


def is_encrypted(encrypt: Encrypt, hosts: Sequence[Host]) -> bool:
    """Return whether the job's own sockets are encrypted."""
    return encrypt is Encrypt.ON or has_remote_hosts(hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job: what differs from its other starts.

    Attributes:
        attempt: 0, 1, ...
        aside: whether its processes are prepared beside another start, and then wait.
        exchange_plan: of an earlier start or run, as `RecordedPlan.to_json`; empty: none.
        keys: of all connections; None: they are not encrypted.
    """

    attempt: int
    point: StartingPoint
    exchange_plan: str
    aside: bool = False
    token: bytes = field(repr=False)
    keys: JobKeys | None = field(repr=False)

    @classmethod
    def new(
        cls,
        attempt: int,
        point: StartingPoint,
        plan: JobPlan,
        encrypt: Encrypt,
        exchange_plan: str = "",
    ) -> Start:
        """Make a start with secrets of its own: a process that an earlier one left has no part
        in it.
        """
        encrypted = is_encrypted(encrypt, plan.hosts)
        keys = (
            JobKeys.new(workers=plan.worker_count, shards=plan.shard_count) if encrypted else None
        )
        return cls(
            attempt=attempt,
            point=point,
            exchange_plan=exchange_plan,
            token=secrets.token_hex(32).encode(),
            keys=keys,
        )

    def keyring(self, role: WorkerPlan | ShardPlan) -> Keyring | None:
        """Return the keys of one process; None: there are none."""
        if self.keys is None:
            return None
        if isinstance(role, ShardPlan):
            return self.keys.of_shard(role.index)
        return self.keys.of_worker(role.rank)


def worker_spec(
    role: WorkerPlan,
    document: WorkerDocument,
    *,
    own_stdout: bool = False,
    own_stdin: bool = False,
) -> ProcessSpec:
    """Return how to start a worker."""
    spec = _spec(
        role,
        (PROCESS, document.kind.value, "--job", document.job, "--rank", str(role.rank)),
        document.threads,
        document.to_json(),
        document.kind,
    )
    return replace(spec, slot=role.seat.local_rank, own_stdout=own_stdout, own_stdin=own_stdin)


def imports_of(kind: WorkKind) -> tuple[str, ...]:
    """Return the modules that the processes of a job import."""
    return (*IMPORTS[kind], *SHARD_IMPORTS)


def shard_spec(
    role: ShardPlan,
    start: Start,
    job: str,
    kind: WorkKind,
    *,
    workers: int,
    threads: int,
    trace: str,
) -> ProcessSpec:
    """Return how to start a server shard.

    Args:
        workers: of the job, which all connect to it.
        threads: of its environment, the same as the workers' of its host. It computes with one.
        trace: the file of its trace, on its host; empty: none.
    """
    document = ShardDocument(
        shard=role.index,
        workers=workers,
        address=role.address,
        token=start.token,
        keys=start.keyring(role),
        trace=trace,
    )
    spec = _spec(
        role,
        ("ps_server", "--job", job, "--stdin", "--shard", str(role.index)),
        threads,
        json.dumps(fields_of(document), default=plain).encode(),
        kind,
    )
    return replace(spec, slot=role.channel)


def _spec(
    role: WorkerPlan | ShardPlan,
    arguments: tuple[str, ...],
    threads: int,
    first_line: bytes,
    kind: WorkKind,
) -> ProcessSpec:
    return ProcessSpec(
        name=role.process,
        argv=(sys.executable, *module_arguments(*arguments)),
        environment=child_environment(threads),
        first_line=first_line,
        imports=imports_of(kind),
    )
