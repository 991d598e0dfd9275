"""The variables that torchrun sets, for scripts that are written for it, and for their libraries."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping

from poseidon.engine.document import ScriptDocument
from poseidon.errors import JobError

FIRST_PORT, LAST_PORT = 15_000, 32_767
"""Below the ports that kernels give to connections: one that is free now stays free until the
script listens there.
"""
TRIES = 1_000


def torchrun_variables(document: ScriptDocument, master: str) -> Mapping[str, str]:
    """Return the variables of torchrun for one worker.

    Args:
        document: of the worker.
        master: HOST:PORT on the host of worker 0, where nothing listens.
    """
    address, _, port = master.rpartition(":")
    place = document.member.host_place
    values: dict[str, object] = {
        "RANK": document.rank,
        "WORLD_SIZE": document.workers,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_workers,
        "GROUP_RANK": place.host,
        "GROUP_WORLD_SIZE": place.host_count,
        "ROLE_NAME": "default",
        "ROLE_RANK": document.rank,
        "ROLE_WORLD_SIZE": document.workers,
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": document.restarts,
        "TORCHELASTIC_MAX_RESTARTS": document.max_restarts,
        "TORCHELASTIC_RUN_ID": document.job,
        # torchrun's own process listens at the address; here a script does, in worker 0
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    if document.device == "cpu":
        # without it accelerate and transformers train alone where there is no GPU
        values["ACCELERATE_USE_CPU"] = "true"
    return {name: str(value) for name, value in values.items()}


def free_address(host: str) -> str:
    """Return HOST:PORT with a port of this host that nothing uses.

    Args:
        host: the address at which others reach it; an IPv6 address in brackets.

    Raises:
        JobError: there is no such port.
    """
    ports = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 1), TRIES)
    for port in ports:
        if _is_free(port):
            return f"{host}:{port}"
    raise JobError(f"{host} has no free port from {FIRST_PORT} to {LAST_PORT} for MASTER_PORT")


def _is_free(port: int) -> bool:
    """Return whether a script can listen at a port, as torch's TCPStore does: on all addresses."""
    for family, every in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((every, port))
            except OSError:
                return False
    return True
