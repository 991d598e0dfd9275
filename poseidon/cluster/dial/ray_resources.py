"""What each client asks of Ray's nodes.

Law: pure. A client has a node of its own; a resource is a number, as in `ray start --resources`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from poseidon.errors import UsageError, counted

ANY = "any"
"""The address, in a machinefile, of a client that any node may have."""
NODE_SHARE = 0.001
"""Part of the resource `node:<address>`, which Ray gives each node, that a client takes of its
node.
"""
SMALLEST = 0.0001
"""The smallest amount of a resource that Ray counts."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}", re.ASCII)
_HIDDEN = re.compile(r"(object_store_)?memory$|node:|.*_group_(\d+_)?[0-9a-f]{20,}$")

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        id: Ray's.
        address: its IP address.
        name: of its host.
        resources: all that it has, in use or not.
    """

    id: str
    address: str
    name: str
    resources: Resources


def parse_resources(text: str, flag: str) -> dict[str, float]:
    """Parse `CPU=4+trainer=1`.

    Args:
        text: the flag's value; empty: none.
        flag: its name, for the error.

    Raises:
        UsageError: not names with numbers of at least 0, amounts that Ray does not take, or a name
            twice.
    """
    found: dict[str, float] = {}
    for part in filter(None, text.split("+")):
        name, _, amount = (piece.strip() for piece in part.partition("="))
        try:
            number = float(amount)
        except ValueError:
            number = math.nan
        if not _NAME.fullmatch(name) or not 0 <= number < math.inf:
            raise UsageError(
                f"{flag}: expected NAME=NUMBER with + between, as in CPU=4+trainer=1, found '{part}'"
            )
        if name in found:
            raise UsageError(f"{flag}: '{name}' is given twice")
        if 0 < number < SMALLEST or (name == "GPU" and number > 1 and number != int(number)):
            raise UsageError(
                f"{flag}: Ray has no such amount as '{part}'; expected at least {SMALLEST}, and "
                "whole GPUs above 1"
            )
        found[name] = number
    return found


def format_resources(resources: Resources) -> str:
    """Return `CPU=2, GPU=1`, as a user writes them."""
    return (
        ", ".join(f"{name}={amount:g}" for name, amount in sorted(resources.items())) or "nothing"
    )


def pinned(resources: Resources, address: str, nodes: Iterable[RayNode]) -> dict[str, float]:
    """Return a client's resources on the node that its line names.

    Args:
        resources: of the client.
        address: of the line; `any`: any node.
        nodes: of the cluster.

    Raises:
        UsageError: no node has this address.
    """
    if address == ANY:
        return dict(resources)
    known = list(nodes)
    for node in known:
        if address in (node.address, node.name):
            return {**resources, f"node:{node.address}": NODE_SHARE}
    names = ", ".join(sorted({node.address for node in known})) or "none"
    raise UsageError(
        f"no node of the Ray cluster is {address}; its nodes are {names}; '{ANY}' takes any of them"
    )


def describe_lack(bundles: Sequence[Resources], nodes: Sequence[RayNode], free: Resources) -> str:
    """Return what a job needs of a cluster and what that has, for one that does not fit.

    Args:
        bundles: of the clients.
        nodes: of the cluster.
        free: what no one uses, of all nodes together.
    """
    wanted = " and ".join(
        f"{sum(other == bundle for other in bundles)} with {format_resources(bundle)}"
        for number, bundle in enumerate(bundles)
        if bundle not in bundles[:number]
    )
    need = (
        "1 client needs a node" if len(bundles) == 1 else f"{len(bundles)} clients need a node each"
    )
    have = "; ".join(
        f"{node.address} has {format_resources(_plain(node.resources))}" for node in nodes
    )
    return (
        f"{need}: {wanted}; the Ray cluster has {counted(len(nodes), 'node')} "
        f"({have}), and free of all that is {format_resources(_plain(free))}"
    )


def _plain(resources: Resources) -> dict[str, float]:
    """Return the resources that a user asks for: not memory, nor the marks of single nodes and
    of placement groups.
    """
    return {name: amount for name, amount in resources.items() if not _HIDDEN.match(name)}
