"""Key-value stores where shards meet: a folder, a Redis server, or the memory of one shard, which
the others reach by TCP.

Law: a key is set once. A second `set` of a key is an error that names it, so a run id that was used
before is noticed, and no shard reads what an earlier run has left. (Caffe2's file store overwrote
keys: stale addresses were read.)

`TcpStore("10.0.0.1", 29500, "run_17", serve=shard == 0)`: a request is one line of JSON on a
connection of its own, and so is the answer.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from poseidon.base.durable import write_whole
from poseidon.base.few_visitors import FewVisitors
from poseidon.errors import JobError, UsageError

if TYPE_CHECKING:
    import redis

TIMEOUT_S = 30.0
"""Default time limit of `get` and `wait`, as in Caffe2."""
FIRST_POLL_S = 0.01
LAST_POLL_S = 0.25
LOCK_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
MAX_NAME = 200
"""Characters of a key in a file name; most file systems take 255 bytes."""


class StoreTimeout(JobError):
    """Keys were not set in time."""


class KeyTaken(JobError):
    """A key was set before.

    Args:
        key: the key.
        value: what it holds; None where that cannot be read.
    """

    def __init__(self, key: str, value: bytes | None) -> None:
        self.key = key
        self.value = value
        super().__init__(
            f"key '{key}' was set before; expected a run id that no earlier run has used"
        )


class Store(ABC):
    """A store of bytes by name. All methods may be called from any thread."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Set a key, once.

        Raises:
            KeyTaken: it was set before.
            JobError: the store cannot be reached.
        """

    @abstractmethod
    def find(self, key: str) -> bytes | None:
        """Return the value of a key, or None while it is not set.

        Raises:
            JobError: the store cannot be reached.
        """

    @abstractmethod
    def add(self, key: str, value: int) -> int:
        """Add to a counter, which starts at 0, and return what it is now.

        Counters are apart from other keys.

        Raises:
            JobError: the store cannot be reached.
        """

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys are set."""
        return not self.missing(keys)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are not set."""
        return [key for key in keys if self.find(key) is None]

    def get(self, key: str, timeout_s: float = TIMEOUT_S) -> bytes:
        """Wait until a key is set, and return its value.

        Args:
            key: the key.
            timeout_s: longest time to wait; 0: no limit, as in Caffe2.

        Raises:
            StoreTimeout: it was not set in time.
        """
        self.wait([key], timeout_s)
        value = self.find(key)
        assert value is not None, "a key that is set stays"
        return value

    def wait(self, keys: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all these keys are set. See `get`."""
        deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
        missing, poll_s = list(keys), FIRST_POLL_S
        while missing := self.missing(missing):
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout(
                    f"Wait timeout for name(s): {' '.join(missing)} (after {timeout_s:g} s)"
                )
            time.sleep(min(poll_s, left))
            poll_s = min(poll_s * 1.5, LAST_POLL_S)


class FolderStore(Store):
    """One file for each key in a shared folder, such as one on NFS, without file locks.

    Args:
        folder: it must exist.
        prefix: of the run; keys of other prefixes are apart.

    Raises:
        UsageError: the folder does not exist, or cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str], prefix: str = "") -> None:
        top = Path(folder)
        if not top.is_dir():
            problem = "is not a folder" if top.exists() else "does not exist"
            raise UsageError(f"the rendezvous' folder {top} {problem}; all shards must share it")
        self.folder = top / _file_name(prefix) if prefix else top
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write to the folder of the rendezvous, {top}: {error.strerror}"
            ) from error

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        with self._translated():
            written = self._write(value)
            try:
                os.link(written, path)  # fails where the name is there, also on NFS
            except FileExistsError as error:
                raise KeyTaken(key, self.find(key)) from error
            finally:
                written.unlink(missing_ok=True)

    def find(self, key: str) -> bytes | None:
        with self._translated():
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                return None

    def add(self, key: str, value: int) -> int:
        path = self._path(key, ".counter")
        with self._translated(), self._lock(path):
            try:
                count = int(path.read_bytes()) + value
            except FileNotFoundError:
                count = value
            except ValueError as error:
                raise JobError(f"{path} does not hold a number; remove it") from error
            write_whole(path, b"%d" % count, durably=False)
        return count

    def _path(self, key: str, ending: str = ".key") -> Path:
        return self.folder / (_file_name(key) + ending)

    def _write(self, value: bytes) -> Path:
        path = self.folder / f".{uuid.uuid4().hex}"
        with path.open("xb") as stream:
            stream.write(value)
            stream.flush()
            os.fsync(stream.fileno())
        return path

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        """Hold a lock file, which only one process can make."""
        lock, deadline = path.with_name(path.name + ".lock"), time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                break
            except FileExistsError as error:
                if time.monotonic() > deadline:
                    raise JobError(
                        f"another process has held {lock} for more than {LOCK_TIMEOUT_S:g} s; "
                        "remove the file if none runs"
                    ) from error
                time.sleep(FIRST_POLL_S)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JobError(
                f"cannot use the folder of the rendezvous, {self.folder}: {error.strerror or error}"
            ) from error


class RedisStore(Store):
    """Keys on a Redis server.

    Args:
        host: of the server.
        port: of the server.
        prefix: of the run; it comes before each key, as Caffe2 had it.
        password: of the server; None: what $REDISCLI_AUTH holds, as for redis-cli.
        timeout_s: longest time that a connection takes.

    Raises:
        JobError: the server cannot be reached, or refuses the password.
        UsageError: the Python package redis is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int = 6379,
        prefix: str = "",
        *,
        password: str | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise UsageError(
                "a rendezvous in Redis needs the Python package redis; pip install "
                "'poseidon[redis]'"
            ) from error
        self._errors: Any = redis.exceptions
        self._name = f"Redis at {host}:{port}"
        self._prefix = prefix
        password = password or os.environ.get("REDISCLI_AUTH") or None
        self._has_password = password is not None
        self._redis: redis.Redis = redis.Redis(
            host=host,
            port=port,
            password=password,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            # a connection that broke while nobody used it is made again
            retry=Retry(NoBackoff(), 1),
        )
        with self._translated():
            self._redis.ping()

    def set(self, key: str, value: bytes) -> None:
        with self._translated():
            if not self._redis.setnx(self._prefix + key, value):
                raise KeyTaken(key, self.find(key))

    def find(self, key: str) -> bytes | None:
        with self._translated():
            value: Any = self._redis.get(self._prefix + key)
        return None if value is None else bytes(value)

    def add(self, key: str, value: int) -> int:
        with self._translated():
            count: Any = self._redis.incrby(f"{self._prefix}{key}.counter", value)
        return int(count)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        errors = self._errors
        try:
            yield
        except errors.AuthenticationError as error:
            problem = "refuses the password" if self._has_password else "needs a password"
            raise JobError(f"{self._name} {problem}: set $REDISCLI_AUTH") from error
        except errors.ReadOnlyError as error:
            raise JobError(f"{self._name} is a read-only replica: use its primary") from error
        except (errors.ConnectionError, errors.TimeoutError) as error:
            reason = str(error).rstrip(".")
            raise JobError(
                f"{self._name} cannot be reached: {reason}; check the host, the port, and that it "
                "runs"
            ) from error
        except errors.RedisError as error:
            raise JobError(f"{self._name} reports an error: {error}") from error


def _file_name(key: str) -> str:
    """Return a file name for a key: readable where it can be, and never two keys under one name."""
    name = quote(key, safe=" ()+,=@").replace(".", "%2E")
    if len(name) <= MAX_NAME:
        return name or "%"
    return f"{name[:100]}%{uuid.uuid5(uuid.NAMESPACE_URL, key).hex}"


T = TypeVar("T")
LONGEST = 16 * 2**20
"""Bytes of a request or an answer, at most."""
ANSWER_S = 10.0
"""Longest time that an answer takes."""
MOST = 128
"""Requests at a time."""


class _Server:
    """Keeps keys and counters, and answers requests, each on a thread.

    Args:
        listener: owned from here on.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.values: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._visitors = FewVisitors(
            listener, self._serve, name="caffe2-store", most=MOST, longest_s=ANSWER_S
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request: `set`, `find` or `add`."""
        key = str(request["key"])
        with self.lock:
            if request["kind"] == "add":
                self.counters[key] += int(request["value"])
                return {"value": self.counters[key]}
            known = self.values.get(key)
            if request["kind"] == "set" and known is None:
                self.values[key] = str(request["value"])
            return {"value": known}

    def _serve(self, connection: socket.socket, _: Callable[[], None]) -> None:
        """Read a line, and write one; drop anything else."""
        with (
            contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError),
            connection.makefile("rb") as requests,
        ):
            answer = self.answer(json.loads(requests.readline(LONGEST)))
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        """Answer no more."""
        self._visitors.close()


class TcpStore(Store):
    """Keys in the memory of one shard.

    Args:
        host: of the shard that serves.
        port: of that shard; 0 where this process serves: a free one.
        prefix: of the run; keys of other prefixes are apart.
        serve: whether this process serves, until the store is not used any more.
        timeout_s: longest time to wait for the shard that serves.

    Raises:
        JobError: the port cannot be opened, or the shard that serves is not there in time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str = "",
        *,
        serve: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._host, self._port, self._prefix = host, port, prefix
        if serve:
            self._serve()
        else:
            self._await_server(timeout_s)

    @property
    def port(self) -> int:
        """The port of the shard that serves."""
        return self._port

    def _serve(self) -> None:
        try:
            family, *_, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.create_server(address[:2], family=family, backlog=MOST)
        except OSError as error:
            raise JobError(
                f"cannot serve the rendezvous at {self._host}:{self._port}: "
                f"{error.strerror or error}"
            ) from error
        self._port = int(listener.getsockname()[1])
        weakref.finalize(self, _stop, _Server(listener))

    def _await_server(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((self._host, self._port), ANSWER_S).close()
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise JobError(
                        f"the rendezvous at {self._host}:{self._port} cannot be reached within "
                        f"{timeout_s:g} s ({error.strerror or error}); check the host, the port, "
                        "and that shard 0 runs there"
                    ) from error
            time.sleep(LAST_POLL_S)

    def set(self, key: str, value: bytes) -> None:
        known = self._request("set", key, _decoded, base64.b64encode(value).decode())
        if known is not None:
            raise KeyTaken(key, known)

    def find(self, key: str) -> bytes | None:
        return self._request("find", key, _decoded)

    def add(self, key: str, value: int) -> int:
        return self._request("add", key, _whole, value)

    def _request(self, kind: str, key: str, read: Callable[[object], T], value: Any = None) -> T:
        """Return the answer to a request, as `read` takes it.

        Raises:
            JobError: there is none, or something else than a store answers.
        """
        line = (
            json.dumps({"kind": kind, "key": f"{self._prefix}/{key}", "value": value}).encode()
            + b"\n"
        )
        try:
            with (
                socket.create_connection((self._host, self._port), ANSWER_S) as connection,
                connection.makefile("rb") as answers,
            ):
                connection.sendall(line)
                answer = answers.readline(LONGEST)
        except OSError as error:
            raise JobError(f"the rendezvous at {self._host}:{self._port} ended: {error}") from error
        if not answer:
            raise JobError(f"the rendezvous at {self._host}:{self._port} ended")
        try:
            return read(json.loads(answer)["value"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise JobError(
                f"what answers at {self._host}:{self._port} is not the store of a shard; check the "
                "host and the port"
            ) from error


def _decoded(value: Any) -> bytes | None:
    return None if value is None else base64.b64decode(value)


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError
    return value


def _stop(server: _Server) -> None:
    threading.Thread(target=server.close, daemon=True).start()
