"""A program whose standard error is a terminal."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.training_processes import WAIT_S, environment


class Terminal:
    """What a program writes to its terminal, as it comes.

    Attributes:
        text: so far.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._ended = False
        self.text = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # the program has ended
            while chunk := os.read(self._descriptor, 4096):
                with self._changed:
                    self.text += chunk.decode("utf-8", errors="replace")
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        """Wait until a text was written."""
        with self._changed:
            self._changed.wait_for(lambda: text in self.text or self._ended, WAIT_S)
            assert text in self.text, self.text

    def close(self) -> None:
        """Wait for the end of the program's output."""
        self._thread.join(WAIT_S)
        os.close(self._descriptor)


@contextmanager
def pseudo_terminal(
    words: Sequence[str], folder: Path
) -> Iterator[tuple[subprocess.Popen[str], Terminal]]:
    """Run a program to the end of the block at the latest.

    Args:
        words: the program and its arguments.
        folder: where it runs.

    Yields:
        The program, with a pipe for its standard output, and its terminal.
    """
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        yield process, terminal
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(WAIT_S)
        terminal.close()
        if process.stdout is not None:
            process.stdout.close()
