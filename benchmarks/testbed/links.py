"""The commands that make, shape and count the links of hosts: thin calls of `ip` and `tc`.

Law: the only module that changes the machine's network. Every call has a time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.testbed.errors import TestbedError

LIMIT_S = 30.0
SYSTEM = Path("/sys/class/net")
INTERFACE = "eth0"
"""Name of every host's link."""
SECOND = "eth1"
"""Name of the link to a second network."""
MTU_BYTES = 9000
"""Jumbo frames: with 1500 the headers alone take 4.4 % of the rate."""
BURST_BYTES = 80_000
"""More than the largest packet of TCP (64 KiB), and little compared with an iteration's bytes."""
CONGESTION_CONTROL = "reno"
"""Instead of the machine's default: some have BBR, which is slow to use the rate that another
connection leaves. Linux's usual cubic behaves as Reno at the round trips of a local network, and
a namespace may not always choose it.
"""
QUEUE_S = 0.05
LEAST_QUEUE_BYTES = 1 << 20


def check_tools() -> None:
    """Check that hosts can be made here.

    Raises:
        TestbedError: not root, or a command is missing.
    """
    if os.geteuid() != 0:
        raise TestbedError(
            "hosts are network namespaces, which only root can make; run this as root"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise TestbedError(
            f"no {' and no '.join(missing)} here; install them: apt-get install iproute2"
        )


def make_bridge(bridge: str) -> None:
    """Make a switch without a rate of its own."""
    _run("ip", "link", "add", bridge, "type", "bridge")
    # Counted packets and no others: no spanning tree, no multicast queries, no IPv6 neighbours.
    _run("ip", "link", "set", bridge, "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
    _run("ip", "link", "set", bridge, "addrgenmode", "none", "mtu", str(MTU_BYTES), "up")


def make_host(name: str, bridge: str, address: str) -> None:
    """Make a namespace with loopback and one link to the bridge, whose end there has the host's
    name.
    """
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run(
        "ip",
        "link",
        "set",
        name,
        "addrgenmode",
        "none",
        "mtu",
        str(MTU_BYTES),
        "master",
        bridge,
        "up",
    )
    inside = ("ip", "-n", name)
    _run(*inside, "link", "set", INTERFACE, "addrgenmode", "none", "mtu", str(MTU_BYTES), "up")
    _run(*inside, "addr", "add", f"{address}/24", "dev", INTERFACE)
    _run(*inside, "link", "set", "lo", "up")
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    _run(*enter(name), "sh", "-c", f"echo {CONGESTION_CONTROL} > {setting}")


def join(bridge: str, address: str) -> None:
    """Put this machine itself on a bridge, so that it and the hosts reach each other."""
    _run("ip", "addr", "add", f"{address}/24", "dev", bridge)


def add_ipv6(name: str, address: str) -> None:
    """Give a host an IPv6 address as well."""
    _run("ip", "-n", name, "addr", "add", f"{address}/64", "dev", INTERFACE, "nodad")


def connect(addresses: Mapping[str, str]) -> None:
    """Connect two hosts by a second network, a cable from one to the other.

    Args:
        addresses: the IPv4 address there of each of the two.
    """
    one, other = addresses
    _run(
        "ip",
        "-n",
        one,
        "link",
        "add",
        SECOND,
        "type",
        "veth",
        "peer",
        "name",
        SECOND,
        "netns",
        other,
    )
    for name, address in addresses.items():
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", SECOND)
        _run("ip", "-n", name, "link", "set", SECOND, "up")


def cut(name: str) -> None:
    """Cut a host's link: no packet passes, and neither end is notified."""
    _run("ip", "link", "set", name, "nomaster")


def mend(name: str, bridge: str) -> None:
    """Restore the link."""
    _run("ip", "link", "set", name, "master", bridge)


def addresses() -> set[str]:
    """Return this machine's own addresses, IPv4 and IPv6."""
    found = json.loads(_run("ip", "-j", "addr", "show"))
    return {
        str(entry["local"])
        for link in found
        for entry in link.get("addr_info", ())
        if "local" in entry
    }


def shape(name: str, rate_mbit: float) -> None:
    """Limit a host's link in both directions to `rate_mbit` Mbit/s each."""
    queue_bytes = max(LEAST_QUEUE_BYTES, int(rate_mbit * 1e6 / 8 * QUEUE_S))
    bucket = ("root", "tbf", "rate", f"{rate_mbit:g}mbit", "burst", str(BURST_BYTES))
    for where in (("tc",), ("tc", "-n", name)):
        device = name if where == ("tc",) else INTERFACE
        _run(*where, "qdisc", "replace", "dev", device, *bucket, "limit", str(queue_bytes))


def unshape(name: str) -> None:
    """Undo `shape`; nothing happens where the link has no rate."""
    _run("tc", "qdisc", "del", "dev", name, "root", check=False)
    _run("tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root", check=False)


def sent_and_received(name: str) -> tuple[int, int]:
    """Bytes that a host has sent and received over its link, frames with their headers."""
    counts = SYSTEM / name / "statistics"  # of the bridge's end: what it receives the host has sent
    try:
        sent, received = (
            (counts / f"{way}_bytes").read_text(encoding="ascii") for way in ("rx", "tx")
        )
    except OSError as error:
        raise TestbedError(f"the link of host {name} is gone: {error.strerror}") from error
    return int(sent), int(received)


def enter(name: str) -> tuple[str, ...]:
    """Return the prefix that runs a command on a host; the command keeps the process id."""
    return ("ip", "netns", "exec", name)


def remove_host(name: str) -> None:
    """Remove a host, its links, and what still runs on it; nothing happens when it is gone."""
    for pid in _run("ip", "netns", "pids", name, check=False).split():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "link", "del", name, check=False)
    _run("ip", "netns", "del", name, check=False)


def remove_bridge(bridge: str) -> None:
    """Remove a bridge; nothing happens when it is gone."""
    _run("ip", "link", "del", bridge, check=False)


def host_names() -> list[str]:
    """All namespaces of this machine."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def link_names() -> list[str]:
    """All links of this machine that belong to no namespace."""
    return [str(link["ifname"]) for link in json.loads(_run("ip", "-j", "link", "show"))]


def _run(*words: str, check: bool = True) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TestbedError(f"'{' '.join(words)}' failed: {error}") from error
    if check and done.returncode != 0:
        raise TestbedError(_failure(words, done.stderr))
    return done.stdout if done.returncode == 0 else ""


def _failure(words: Sequence[str], output: str) -> str:
    return f"'{' '.join(words)}' failed: {output.strip() or 'no message'}"
