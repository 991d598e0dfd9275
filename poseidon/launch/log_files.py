"""The launcher's part in logs: what processes on other hosts say is kept here, too, in `<output>/from_hosts/`.

Law: a file for each process, `worker_1.log`, appended to line by line. A file that cannot be written is said once and never
ends a job.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from poseidon.cluster.machinefile import is_loopback
from poseidon.cluster.plan import ProcessName
from poseidon.cluster.supervision.loop import JobCallbacks

FOLDER = "from_hosts"


class LogFiles:
    """Callbacks of a job that hand everything on, and keep other hosts' lines. See `JobCallbacks`.

    Args:
        inner: hears everything too.
        folder: the job's output folder.
    """

    def __init__(self, inner: JobCallbacks, folder: Path) -> None:
        self._inner = inner
        self._folder = folder / FOLDER
        self._files: dict[ProcessName, TextIO] = {}
        self._broken = False

    def on_started(self) -> None:
        """See `JobCallbacks`."""
        self._inner.on_started()

    def on_event(self, name: ProcessName, event: Mapping[str, object]) -> None:
        """See `JobCallbacks`."""
        self._inner.on_event(name, event)

    def on_log(self, name: ProcessName, line: str) -> None:
        """See `JobCallbacks`."""
        if not is_loopback(name.host) and not self._broken:
            self._keep(name, line)
        self._inner.on_log(name, line)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            _, file = self._files.popitem()
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _keep(self, name: ProcessName, line: str) -> None:
        try:
            if name not in self._files:
                self._folder.mkdir(exist_ok=True)
                path = self._folder / f"{name.short.replace(' ', '_')}.log"
                self._files[name] = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
            self._files[name].write(line + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            print(f"warning: cannot write {self._folder}: {error.strerror or error}", file=sys.stderr)
        self._broken = True
