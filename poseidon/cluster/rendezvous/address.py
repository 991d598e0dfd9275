"""Under which address this machine and rank 0's reach each other.

Law: nothing is sent; the kernel's tables and the names' own server answer.
"""

from __future__ import annotations

import socket
import time

from poseidon.cluster.machinefile import is_loopback
from poseidon.cluster.name_lookup import look_up
from poseidon.errors import JobError

ANY_PORT = 9  # of a UDP socket that never sends
PAUSE_S = 1.0
LEAST_S = 0.5
"""However little time is left, the names' server gets this long."""
# Packets to here take the default route; the address is for documentation only (RFC 5737).
FAR_AWAY = "192.0.2.1"


def address_of(name: str, timeout_s: float) -> str:
    """The address that a name stands for; asked again until it does, for a pod's name comes with the pod.

    Raises:
        JobError: the name is not known in time.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return str(look_up(name, 0, max(LEAST_S, until_s - time.monotonic()))[0][1][0])
        except OSError as error:
            if time.monotonic() > until_s:
                raise JobError(
                    f"the host of rank 0, MASTER_ADDR={name}, is not known: {error.strerror or error}"
                ) from error
            time.sleep(PAUSE_S)


def own_address_towards(address: str) -> str:
    """This machine's address on the way to another.

    Raises:
        JobError: there is no way.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
        except OSError as error:
            raise JobError(f"there is no way to rank 0 at {address}: {error.strerror}") from error
        return str(probe.getsockname()[0])


def address_for_all(name: str, address: str) -> str:
    """The address that every task takes for rank 0's, which listens there.

    Args:
        name: MASTER_ADDR.
        address: what it stands for here; on many systems their own name stands for a loopback address, which is of
            no use to tasks on other hosts.
    """
    if not is_loopback(address) or is_loopback(name):
        return address
    try:
        return own_address_towards(FAR_AWAY)
    except JobError:
        return address  # a machine without a network is alone
