"""Looking at every host before a job starts anywhere: all that is in its way is told at once.

Law: each host judges for itself (`poseidon.cluster.host_probe`, which is sent to it); here are the questions, the comparison
of the answers, and the words. What a host says is shown without its control characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from poseidon import __version__
from poseidon.cluster import host_probe
from poseidon.cluster.all_at_once import all_at_once
from poseidon.cluster.ssh.channel import Finished
from poseidon.cluster.ssh.connections import listed
from poseidon.cluster.ssh.receiving import START
from poseidon.errors import JobError, printable

PROBE_S = 60.0
SPACE_BYTES = 100 << 20
"""Free disk for logs and snapshots, at the very least."""
_LAST_WORDS = 300


class ProbedHost(Protocol):
    """A host that runs a program: `SshHost`, or one that was met."""

    @property
    def words(self) -> str:
        """Its name in messages."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program there to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededFile:
    """A file or folder that a definition names.

    Attributes:
        name: as it is written.
        folder: that of the definition, as `poseidon.proto.shipped.portable` gives it.
        instead: names, any of which beside it will do in its place: `db_3` for the part of client 3; empty: itself.
    """

    name: str
    folder: str
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientNeeds:
    """What a client's processes will find or miss.

    Attributes:
        id: of the client.
        addresses: names and addresses by which the others may reach it, best first.
        ports: that its shards bind; 0 takes any.
        devices: numbers of the GPUs of its workers.
        folders: that are written to.
        prefixes: of snapshots, with the folder of the definition that names them.
        files: that are read.
        modules: of Python, that are imported.
    """

    id: int
    addresses: tuple[str, ...]
    ports: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    files: tuple[NeededFile, ...] = ()
    modules: tuple[str, ...] = ()

    def to_fields(self) -> dict[str, object]:
        """As it is asked."""
        return {
            "id": self.id,
            "addresses": list(self.addresses),
            "ports": list(self.ports),
            "devices": list(self.devices),
            "folders": list(self.folders),
            "prefixes": [list(prefix) for prefix in self.prefixes],
            "files": [[file.name, file.folder, list(file.instead)] for file in self.files],
            "modules": list(self.modules),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host said of itself.

    Attributes:
        python: its interpreter.
        torch: the version, without what follows a `+`; empty when there is none.
        addresses: where each of its clients is reached, by the client's id.
        problems: a sentence each.
    """

    python: str
    torch: str
    addresses: Mapping[int, str]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A host and what is asked of it.

    Attributes:
        host: which.
        interpreter: the words that run Python there.
        clients: their needs.
    """

    host: ProbedHost
    interpreter: tuple[str, ...]
    clients: tuple[ClientNeeds, ...]


def check_hosts(questions: Sequence[Question]) -> Mapping[int, str]:
    """Ask all hosts at once.

    Returns:
        Where each client is reached, by its id.

    Raises:
        JobError: lists what is in the way on all hosts.
    """
    outcomes = all_at_once(_ask, questions, name="poseidon host check")
    problems = [
        sentence
        for question, outcome in zip(questions, outcomes, strict=True)
        for sentence in _problems(question, outcome)
    ]
    facts = [outcome for outcome in outcomes if isinstance(outcome, HostFacts)]
    problems += _unlike(questions, outcomes)
    if problems:
        raise JobError(listed(problems, of=len(questions)))
    return {client: address for fact in facts for client, address in fact.addresses.items()}


def _problems(question: Question, outcome: HostFacts | JobError) -> list[str]:
    if isinstance(outcome, JobError):
        return [str(outcome)]
    return [f"{question.host.words}: {problem}" for problem in outcome.problems]


def _unlike(questions: Sequence[Question], outcomes: Sequence[HostFacts | JobError]) -> list[str]:
    """Hosts with another torch than the first: their sums differ in the last bits, or they do not understand each other."""
    known = [
        (question.host.words, outcome.torch)
        for question, outcome in zip(questions, outcomes, strict=True)
        if isinstance(outcome, HostFacts) and outcome.torch
    ]
    return [
        f"{words}: torch {torch} is installed there, and {known[0][1]} on {known[0][0]}; expected the same"
        for words, torch in known[1:]
        if torch != known[0][1]
    ]


def _ask(question: Question) -> HostFacts:
    needs = {
        "poseidon": __version__,
        "space_bytes": SPACE_BYTES,
        "clients": [client.to_fields() for client in question.clients],
    }
    program = Path(host_probe.__file__).read_bytes()
    stdin = b"%d\n%b%b\n" % (len(program), program, json.dumps(needs).encode())
    words = question.host.words
    done = question.host.run((*question.interpreter, "-c", START), stdin=stdin, timeout_s=PROBE_S)
    if done.status != 0:
        said = done.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:] or ["nothing"]
        raise JobError(
            f"{words}: its Python cannot be asked (status {done.status}): {printable(said[0][:_LAST_WORDS])}"
        )
    try:
        return _facts(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise JobError(
            f"{words}: it answers something else: {done.stdout[:_LAST_WORDS]!r} ({error})"
        ) from error


def _facts(fields: Mapping[str, Any]) -> HostFacts:
    """The border: anything unexpected raises."""
    addresses = {int(client): str(address) for client, address in fields["addresses"].items() if address}
    return HostFacts(
        python=str(fields["python"]),
        torch=printable(str(fields["torch"] or "")).partition("+")[0],
        addresses=addresses,
        problems=tuple(printable(str(problem)) for problem in fields["problems"]),
    )
