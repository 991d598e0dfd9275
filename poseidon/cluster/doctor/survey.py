"""The examination of the hosts of a machinefile: what each is, and what every link between two
of them carries.

    survey = examine([Subject(agent=agent, facts=facts)], seconds=0.5)

Law: this module asks and measures, and judges nothing: `poseidon.cluster.doctor.findings` does.
Each answer has a time limit; a host that gives none is a problem of the survey, not an error of the
examination. At any time each host takes part in at most one measurement.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poseidon.cluster.agent.messages import Service
from poseidon.cluster.agent.remote import RemoteAgent
from poseidon.cluster.machinefile import Host
from poseidon.cluster.process import for_each_host
from poseidon.errors import JobError, printable

PACKET_BYTES = (9000, 4000, 1500, 1492, 1450, 1400, 1280, 576, 200)
"""Sizes of packets that are tried beside the interface's MTU."""
CLOCK_READINGS = 8
ASKING = "asking hosts"
MEASURING = "measuring links"
ANSWER_S = 30.0
_REACH_S = 3.0
Report = Callable[[str, int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A host to examine.

    Attributes:
        agent: of the host; whoever opened it closes it.
        clients: its lines in the machinefile.
        address: at which the others reach it; empty for this machine alone.
        facts: its description, see `poseidon.cluster.host_probe`.
    """

    agent: RemoteAgent
    clients: tuple[Host, ...] = ()
    address: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The host in messages."""
        return self.agent.label

    def ask(self, request: Mapping[str, Any], timeout_s: float = ANSWER_S) -> Mapping[str, Any]:
        """Return the answer of its probe to a request, see `poseidon.cluster.doctor.probe`.

        Raises:
            JobError: none comes in time, or it is a problem.
        """
        answer = self.agent.ask(Service.LINKS, request, timeout_s)
        if problem := answer.get("problem"):
            raise JobError(f"{self.label}: {printable(str(problem))}")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """A host.

    Attributes:
        clients: its lines in the machinefile, by id; empty for this machine.
        label: the host in messages, `ml@node3`.
        address: at which the other hosts reach it; empty for this machine.
        facts: its description, see `poseidon.cluster.host_probe`.
        clock_offset_s: its time less this machine's.
        clock_error_s: by how much that may be wrong.
    """

    clients: tuple[int, ...]
    label: str
    address: str
    facts: Mapping[str, Any]
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One direction between two hosts.

    Attributes:
        source, target: positions in `Survey.hosts`.
        ports: for each TCP port of the target what a connection meets: see `probe.reach`.
        rtt_s: the median round trip of one byte; None where it could not be measured.
        bytes_per_s: what arrives; None where a transfer stalls or could not be made.
        mtu: bytes of a packet, by the source's interface and routes.
        largest_packet: bytes of the largest packet that arrives whole; None where no datagram
            arrives at all.
        problem: why nothing was measured.
    """

    source: int
    target: int
    ports: Mapping[int, str] = field(default_factory=dict)
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    mtu: int | None = None
    largest_packet: int | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What an examination has found.

    Attributes:
        hosts: that answered.
        links: two for each pair of hosts.
        problems: of hosts that did not answer, or cannot run a job: a label and a sentence.
    """

    hosts: tuple[HostReport, ...]
    links: tuple[LinkReport, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


def examine(
    subjects: Sequence[Subject],
    *,
    seconds: float,
    report: Report = lambda activity, done, total: None,
) -> Survey:
    """Examine hosts, and all links between them.

    Args:
        subjects: the hosts.
        seconds: of each transfer; each pair of hosts makes two.
        report: takes the progress: the activity, the amount done, and the total.
    """
    problems: list[tuple[str, str]] = []
    token = secrets.token_hex(16)
    report(ASKING, 0, len(subjects))

    outcomes = for_each_host(
        lambda subject: _introduce(subject, token), subjects, name="poseidon doctor"
    )
    found: list[tuple[HostReport, _End | None]] = []
    for subject, outcome in zip(subjects, outcomes, strict=True):
        if isinstance(outcome, JobError):
            label = subject.label
            problems.append((label, str(outcome).removeprefix(f"{label}: ")))
        else:
            found.append(outcome)
    report(ASKING, len(subjects), len(subjects))
    found.sort(key=lambda both: both[1] is not None)
    ends = [end for _, end in found if end is not None]
    links = _Links(ends, token, seconds).measure(report) if len(ends) > 1 else []
    hosts = tuple(host for host, _ in found)
    return Survey(hosts=hosts, links=tuple(links), problems=tuple(problems))


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the rounds of a tournament: in each every number below `count` is in
    at most one pair; all pairs occur once.
    """
    players = list(range(count)) + [-1] * (count % 2)
    for _ in range(len(players) - 1):
        half = len(players) // 2
        yield [
            (min(pair), max(pair))
            for pair in zip(players[:half], reversed(players[half:]), strict=True)
            if -1 not in pair
        ]
        players.insert(1, players.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """A host that listens for the others.

    Attributes:
        subject: the host.
        ports: TCP ports that listen; the last one is a free port.
        datagrams: the UDP port.
    """

    subject: Subject
    ports: Sequence[int]
    datagrams: int


def _introduce(subject: Subject, token: str) -> tuple[HostReport, _End | None]:
    """Ask a host for its time, and let it listen if others reach it."""
    readings = []
    for _ in range(CLOCK_READINGS):
        before = time.time()
        there = float(subject.ask({"do": "clock"})["time"])
        after = time.time()
        readings.append(((after - before) / 2, there - (before + after) / 2))
    error, offset = min(readings)
    report = HostReport(
        clients=tuple(client.id for client in subject.clients),
        label=subject.label,
        address=subject.address,
        facts=subject.facts,
        clock_offset_s=offset,
        clock_error_s=error,
    )
    if not subject.address:
        return report, None
    wanted = [client.port for client in subject.clients if client.port and client.serves]
    ports = [*dict.fromkeys(wanted), 0]
    request = {"do": "listen", "address": subject.address, "ports": ports, "token": token}
    listening = subject.ask(request)
    ports = [port for port in listening["tcp"] if isinstance(port, int)]
    return report, _End(subject=subject, ports=ports, datagrams=listening["udp"])


class _Links:
    """The links between hosts, numbered in their order.

    Args:
        ends: the hosts, two or more.
        token: of the examination.
        seconds: of each transfer.
    """

    def __init__(self, ends: Sequence[_End], token: str, seconds: float) -> None:
        self._ends = ends
        self._token = token
        self._seconds = seconds
        self._reached: list[Mapping[int, Mapping[int, str]]] = []
        """For each host, by the others' numbers, what connections to their ports meet."""

    def measure(self, report: Report) -> list[LinkReport]:
        """Return both directions of each link."""
        numbers = range(len(self._ends))
        every = list(rounds(len(numbers)))
        report(MEASURING, 0, len(every))
        outcomes = for_each_host(self._reach, numbers, name="poseidon doctor")
        self._reached = [{} if isinstance(found, JobError) else found for found in outcomes]
        links: list[LinkReport] = []
        for number, pairs in enumerate(every):
            for outcome in for_each_host(self._measure_pair, pairs, name="poseidon doctor"):
                if not isinstance(outcome, JobError):
                    links += outcome
            report(MEASURING, number + 1, len(every))
        return sorted(links, key=lambda link: (link.source, link.target))

    def _reach(self, source: int) -> dict[int, dict[int, str]]:
        targets = {number: end for number, end in enumerate(self._ends) if number != source}
        return {number: self._ports_reached(source, end) for number, end in targets.items()}

    def _ports_reached(self, source: int, target: _End) -> dict[int, str]:
        asked = {"ports": target.ports, "timeout_s": _REACH_S}
        limit_s = ANSWER_S + _REACH_S * len(target.ports)
        answer = self._ask("reach", source, target, asked, limit_s)
        return {int(port): str(state) for port, state in answer.items()}

    def _measure_pair(self, pair: tuple[int, int]) -> list[LinkReport]:
        """Measure both directions between two hosts, over a connection that one of them can
        make.
        """
        trip: Mapping[str, Any] = {}
        rates: dict[int, float | None] = {}
        problem = ""
        ways = (pair, pair[::-1])
        for source, target in ways:
            states = self._reached[source].get(target, {})
            open_ports = [port for port, state in states.items() if state == "open"]
            if not open_ports:
                problem = problem or "no port can be reached"
                continue
            try:
                trip = self._transfer(source, target, open_ports[-1])
            except JobError as error:
                problem = str(error)
                continue
            rates, problem = {source: trip["send"], target: trip["receive"]}, ""
            break
        found = []
        for source, target in ways:
            mtu, largest = self._packets(source, target)
            found.append(
                LinkReport(
                    source=source,
                    target=target,
                    ports=self._reached[source].get(target, {}),
                    rtt_s=trip.get("rtt_s"),
                    bytes_per_s=rates.get(source),
                    mtu=mtu,
                    largest_packet=largest,
                    problem=problem,
                )
            )
        return found

    def _transfer(self, source: int, target: int, port: int) -> Mapping[str, Any]:
        asked = {"port": port, "seconds": self._seconds}
        limit_s = ANSWER_S + 4 * self._seconds
        return self._ask("measure", source, self._ends[target], asked, limit_s)

    def _packets(self, source: int, target: int) -> tuple[int | None, int | None]:
        """Return the MTU of a host's way to another, and the size of the largest packet that
        arrives there.
        """
        subject, end = self._ends[source].subject, self._ends[target]
        try:
            mtu = subject.ask({"do": "mtu", "address": end.subject.address})["mtu"]
            sizes = [
                size for size in (mtu, *PACKET_BYTES) if size is not None and size <= (mtu or size)
            ]
            asked = {"port": end.datagrams, "sizes": sizes}
            return mtu, max(self._ask("packets", source, end, asked)["arrive"], default=None)
        except JobError:
            return None, None

    def _ask(
        self,
        do: str,
        source: int,
        target: _End,
        asked: Mapping[str, Any],
        limit_s: float = ANSWER_S,
    ) -> Mapping[str, Any]:
        """Return the answer of a host's probe about another host."""
        about = {"do": do, "address": target.subject.address, "token": self._token}
        return self._ends[source].subject.ask({**about, **asked}, limit_s)
