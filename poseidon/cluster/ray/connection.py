"""The launcher's connection to an actor of Ray on one node: the interface of `SshConnection`.

Law: a lost node or actor ends every wait. One call of each kind is in progress at a time, so that
messages keep their order and a slow node slows the launcher down.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon import __version__
from poseidon.cluster.ray.files import NodeFiles
from poseidon.cluster.ray.node_actor import FILES, PROGRAMS
from poseidon.cluster.ray.sealing import ChannelKeys, SealError
from poseidon.cluster.rendezvous.task_connection import TaskChannel, TaskConnection
from poseidon.cluster.rendezvous.wire import Kind, Message
from poseidon.cluster.ssh.channel import Finished
from poseidon.errors import JobError, printable

POLL_S = 2.0
CALL_S = 60.0
"""How long a call that does not wait for output may take."""
JOIN_S = 1.0
CALLS = ("put", "get", "file")
"""Methods of the actor that run at the same time, each on a thread of its own."""


class RayConnection:
    """A connection to one node.

    Args:
        label: the host in messages.
        actor: a handle on its `NodeActor`; owned from here on.
        ray: the module.
        description: what the actor has returned of itself.

    Raises:
        JobError: the node has another version of Poseidon, or is lost.
    """

    def __init__(self, label: str, actor: Any, ray: Any, description: Mapping[str, Any]) -> None:
        self._label = label
        self._actor = actor
        self._ray = ray
        self.python = str(description["python"])
        """The interpreter that runs the actor."""
        version = printable(str(description["version"]))
        if version != __version__:
            raise JobError(
                f"{label}: Poseidon {version} is installed for Ray's Python {self.python}, and "
                f"{__version__} at the launcher; "
                "expected the same"
            )
        keys = ChannelKeys()
        try:
            self._call("connect", keys.public)
            self._send_seal, self._receive_seal = keys.seals(description["public"], PROGRAMS)
            self._file_seals = keys.seals(description["public"], FILES)
        except (OSError, SealError) as error:
            raise JobError(f"{label}: its Ray actor is lost: {error}") from error
        self._file_lock = threading.Lock()
        self._closed = threading.Event()
        self._outgoing: queue.Queue[Message] = queue.Queue()
        self._tasks = TaskConnection(label, "", self._outgoing.put)
        self._threads = [self._thread("send", self._send), self._thread("receive", self._receive)]

    @property
    def label(self) -> str:
        """The host in messages."""
        return self._label

    @property
    def alive(self) -> bool:
        """Whether the node and its actor are up: no loss was noticed yet."""
        return self._tasks.alive

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Finished:
        """Run a program to its end; see `TaskConnection.run`."""
        return self._tasks.run(argv, stdin=stdin, timeout_s=timeout_s)

    def open(self, argv: Sequence[str], *, timeout_s: float = 15.0) -> TaskChannel:
        """Start a program and connect to its standard streams; see `TaskConnection.open`."""
        return self._tasks.open(argv, timeout_s=timeout_s)

    def sftp(self) -> NodeFiles:
        """Open a session for files."""
        return NodeFiles(self._operate)

    def close(self) -> None:
        """End the actor, and with it all that it has started. May be called twice."""
        self._closed.set()
        with contextlib.suppress(Exception):  # Ray may have ended by now
            self._ray.kill(self._actor, no_restart=True)
        self._tasks.lose()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _call(self, method: str, *arguments: object, timeout_s: float = CALL_S) -> Any:
        """Call the actor; return its answer.

        Raises:
            OSError: the node or its actor is lost, or does not answer in time.
        """
        call = getattr(self._actor, method)
        if method in CALLS:
            call = call.options(concurrency_group=method)
        try:
            return self._ray.get(call.remote(*arguments), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise OSError(f"no answer within {timeout_s:g} s") from None
        except Exception as error:
            raise OSError(reason_of(error)) from error

    def _operate(
        self, header: Mapping[str, object], payload: bytes
    ) -> tuple[dict[str, Any], bytes]:
        with self._file_lock:
            send, receive = self._file_seals
            try:
                answer, content = receive.open(self._call("file", send.seal(header, payload)))
            except SealError as error:
                raise OSError(str(error)) from error
        if "error" in answer:
            raise OSError(int(answer["errno"]), str(answer["error"]), str(header["path"]))
        return answer, content

    def _send(self) -> None:
        while not self._closed.is_set():
            try:
                batch = [self._outgoing.get(timeout=POLL_S)]
            except queue.Empty:
                continue
            with contextlib.suppress(queue.Empty):
                while len(batch) < 64:
                    batch.append(self._outgoing.get_nowait())
            self._call("put", [self._sealed(message) for message in batch])

    def _sealed(self, message: Message) -> bytes:
        header = {
            "kind": message.kind.value,
            "program": message.program,
            "arguments": message.arguments,
        }
        return self._send_seal.seal(header, message.payload)

    def _receive(self) -> None:
        while not self._closed.is_set():
            for sealed in self._call("get", POLL_S):
                header, payload = self._receive_seal.open(sealed)
                kind, number = Kind(header["kind"]), int(header["program"])
                self._tasks.take(
                    Message(
                        kind=kind, program=number, status=int(header["status"]), payload=payload
                    )
                )

    def _thread(self, role: str, work: Any) -> threading.Thread:
        def run() -> None:
            # Whatever ends a thread, a lost node above all, ends the connection: its programs count
            # as lost.
            with contextlib.suppress(Exception):
                work()
            self._tasks.lose()

        thread = threading.Thread(
            target=run, name=f"poseidon ray {self._label} {role}", daemon=True
        )
        thread.start()
        return thread


def reason_of(error: BaseException) -> str:
    """Return the first line of an error of Ray that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)
