"""`Hosts`: N hosts as network namespaces on a bridge, each with a link of a given rate.

    with Hosts(4, rate_mbit=250) as hosts:
        subprocess.run([*hosts[0].enter, "ping", "-c1", hosts[1].address])

Law: the hosts are removed however the block ends: with an exception, SIGINT, SIGTERM, the
interpreter's end. Only SIGKILL leaves them behind; `remove_leftovers` finds those.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import overload

import psutil

from benchmarks.testbed import links
from benchmarks.testbed.names import SUBNET, GroupName, address, check_count, leftovers

LOOK_S = 0.1
CALM_LOOKS = 4
CALM_BYTES = 20_000
"""Bytes between two readings that are not training: a heartbeat, an ARP request."""

_GROUPS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes over one host's link since it was made, frames with their headers."""

    sent_bytes: int
    received_bytes: int

    def since(self, before: Traffic) -> Traffic:
        """Return the difference to `before`."""
        return Traffic(
            sent_bytes=self.sent_bytes - before.sent_bytes,
            received_bytes=self.received_bytes - before.received_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host.

    Attributes:
        index: 0..N-1.
        name: of its namespace.
        address: its IPv4 address.
    """

    index: int
    name: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """The prefix of a command that runs on this host."""
        return links.enter(self.name)

    def traffic(self) -> Traffic:
        """Return the bytes that its link has carried so far."""
        sent, received = links.sent_and_received(self.name)
        return Traffic(sent_bytes=sent, received_bytes=received)


class Hosts(Sequence[Host]):
    """Hosts on this machine. See the module's docstring.

    Args:
        count: number of hosts, 1..99.
        rate_mbit: of each link in each direction, Mbit/s; None: as fast as the machine.
        subnet: the first three numbers of the hosts' addresses.

    Raises:
        TestbedError: on entering: not root, no `ip` or `tc`, or the kernel refuses.
    """

    def __init__(self, count: int, *, rate_mbit: float | None = None, subnet: str = SUBNET) -> None:
        check_count(count)
        self._group = GroupName(pid=os.getpid(), number=next(_GROUPS) % 100)
        self._rate_mbit = rate_mbit
        self._hosts = tuple(
            Host(index=index, name=self._group.host(index), address=address(index, subnet))
            for index in range(count)
        )
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Hosts:
        links.check_tools()
        atexit.register(self.close)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, _leave)
        try:
            links.make_bridge(self._group.bridge)
            for host in self._hosts:
                links.make_host(host.name, self._group.bridge, host.address)
            if self._rate_mbit is not None:
                self.shape(self._rate_mbit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts and what runs on them. Safe to call twice."""
        for host in self._hosts:
            links.remove_host(host.name)
        links.remove_bridge(self._group.bridge)
        atexit.unregister(self.close)
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def shape(self, rate_mbit: float | None) -> None:
        """Give all links another rate; None: as fast as the machine."""
        for host in self._hosts:
            if rate_mbit is None:
                links.unshape(host.name)
            else:
                links.shape(host.name, rate_mbit)

    @property
    def bridge(self) -> str:
        """The link that joins the hosts."""
        return self._group.bridge

    def traffic(self) -> list[Traffic]:
        """Return the bytes that each host's link has carried so far."""
        return [host.traffic() for host in self._hosts]

    def quiet_traffic(self, *, limit_s: float = 60.0) -> list[Traffic]:
        """Return the same, once the links are silent and everything in transfer has arrived.

        Args:
            limit_s: longest time to wait.
        """
        end_s = time.monotonic() + limit_s
        last, calm = self.traffic(), 0
        while calm < CALM_LOOKS and time.monotonic() < end_s:
            time.sleep(LOOK_S)
            now = self.traffic()
            moved = sum(new.since(old).sent_bytes for new, old in zip(now, last, strict=True))
            calm = calm + 1 if moved < CALM_BYTES else 0
            last = now
        return last

    def __len__(self) -> int:
        return len(self._hosts)

    @overload
    def __getitem__(self, index: int) -> Host: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Host, ...]: ...

    def __getitem__(self, index: int | slice) -> Host | tuple[Host, ...]:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)


def remove_leftovers() -> list[str]:
    """Remove the hosts and bridges of processes that are gone.

    Returns:
        Their names.

    Raises:
        TestbedError: not root, or no `ip`.
    """
    links.check_tools()
    hosts = leftovers(links.host_names(), psutil.pid_exists)
    for name in hosts:
        links.remove_host(name)
    others = leftovers(links.link_names(), psutil.pid_exists)
    for name in others:
        links.remove_bridge(name)
    return [*hosts, *others]


def _leave(number: int, frame: FrameType | None) -> None:
    # Unwinds the stack, and so every `with` on it; a second signal must not interrupt that.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)
