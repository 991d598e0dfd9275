"""What a script prints, into several files at once."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import TextIO

LOGGER = logging.getLogger("poseidon.engine.module.prints")


class Prints(io.TextIOBase):
    """A standard output. Each line is written at once and whole, so that lines of several threads do not mix.

    A disk that is full costs lines, which is told once, and not the script.

    Args:
        streams: where it goes; they stay open.
    """

    def __init__(self, streams: Sequence[TextIO]) -> None:
        super().__init__()
        self._streams = streams
        self._begun = ""
        self._told = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the first stream."""
        return self._streams[0].encoding

    def fileno(self) -> int:
        """The first stream's, for processes that a script starts."""
        return self._streams[0].fileno()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        whole, end, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if end:
            self._pass_on(whole + end)
        return len(text)

    def flush(self) -> None:
        """Write what is left of a line."""
        left, self._begun = getattr(self, "_begun", ""), ""
        if left:
            self._pass_on(left)

    def _pass_on(self, text: str) -> None:
        for stream in self._streams:
            try:
                stream.write(text)
                stream.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            LOGGER.warning(
                "what the script prints cannot be kept in its log: %s; the job goes on without it",
                error.strerror or error,
            )
