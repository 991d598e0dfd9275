"""Files of a node, for the launcher: the part of an SFTP session that deliveries and snapshots
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 4 << 20

Operation = Callable[[Mapping[str, object], bytes], tuple[dict[str, Any], bytes]]
"""Performs one operation of `node_actor.file_operation` on the node; raises OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStatus:
    """The status of a file.

    Attributes:
        st_size: its bytes.
        st_mode: its type and permissions.
    """

    st_size: int
    st_mode: int


class NodeFiles:
    """A session for files.

    Args:
        operate: performs one operation.
    """

    def __init__(self, operate: Operation) -> None:
        self._operate = operate

    def stat(self, path: str) -> FileStatus:
        """Return the status of a file.

        Raises:
            OSError: there is none, or the node is lost.
        """
        answer, _ = self._operate({"do": "stat", "path": path}, b"")
        return FileStatus(st_size=int(answer["size"]), st_mode=int(answer["mode"]))

    def open(self, filename: str, mode: str) -> NodeFile:
        """Open a file to read (`rb`), to write anew (`wb`) or to append (`ab`).

        Raises:
            OSError: it cannot be opened, or the node is lost.
        """
        if mode == "rb":
            self.stat(filename)
        else:
            self._operate({"do": "create" if mode == "wb" else "append", "path": filename}, b"")
        return NodeFile(filename, self._operate)

    def get(self, remotepath: str, localpath: str) -> None:
        """Copy a file from the node to this machine.

        Raises:
            OSError: it cannot be read or written, or the node is lost.
        """
        source = self.open(remotepath, "rb")
        with open(localpath, "wb") as target:
            while block := source.read(BLOCK_BYTES):
                target.write(block)

    def close(self) -> None:
        """Do nothing: the connection to the node stays."""


class NodeFile:
    """An open file of a node.

    Args:
        path: there.
        operate: performs one operation.
    """

    def __init__(self, path: str, operate: Operation) -> None:
        self._path = path
        self._operate = operate
        self._offset = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`; none at the end."""
        fields = {"do": "read", "path": self._path, "offset": self._offset, "size": size}
        _, content = self._operate(fields, b"")
        self._offset += len(content)
        return content

    def write(self, data: bytes) -> None:
        """Append bytes; they have arrived when this returns."""
        self._operate({"do": "append", "path": self._path}, data)

    def close(self) -> None:
        """Do nothing: the node holds no open file."""
