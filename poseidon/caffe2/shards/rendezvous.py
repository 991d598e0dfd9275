"""The rendezvous of a run's shards: each publishes its address, and learns the others'.

    store = FolderStore("/mnt/shared", prefix="run_17")
    address = published_address(None)
    members = join(store, run="run_17", shard=1, shards=3, address=address)

Every failure is one sentence within a time limit: a run id that was used before, two shards with
one number, a shard that does not come, shards that expect different numbers of shards, and a host
that publishes a loopback address.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import psutil

from poseidon.caffe2.shards.stores import KeyTaken, Store, StoreTimeout
from poseidon.errors import JobError, UsageError
from ps_server.json_fields import fields_of, value_of

TIMEOUT_S = 60.0
"""Longest time that a shard waits for the others."""
NOTICE_S = 15.0
"""How often a shard that waits says for whom."""
COMPLETE = "complete"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One shard of a run, as it publishes itself.

    Attributes:
        shard: its number, 0..shards-1.
        shards: how many it expects.
        host: the name of its host.
        network: what shares its loopback interface; see `network_id`.
        address: where the others reach it.
        networks: the network interfaces of its host, for messages.
        process: its process number.
        started_s: when it came, in seconds since 1970 by its own clock.
        payload: what it wants the others to know.
    """

    shard: int
    shards: int
    host: str
    network: str
    address: str
    networks: str
    process: int
    started_s: float
    payload: str = ""

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_s))
        return f"process {self.process} on {self.host}, at {when}"

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(fields_of(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Member:
        """Invert `to_bytes`.

        Raises:
            JobError: the data does not come from a shard.
        """
        try:
            member = value_of(cls, json.loads(data))
            is_loopback(member.address)  # raises a ValueError if it is not an address
            if _key(member.shard) != key or not str(member):
                raise ValueError
            return member
        except (ValueError, RecursionError, OverflowError, OSError) as error:
            raise JobError(
                f"key '{key}' of the rendezvous was not written by a shard of Poseidon"
            ) from error


def join(
    store: Store,
    *,
    run: str,
    shard: int,
    shards: int,
    address: str,
    payload: str = "",
    timeout_s: float = TIMEOUT_S,
) -> list[Member]:
    """Publish this shard, and wait for all others.

    Args:
        store: the same for all shards, with a prefix of its own for each run.
        run: the run id, for messages.
        shard: this shard's number, 0..shards-1.
        shards: number of shards, the same on all.
        address: where the others reach this one (`published_address`).
        payload: what the others are to know of this one.
        timeout_s: longest time to wait.

    Returns:
        All shards, by number.

    Raises:
        UsageError: the number of this shard is out of range.
        JobError: the run id is used, two shards have one number, or a shard cannot be reached.
    """
    if not 0 <= shard < shards:
        raise UsageError(f"--shard_id={shard}: expected 0 to {shards - 1} (--num_shards)")
    own = Member(
        shard=shard,
        shards=shards,
        host=socket.gethostname(),
        network=network_id(),
        address=address,
        networks=", ".join(f"{name} ({own})" for name, own in outside_interfaces().items()),
        process=os.getpid(),
        started_s=time.time(),
        payload=payload,
    )
    try:
        store.set(_key(shard), own.to_bytes())
    except KeyTaken as taken:
        raise JobError(_taken(store, run, own, taken)) from taken
    members = _await_all(store, run, own, timeout_s)
    _check_addresses(members)
    if shard == 0:
        store.set(COMPLETE, b"1")
    return members


def _key(shard: int) -> str:
    return f"shard_{shard}"


def _taken(store: Store, run: str, own: Member, taken: KeyTaken) -> str:
    first = f"{Member.from_bytes(taken.value, taken.key)}" if taken.value else "an unknown process"
    if store.find(COMPLETE) is not None:
        return f"run id '{run}' was used before: shard {own.shard} was {first}; give each start a new --run_id"
    return (
        f"shard {own.shard} of run '{run}' has come already ({first}): two shards have "
        f"--shard_id={own.shard}, or an "
        "earlier start failed; give each shard a number of its own, and each start a new --run_id"
    )


def _await_all(store: Store, run: str, own: Member, timeout_s: float) -> list[Member]:
    keys = [_key(shard) for shard in range(own.shards)]
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(keys, max(min(left, NOTICE_S), 1e-3))
            break
        except StoreTimeout as error:
            there, missing = _there_and_missing(store, own)
            if left <= NOTICE_S:
                raise JobError(
                    f"{missing} of run '{run}' did not come within {timeout_s:g} s (there: "
                    f"{there}); check that each was "
                    "started with this --run_id, and shares the folder or the Redis server"
                ) from error
            log.warning("waiting for %s of run '%s' (there: %s)", missing, run, there)
    members = [Member.from_bytes(store.get(key), key) for key in keys]
    for member in members:
        if member.shards != own.shards:
            raise JobError(
                f"shard {member.shard} on {member.host} has --num_shards={member.shards}, and "
                f"shard {own.shard} on {own.host} has {own.shards}; expected the same on all shards"
            )
    return members


def _there_and_missing(store: Store, own: Member) -> tuple[str, str]:
    there, missing = [], []
    for shard in range(own.shards):
        found = store.find(_key(shard))
        if found is None:
            missing.append(str(shard))
        else:
            there.append(f"{shard} on {Member.from_bytes(found, _key(shard)).host}")
    return ", ".join(there), f"shard{'' if len(missing) == 1 else 's'} {', '.join(missing)}"


def _check_addresses(members: list[Member]) -> None:
    if len({member.network for member in members}) == 1:
        return
    for member in members:
        if is_loopback(member.address):
            raise JobError(
                f"shard {member.shard} on {member.host} publishes {member.address}, since the name "
                f"{member.host} resolves to a loopback address there, which other hosts cannot "
                "reach; start it with --distributed_interfaces set to one of its networks: "
                f"{member.networks or 'it has none'}"
            )


def is_loopback(address: str) -> bool:
    """Return whether an address, numeric, is a loopback one."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@cache
def network_id() -> str:
    """Return what the processes of this loopback interface, and no others, have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return f"{stream.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def interfaces() -> Mapping[str, str]:
    """Return the address of each network interface that is up: IPv4, else IPv6."""
    found: dict[str, str] = {}
    up = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in up and not up[name].isup:
            continue
        for family in (socket.AF_INET, socket.AF_INET6):
            own = [
                a.address
                for a in addresses
                if a.family == family and not a.address.startswith("fe80:")
            ]
            if own and name not in found:
                found[name] = own[0]
    return found


def outside_interfaces() -> Mapping[str, str]:
    """Return the `interfaces` that are not loopback."""
    return {name: address for name, address in interfaces().items() if not is_loopback(address)}


def published_address(choice: str | None) -> str:
    """Return the address under which the other shards reach this host.

    Args:
        choice: a network interface, an address or a host name; None: what this host's own name
            resolves to, or, where that is a loopback address, the address of the only other
            interface. With several, it is the loopback address, which serves a run on one host;
            `join` refuses it in others.

    Raises:
        UsageError: the choice is not one of these.
    """
    if choice is not None:
        return _chosen(choice)
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
    except OSError:
        address = "127.0.0.1"
    outside = outside_interfaces()
    return next(iter(outside.values())) if is_loopback(address) and len(outside) == 1 else address


def check_own(address: str) -> None:
    """Raise UsageError when a numeric address does not belong to this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        known = ", ".join(f"{name} ({own})" for name, own in interfaces().items())
        raise UsageError(
            f"this host, {socket.gethostname()}, would publish {address}, which is not one of its "
            f"addresses; set --distributed_interfaces to one of its networks: {known}"
        ) from error


def _chosen(choice: str) -> str:
    own = interfaces()
    if choice in own:
        return own[choice]
    try:
        return str(socket.getaddrinfo(choice, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        known = ", ".join(f"{name} ({address})" for name, address in own.items())
        raise UsageError(
            f"--distributed_interfaces={choice} is neither a network interface of this host "
            f"({known}) nor an address"
        ) from error
