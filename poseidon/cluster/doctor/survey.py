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
from poseidon.cluster.parallel import for_each_host
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

    def begin(subject: Subject) -> tuple[HostReport, list[int]]:
        return _introduce(subject, token)

    ports: dict[int, list[int]] = {}
    hosts: dict[int, HostReport] = {}
    for number, outcome in enumerate(for_each_host(begin, subjects, name="poseidon doctor")):
        if isinstance(outcome, JobError):
            label = subjects[number].label
            problems.append((label, _without_label(outcome, label)))
        else:
            hosts[number], ports[number] = outcome
    report(ASKING, len(subjects), len(subjects))
    order = sorted(hosts, key=lambda number: (not hosts[number].address, number))
    linked = [number for number in order if hosts[number].address]
    links = _links(
        [subjects[n] for n in linked],
        [hosts[n] for n in linked],
        [ports[n] for n in linked],
        token,
        seconds,
        report,
    )
    return Survey(
        hosts=tuple(hosts[n] for n in order), links=tuple(links), problems=tuple(problems)
    )


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


def _introduce(subject: Subject, token: str) -> tuple[HostReport, list[int]]:
    """Ask a host for its time, and let it listen; return the ports, the one of datagrams last."""
    readings = []
    for _ in range(CLOCK_READINGS):
        before = time.time()
        there = float(subject.ask({"do": "clock"})["time"])
        after = time.time()
        readings.append(((after - before) / 2, there - (before + after) / 2))
    error, offset = min(readings)
    ports: list[int] = []
    if subject.address:
        wanted = [client.port for client in subject.clients if client.port and client.serves]
        listening = subject.ask(
            {
                "do": "listen",
                "address": subject.address,
                "ports": [*dict.fromkeys(wanted), 0],
                "token": token,
            }
        )
        ports = [port for port in listening["tcp"] if isinstance(port, int)] + [listening["udp"]]
    report = HostReport(
        clients=tuple(client.id for client in subject.clients),
        label=subject.label,
        address=subject.address,
        facts=subject.facts,
        clock_offset_s=offset,
        clock_error_s=error,
    )
    return report, ports


def _links(
    subjects: Sequence[Subject],
    hosts: Sequence[HostReport],
    ports: Sequence[Sequence[int]],
    token: str,
    seconds: float,
    report: Report,
) -> list[LinkReport]:
    count = len(hosts)
    if count < 2:
        return []
    every = list(rounds(count))
    report(MEASURING, 0, len(every))

    def reach(source: int) -> dict[int, dict[int, str]]:
        return {
            target: _ports_reached(
                subjects[source], hosts[target].address, ports[target][:-1], token
            )
            for target in range(count)
            if target != source
        }

    outcomes = for_each_host(reach, range(count), name="poseidon doctor")
    reached = [{} if isinstance(outcome, JobError) else outcome for outcome in outcomes]
    links: list[LinkReport] = []
    for number, pairs in enumerate(every):

        def both(pair: tuple[int, int]) -> tuple[LinkReport, LinkReport]:
            first, second = pair
            return _measure_pair(
                subjects,
                hosts,
                pair,
                (ports[first], ports[second]),
                (reached[first].get(second, {}), reached[second].get(first, {})),
                token,
                seconds,
            )

        for outcome in for_each_host(both, pairs, name="poseidon doctor"):
            if not isinstance(outcome, JobError):
                links += outcome
        report(MEASURING, number + 1, len(every))
    return sorted(links, key=lambda link: (link.source, link.target))


def _ports_reached(
    subject: Subject, address: str, ports: Sequence[int], token: str
) -> dict[int, str]:
    request = {
        "do": "reach",
        "address": address,
        "ports": list(ports),
        "token": token,
        "timeout_s": _REACH_S,
    }
    answer = subject.ask(request, ANSWER_S + _REACH_S * len(ports))
    return {int(port): str(state) for port, state in answer.items()}


def _measure_pair(
    subjects: Sequence[Subject],
    hosts: Sequence[HostReport],
    pair: tuple[int, int],
    ports: tuple[Sequence[int], Sequence[int]],
    reached: tuple[Mapping[int, str], Mapping[int, str]],
    token: str,
    seconds: float,
) -> tuple[LinkReport, LinkReport]:
    """Measure both directions between two hosts, over a connection that one of them can make."""
    trip: Mapping[str, Any] = {}
    rates: dict[int, float | None] = {}
    problem = ""
    turns = ((0, 1), (1, 0))
    for a, b in turns:
        open_ports = [port for port, state in reached[a].items() if state == "open"]
        if not open_ports:
            problem = problem or "no port can be reached"
            continue
        request = {
            "do": "measure",
            "address": hosts[pair[b]].address,
            "port": open_ports[-1],
            "token": token,
            "seconds": seconds,
        }
        try:
            answer = subjects[pair[a]].ask(request, ANSWER_S + 4 * seconds)
        except JobError as error:
            problem = str(error)
            continue
        trip, rates, problem = answer, {a: answer["send"], b: answer["receive"]}, ""
        break
    found = []
    for a, b in turns:
        mtu, largest = _packets(subjects[pair[a]], hosts[pair[b]].address, ports[b][-1], token)
        found.append(
            LinkReport(
                source=pair[a],
                target=pair[b],
                ports=reached[a],
                rtt_s=trip.get("rtt_s"),
                bytes_per_s=rates.get(a),
                mtu=mtu,
                largest_packet=largest,
                problem=problem,
            )
        )
    return found[0], found[1]


def _packets(
    subject: Subject, address: str, port: int, token: str
) -> tuple[int | None, int | None]:
    """Return the MTU of a host's way to an address, and the size of the largest packet that
    arrives there.
    """

    try:
        mtu = subject.ask({"do": "mtu", "address": address})["mtu"]
        sizes = [
            size for size in (mtu, *PACKET_BYTES) if size is not None and size <= (mtu or size)
        ]
        request = {
            "do": "packets",
            "address": address,
            "port": port,
            "token": token,
            "bytes": sizes,
        }
        return mtu, max(subject.ask(request)["arrive"], default=None)
    except JobError:
        return None, None


def _without_label(error: JobError, label: str) -> str:
    return str(error).removeprefix(f"{label}: ")
