"""torch.distributed's store, shared by the workers of a job: rank 0 holds its values.

    ["Ask", number] request         to rank 0
    ["Answer", number] answer

Law: `StoreTable` is pure. A request that cannot be answered yet waits in it; every later request
may answer it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgpack
import torch.distributed

from poseidon.errors import JobError
from poseidon.exchange.worker_links import unpacked
from poseidon.torch.process_group.late_links import LateLinks
from ps_server import RemoteProtocolError, StalenessTimeout
from ps_server.transport.base import Buffer

dist: Any = torch.distributed
Request = tuple[Any, ...]
"""The name of an operation, and its arguments: keys, bytes and numbers."""
_WAITS = object()


class StoreTable:
    """The values and queues of a store, by key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: list[tuple[Request, Callable[[object], None]]] = []

    def ask(self, request: Request, reply: Callable[[object], None]) -> None:
        """Do what is requested, and call `reply` with the answer as soon as there is one.

        Raises:
            ValueError: it is not a request.
        """
        answer = self._answer(request)
        if answer is _WAITS:
            self._waiting.append((request, reply))
            return
        reply(answer)
        waiting, self._waiting = self._waiting, []
        for earlier, its_reply in waiting:
            answer = self._answer(earlier)
            if answer is _WAITS:
                self._waiting.append((earlier, its_reply))
            else:
                its_reply(answer)

    def _answer(self, request: Request) -> object:
        values = self._values
        match request:
            case ("set", str(key), bytes(value)):
                values[key] = value
                return None
            case ("get", str(key)):
                return values.get(key, _WAITS)
            case ("wait" | "check" as name, [*keys]) if all(isinstance(key, str) for key in keys):
                has_all = all(key in values for key in keys)
                return has_all if name == "check" else None if has_all else _WAITS
            case ("add", str(key), int(amount)):
                total = int(values.get(key, b"0")) + amount
                if not -(2**63) <= total < 2**63:
                    raise ValueError("a counter of a store has 64 bits")
                values[key] = str(total).encode()
                return total
            case ("append", str(key), bytes(value)):
                values[key] = values.get(key, b"") + value
                return None
            case ("compare_set", str(key), bytes(expected), bytes(value)):
                return self._compare_set(key, expected, value)
            case ("delete", str(key)):
                return values.pop(key, None) is not None
            case ("keys", str(prefix)):
                return [key for key in values if key.startswith(prefix)]
            case _:
                return self._answer_queue(request)

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        found = self._values.get(key)
        if found is None and expected:
            return expected
        if found is None or found == expected:
            self._values[key] = value
            return value
        return found

    def _answer_queue(self, request: Request) -> object:
        match request:
            case ("push", str(key), bytes(value)):
                self._queues.setdefault(key, deque()).append(value)
                return None
            case ("pop", str(key), bool(waits)):
                queue = self._queues.get(key)
                if queue:
                    return queue.popleft()
                return _WAITS if waits else None
            case ("length", str(key)):
                return len(self._queues.get(key, ()))
            case _:
                raise ValueError("this is not a request of a store")


class JobStore:
    """The store of a job on one of its workers.

    Args:
        check: raises the error of a collective that has failed, if one has.

    Attributes:
        has_answered: whether other workers have asked this one.
    """

    def __init__(self, links: LateLinks, check: Callable[[], None]) -> None:
        self._links = links
        self._check = check
        self._table = StoreTable()
        self._answers: dict[int, object] = {}
        self._asked = itertools.count()
        self._stores = itertools.count()
        self.has_answered = False

    def new(self) -> SharedStore:
        """Return a store that all workers share; the n-th ones of all workers are one."""
        return SharedStore(self._ask, f"{next(self._stores)}/")

    def _ask(self, request: Request, timeout_s: float) -> Any:
        self._check()
        number, links, rank = next(self._asked), self._links, self._links.network.rank
        found = links.connected() if links.network.size > 1 else None
        if rank:
            links.post(["Ask", number], ([0], msgpack.packb(request)))
        else:
            with links.monitor:
                self._table.ask(request, partial(self.note, number))
            links.monitor.notify()  # a thread of this worker may wait for what was set

        def answered() -> tuple[object] | None:
            if number in self._answers:
                return (self._answers.pop(number),)
            self._check()
            if rank and found is not None and 0 in found.left:
                raise JobError(
                    f"worker {rank} uses the store of the process group, but worker 0, which "
                    "holds it, has ended; let worker 0 wait for the others"
                )
            return None

        what = f"the store of the process group did not answer {request[0]}()"
        return links.monitor.wait_for(answered, what, timeout_s=timeout_s)[0]

    def note(self, number: int, answer: object) -> None:
        """Note the answer to a request of this worker."""
        self._answers[number] = answer

    def answer(self, sender: int, number: int, frame: Buffer) -> None:
        """Answer the request of another worker, once there is an answer.

        Raises:
            RemoteProtocolError: it is not valid.
        """
        monitor = self._links.monitor

        def reply(answer: object) -> None:
            if not monitor.closed and monitor.failure is None:
                self._links.post(["Answer", number], ([sender], msgpack.packb(answer)))

        self.has_answered = True
        try:
            self._table.ask(tuple(unpacked(frame)), reply)
        except (ValueError, TypeError) as error:
            raise RemoteProtocolError(
                f"worker {sender} sent the store an invalid request"
            ) from error


class SharedStore(dist.Store):  # type: ignore[misc]
    """A store of torch.distributed. It has the methods of torch's, of which C++ calls some too.

    Waits end after `timeout`, or with an error of the job.

    Args:
        ask: returns the answer to a request within so many seconds.
        prefix: of its keys among those of the job.
    """

    def __init__(self, ask: Callable[[Request, float], Any], prefix: str) -> None:
        super().__init__()
        self._ask = ask
        self._prefix = prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        value: bytes = self._request("get", key)
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        found: bytes = self._request("compare_set", key, _bytes(expected), _bytes(value))
        return found

    def append(self, key: str, value: str | bytes) -> None:
        self._request("append", key, _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._request("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._request("wait", list(keys), within=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", key))

    def list_keys(self) -> list[str]:
        keys: list[str] = self._request("keys", "")
        return [key[len(self._prefix) :] for key in keys]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._request("push", key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        value: bytes | None = self._request("pop", key, block)
        if value is None:
            raise dist.QueueEmptyError(f"queue {key} is empty")
        return value

    def queue_len(self, key: str) -> int:
        return int(self._request("length", key))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SharedStore:
        return SharedStore(self._ask, self._prefix)

    # as C++ calls them
    deleteKey = delete_key
    getNumKeys = num_keys

    def _request(
        self, name: str, keys: str | list[str], *values: object, within: timedelta | None = None
    ) -> Any:
        limit: timedelta = self.timeout if within is None else within
        named = (
            self._prefix + keys if isinstance(keys, str) else [self._prefix + key for key in keys]
        )
        try:
            return self._ask((name, named, *values), limit.total_seconds())
        except StalenessTimeout as error:
            raise dist.DistStoreError(
                f"wait timeout after {limit.total_seconds():g} s, keys: {keys}"
            ) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
