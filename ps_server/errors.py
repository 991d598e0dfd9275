"""The errors of a parameter server, as a tree.

ServerError
├── LocalProtocolError    the caller broke the contract of this API: mend the calling code
├── RemoteProtocolError   the other side sent something that is not legal: it is dropped and counted
│   └── PacketsMissing    somebody has taken out what the other side has sealed
├── SpecError             a table or store description is out of range, or differs between workers
├── TransportError        an address cannot be bound or reached
├── Interrupted           this side was asked to end its waits: the job continues differently
├── PeerLost              a shard or worker has gone: stop, and restart from a snapshot
│   ├── PeerLeft          a worker has finished before this one
│   └── PeerUnreachable   a connection did not come about: open the ports between the hosts
└── StalenessTimeout      a value did not become fresh enough in time: a worker or shard hangs
"""

from __future__ import annotations


class ServerError(Exception):
    """Base of all errors of this package. The text is a full sentence."""


class LocalProtocolError(ServerError):
    """The caller broke the contract of this API: mend the calling code."""


class RemoteProtocolError(ServerError):
    """The other side sent something that is not legal; its state and ours are unchanged."""


class PacketsMissing(RemoteProtocolError):
    """The other side has sealed packets that did not come: somebody has taken them out."""


class SpecError(ServerError, ValueError):
    """A table or store description is out of range, or differs between workers."""


class TransportError(ServerError):
    """An address cannot be bound or reached."""


class Interrupted(ServerError):
    """This side was asked to end its waits."""


class PeerLost(ServerError):
    """A shard or worker has gone. Stop, and restart from a snapshot."""


class PeerLeft(PeerLost):
    """A worker has left before this one: it has made fewer iterations or collections.

    Args:
        worker: that has left.
        iterations: of it.
        rank: of this worker.
    """

    def __init__(self, worker: int, iterations: int, *, rank: int) -> None:
        super().__init__(
            f"worker {worker} has left after {iterations} iterations, and worker {rank} "
            "continues: all workers must make the same number of iterations, and the same "
            "collections"
        )
        self.worker = worker


class PeerUnreachable(PeerLost):
    """A connection did not come about: open the ports between the hosts."""


class StalenessTimeout(ServerError):
    """A value did not become fresh enough in time: a worker or a shard hangs, or the limit is
    too short.
    """


def as_server_error(error: Exception, what: str) -> ServerError:
    """Return what a thread's outermost frame hands to the thread's owner.

    Args:
        error: what ended the thread.
        what: the beginning of the sentence: `the connection of worker 3 failed`.

    Returns:
        The error itself where it is a `ServerError`; otherwise a `PeerLost` that it caused.
    """
    if isinstance(error, ServerError):
        return error
    lost = PeerLost(f"{what}: {error!r}")
    lost.__cause__ = error
    return lost


def found_in(error: BaseException | None) -> ServerError | None:
    """Return the error itself, or the one that it follows from, where that is a `ServerError`."""
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__ or error.__context__
    return error


def visible(text: str) -> str:
    r"""Return a text with escapes for what a terminal would obey: names in it may be foreign.

    >>> visible("a\x1b[2J\n")
    'a\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
