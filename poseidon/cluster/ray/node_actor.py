"""The actor of Ray that runs a job's programs on one node, for the launcher.

Law: it uses the standard library and light modules only: each node waits for its import. What it
receives is sealed (`poseidon.cluster.ray.sealing`); Ray sees public keys, sizes and times.
"""

from __future__ import annotations

import queue
import stat
import sys
from pathlib import Path
from typing import Any

from poseidon import __version__
from poseidon.cluster.python_command import module_folders
from poseidon.cluster.ray.sealing import ChannelKeys
from poseidon.cluster.rendezvous.program import TaskProgram
from poseidon.cluster.rendezvous.wire import Kind, Message
from poseidon.settings import inherited_environment

PROGRAMS = "programs"
"""The channel of programs' input and output."""
FILES = "files"
"""The channel of file operations."""
MAX_QUEUED = 64
MAX_BATCH_BYTES = 4 << 20
MAX_READ_BYTES = 8 << 20


class NodeActor:
    """Runs programs and reads and writes files; each method is called by one thread at a time."""

    def __init__(self) -> None:
        self._keys = ChannelKeys()
        self._programs: dict[int, TaskProgram] = {}
        self._output: queue.Queue[Message] = queue.Queue(MAX_QUEUED)

    @property
    def public(self) -> bytes:
        """The public key of this connection."""
        return self._keys.public

    def describe(self) -> dict[str, Any]:
        """Return the node's id, the version, the interpreter, and the public key of this
        connection.
        """
        import ray  # it runs this actor

        return {
            "node": ray.get_runtime_context().get_node_id(),
            "version": __version__,
            "python": sys.executable,
            "public": self._keys.public,
        }

    def connect(self, public: bytes) -> None:
        """Derive the keys of all channels.

        Args:
            public: the launcher's public key.
        """
        self._send, self._receive = self._keys.seals(public, PROGRAMS)
        self._send_file, self._receive_file = self._keys.seals(public, FILES)

    def put(self, batch: list[bytes]) -> None:
        """Take messages for programs, in order."""
        for sealed in batch:
            header, payload = self._receive.open(sealed)
            self._take(
                Kind(header["kind"]), int(header["program"]), header.get("arguments", ()), payload
            )

    def get(self, timeout_s: float) -> list[bytes]:
        """Return messages of programs; none if there are none within the timeout."""
        batch: list[bytes] = []
        size_bytes = 0
        try:
            message = self._output.get(timeout=timeout_s)
            while True:
                header = {
                    "kind": message.kind.value,
                    "program": message.program,
                    "status": message.status,
                }
                batch.append(self._send.seal(header, message.payload))
                size_bytes += len(message.payload)
                if message.kind is Kind.ENDED:
                    self._programs.pop(message.program, None)
                if size_bytes >= MAX_BATCH_BYTES:
                    return batch
                message = self._output.get_nowait()
        except queue.Empty:
            return batch

    def file(self, sealed: bytes) -> bytes:
        """Perform one file operation; return its answer, or the error of the system."""
        header, payload = self._receive_file.open(sealed)
        try:
            answer, content = file_operation(header, payload)
        except OSError as error:
            answer, content = (
                {"errno": error.errno or 0, "error": error.strerror or str(error)},
                b"",
            )
        return self._send_file.seal(answer, content)

    def _take(self, kind: Kind, number: int, arguments: list[str], payload: bytes) -> None:
        program = self._programs.get(number)
        if kind is Kind.START and program is None:
            self._programs[number] = TaskProgram(
                number, arguments, program_environment(), self._output.put
            )
        elif program is not None and kind is Kind.INPUT and payload:
            program.feed(payload)
        elif program is not None and kind is Kind.END_INPUT:
            program.feed(b"")
        elif program is not None and kind is Kind.KILL:
            program.kill()


def program_environment() -> dict[str, str]:
    """Return the environment of programs: the actor's own without Ray's variables, and where
    Poseidon is.
    """
    inherited = inherited_environment()
    own = {name: value for name, value in inherited.items() if not name.startswith("RAY_")}
    return {
        **own,
        "PYTHONPATH": module_folders(inherited.get("PYTHONPATH", "")),
        "PYTHONUNBUFFERED": "1",
    }


def file_operation(header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Perform a file operation.

    Args:
        header: `do` is stat, read, create or append; `path`; `offset` and `size` of what is read.
        payload: what is appended.

    Returns:
        The answer, and what was read.

    Raises:
        OSError: as the system raises it.
    """
    path, do = Path(header["path"]).expanduser(), header["do"]
    if do == "stat":
        status = path.stat()
        return {
            "size": status.st_size,
            "mode": status.st_mode,
            "plain": stat.S_ISREG(status.st_mode),
        }, b""
    if do == "read":
        with path.open("rb") as stream:
            stream.seek(int(header["offset"]))
            return {}, stream.read(min(int(header["size"]), MAX_READ_BYTES))
    with path.open("wb" if do == "create" else "ab") as stream:
        stream.write(payload)
    return {}, b""
