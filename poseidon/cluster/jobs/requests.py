"""Requests to the launcher of a job that runs on this machine, through files beside its record.

`<job>.request` is one JSON object, `{"do": "leave", "host": "node3"}`; the launcher takes it away
and writes `<job>.answer`, `{"done": true, "text": "one sentence"}`. The folder is its user's only.

Law: both files are whole at every moment (`write_whole`). One request is open at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from poseidon.base.durable import write_whole
from poseidon.base.foreign_files import read_in
from poseidon.errors import JobError
from ps_server.json_fields import fields_of, value_of

_POLL_S = 0.05
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequest:
    """A request about one host.

    Attributes:
        do: `leave` or `join`.
        host: its address, or the id of its client.
    """

    do: str
    host: str


class RequestFiles:
    """The two files of one job.

    Args:
        folder: of the records of this machine's jobs.
        job: its id.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._request = folder / f"{job}.request"
        self._answer = folder / f"{job}.answer"

    def ask(self, request: HostRequest, *, runs: Callable[[], bool], limit_s: float) -> str:
        """Ask the launcher; return its answer.

        Args:
            request: the request.
            runs: returns whether the launcher still runs.
            limit_s: how long the answer may take.

        Raises:
            JobError: it cannot do it, and why; or it does not answer.
        """
        self._answer.unlink(missing_ok=True)
        _write(self._request, fields_of(request))
        until_s = time.monotonic() + limit_s
        while (answer := _read(self._answer)) is None:
            if not runs() or time.monotonic() > until_s:
                self._request.unlink(missing_ok=True)
                how = "has ended" if not runs() else f"has not answered within {limit_s:g} s"
                raise JobError(f"the launcher of the job {how}")
            time.sleep(_POLL_S)
        self._answer.unlink(missing_ok=True)
        if answer.get("done") is not True:
            raise JobError(str(answer.get("text")))
        return str(answer.get("text"))

    def take(self) -> HostRequest | None:
        """Return the open request, if there is one, and take it away."""
        fields = _read(self._request)
        if fields is None:
            return None
        self._request.unlink(missing_ok=True)
        with suppress(ValueError):
            return value_of(HostRequest, fields)
        return None

    def answer(self, text: str, *, done: bool) -> None:
        """Answer the request that was taken."""
        _write(self._answer, {"done": done, "text": text})

    def close(self) -> None:
        """Remove a request that nobody has taken."""
        self._request.unlink(missing_ok=True)


def _read(path: Path) -> Mapping[str, object] | None:
    try:
        fields = json.loads(read_in(path.parent, path.name, most_bytes=_LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _write(path: Path, fields: Mapping[str, object]) -> None:
    write_whole(path, json.dumps(fields).encode(), durably=False)  # the job may end
