"""Store handlers: the store of a run, and the shards that have met through it.

The first common world of a handler is the rendezvous (`poseidon.caffe2.shards.rendezvous`); the
others need no store any more. A failure names the shards that have ended: a thread of each process
answers through the store when another shard reports a failure.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator

from poseidon.caffe2.shards.process_group import Backend, ProcessGroup, Rendezvous
from poseidon.caffe2.shards.rendezvous import Member, check_own, join, published_address
from poseidon.caffe2.shards.stores import KeyTaken, Store, StoreTimeout
from poseidon.errors import JobError, UsageError
from ps_server import PeerLost
from ps_server.network import Network

ANSWER_S = 5.0
"""How long a shard that reports a failure waits for the answers of the others."""
LOOK_S = 0.5
"""How often a shard looks whether a different shard has reported a failure."""
FAILED = "failed"


class CollectiveError(JobError, RuntimeError):
    """The shards do not meet, or one was lost; a RuntimeError too, as Caffe2's scripts expect."""


class StoreHandler:
    """The store of a run and the shards that have met through it.

    Args:
        store: shared by all shards, with a prefix of its own for each run.
        run: the run id, for messages.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self._shards: Shards | None = None
        self._lock = threading.Lock()

    def meet(self, *, rank: int, size: int, timeout_s: float, interface: str) -> Shards:
        """Return the shards; the first call is the rendezvous.

        Args:
            rank: this shard's number.
            size: the number of shards.
            timeout_s: longest time to wait for the others.
            interface: see `published_address`; empty: the default.

        Raises:
            CollectiveError: they do not meet; see `rendezvous.join`.
        """
        with self._lock, sentences():
            if self._shards is None:
                self._shards = Shards(self, rank, size, timeout_s, interface)
            known = self._shards
            if (known.rank, known.size) != (rank, size):
                raise CollectiveError(
                    f"a common world of run '{self.run}' has rank {rank} of {size}, and an earlier "
                    f"one of this process {known.rank} of {known.size}; expected the same"
                )
            return known


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turn errors of stores and rendezvous into a `CollectiveError` of the same sentence."""
    try:
        yield
    except CollectiveError:
        raise
    except (JobError, UsageError, PeerLost) as error:
        raise CollectiveError(str(error)) from error


class Shards:
    """The shards of a run that have met.

    Attributes:
        rank: the number of this one.
        size: how many there are.
        members: all of them, by number.
        rendezvous: where process groups are formed.
    """

    def __init__(
        self, handler: StoreHandler, rank: int, size: int, timeout_s: float, interface: str
    ) -> None:
        self.rank, self.size = rank, size
        self.host = published_address(interface or None)
        check_own(self.host)
        self._store = handler.store
        network = self.network(timeout_s)
        opened = Rendezvous(network) if rank == 0 else None
        self.members = join(
            handler.store,
            run=handler.run,
            shard=rank,
            shards=size,
            address=self.host,
            payload=opened.address if opened else "",
            timeout_s=timeout_s,
        )
        self.rendezvous = opened or Rendezvous(network, self.members[0].payload)
        self._names: Counter[str] = Counter()
        self._failed = threading.Event()
        self._lost: str | None = None
        self._lock = threading.Lock()
        threading.Thread(
            target=_answer, args=(weakref.ref(self),), name="caffe2-shards", daemon=True
        ).start()

    def network(self, timeout_s: float) -> Network:
        """Return the settings of a process group."""
        return Network(rank=self.rank, size=self.size, host=self.host, timeout_s=timeout_s)

    def group(self, name: str, timeout_s: float, backend: Backend = Backend.GLOO) -> ProcessGroup:
        """Form a process group.

        A name that is used again in the same process means another group.
        """
        with self._lock:
            self._names[name] += 1
            unique = f"{name}#{self._names[name]}"
        return ProcessGroup(
            self.rendezvous, unique, self.network(timeout_s), backend, watch=self.look
        )

    def look(self) -> None:
        """Raise PeerLost when another shard has reported a failure."""
        if self._failed.is_set():
            raise PeerLost("cannot continue with the other shards: one of them reports a failure")

    def explain(self, error: PeerLost) -> CollectiveError:
        """Report a failure to the other shards; return the error that names the silent ones."""
        self._failed.set()
        with self._lock:
            if self._lost is None:
                self._lost = self._find_lost()
        what = str(error).replace("the other workers", "the other shards")
        return CollectiveError(f"shard {self.rank} {what}; {self._lost}")

    def _find_lost(self) -> str:
        others = [member for member in self.members if member.shard != self.rank]
        keys = [_answer_key(member.shard) for member in others]
        try:
            _set_once(self._store, FAILED)
            _set_once(self._store, _answer_key(self.rank))
            with contextlib.suppress(StoreTimeout):
                self._store.wait(keys, ANSWER_S)
            missing = self._store.missing(keys)
        except JobError as error:
            return str(error)
        lost = [member for member in others if _answer_key(member.shard) in missing]
        if not lost:
            return (
                "all shards still run: check the network between them, and that each runs the same "
                "nets equally often"
            )
        return f"{' and '.join(map(_describe, lost))} ended, or cannot be reached"

    def answer(self) -> bool:
        """Answer a failure that another shard has reported; return whether there is one."""
        if self._failed.is_set():
            return True
        try:
            if self._store.find(FAILED) is None:
                return False
            _set_once(self._store, _answer_key(self.rank))
        except JobError:
            return False  # training continues without the store
        self._failed.set()
        return True


def _describe(member: Member) -> str:
    return f"shard {member.shard} (process {member.process} on {member.host})"


def _answer_key(shard: int) -> str:
    return f"answer_{shard}"


def _set_once(store: Store, key: str) -> None:
    with contextlib.suppress(KeyTaken):
        store.set(key, b"1")


def _answer(reference: weakref.ref[Shards]) -> None:
    """Look for reported failures, on a thread, until one comes or the shards are done."""
    pause = threading.Event()
    while (shards := reference()) is not None and not shards.answer():
        del shards
        pause.wait(LOOK_S)
